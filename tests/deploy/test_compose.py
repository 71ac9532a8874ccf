from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest

from tests.contract.process import ServerProcess
from tests.deploy.files import DEPLOY, read_dashboard, read_yaml

COMPOSE = read_yaml("docker-compose.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
JOURNAL: dict[str, dict[str, Any]] = read_yaml("docker-compose.journal.yml")["services"]
PROMTAIL_FILES = ("file.yml", "journal.yml")


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Host path or volume by the path in the container."""
    parts = [re.fullmatch(r"(.+?):(/[^:]*)(:ro)?", volume) for volume in service["volumes"]]
    return {part[2]: re.sub(r"\$\{\w+:-(.*)\}", r"\1", part[1]) for part in parts if part}


def mounted_file(service: dict[str, Any], path: str) -> Path:
    """The file of this repository that the container sees at `path`."""
    for inside, outside in mounts(service).items():
        if PurePosixPath(path).is_relative_to(inside) and outside.startswith("./"):
            return DEPLOY / outside / PurePosixPath(path).relative_to(inside)
    raise AssertionError(f"nothing of the repository is mounted at {path}")


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_on_this_machine_only(name: str) -> None:
    """Bug kind: a port without an address is open to the whole network, and Docker goes around the firewall."""
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in SERVICES[name].get("ports", ()))


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there(name: str) -> None:
    for outside in mounts(SERVICES[name]).values():
        if outside.startswith("./"):
            assert (DEPLOY / outside).is_dir(), outside
        else:
            assert outside in COMPOSE["volumes"], outside
    assert len(mounts(SERVICES[name])) == len(SERVICES[name]["volumes"])


def test_every_volume_is_used() -> None:
    used = {outside for service in SERVICES.values() for outside in mounts(service).values()}
    assert set(COMPOSE["volumes"]) <= used


@pytest.mark.parametrize("command", [*(SERVICES[name] for name in SERVICES), *JOURNAL.values()])
def test_configuration_files_are_mounted(command: dict[str, Any]) -> None:
    service = command if "image" in command else {**SERVICES["promtail"], "command": command["command"]}
    named = [argument.partition("=")[2] for argument in service.get("command", ()) if "config.file" in argument]
    named += [path for path in service.get("environment", {}).values() if path.endswith(".json")]
    assert named and all(mounted_file(service, path).is_file() for path in named)


def test_grafana_finds_the_dashboard() -> None:
    [provider] = read_yaml("grafana/provisioning/dashboards/miniserve.yml")["providers"]
    assert (mounted_file(SERVICES["grafana"], provider["options"]["path"]) / "miniserve.json").is_file()


def test_services_are_called_by_their_names() -> None:
    """Data sources, and promtail's way to Loki: a service of this file, at the port it publishes."""
    sources = read_yaml("grafana/provisioning/datasources/miniserve.yml")["datasources"]
    clients = [client for name in PROMTAIL_FILES for client in read_yaml(f"promtail/{name}")["clients"]]
    urls = [httpx.URL(item["url"]) for item in (*sources, *clients)]
    assert {url.host for url in urls} == {"prometheus", "loki"}
    for url in urls:
        assert f"127.0.0.1:{url.port}:{url.port}" in SERVICES[url.host]["ports"]
    assert read_yaml("loki/loki.yml")["server"]["http_listen_port"] == 3100


def test_prometheus_reaches_the_host() -> None:
    [job] = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    [target] = [target for config in job["static_configs"] for target in config["targets"]]
    assert f"{target.partition(':')[0]}:host-gateway" in SERVICES["prometheus"]["extra_hosts"]


def test_the_journal_override_changes_what_is_there() -> None:
    assert JOURNAL.keys() <= SERVICES.keys()
    assert (DEPLOY / "miniserve.service").is_file()
    [job] = read_yaml("promtail/journal.yml")["scrape_configs"]
    assert job["journal"]["matches"] == "_SYSTEMD_UNIT=miniserve.service"
    assert any(volume.startswith(f"{job['journal']['path']}:") for volume in JOURNAL["promtail"]["volumes"])


# Log lines


def promtail_stage(name: str, kind: str) -> dict[str, Any]:
    [job] = read_yaml(f"promtail/{name}")["scrape_configs"]
    [stage] = [stage[kind] for stage in job["pipeline_stages"] if kind in stage]
    assert isinstance(stage, dict)
    return stage


def test_both_ways_of_the_log_set_the_label_that_the_dashboard_selects() -> None:
    [from_file] = read_yaml("promtail/file.yml")["scrape_configs"]
    [from_journal] = read_yaml("promtail/journal.yml")["scrape_configs"]
    labels = [from_file["static_configs"][0]["labels"], from_journal["journal"]["labels"]]
    assert [label["job"] for label in labels] == ["miniserve", "miniserve"]
    expressions = [t["expr"] for p in read_dashboard()["panels"] for t in p.get("targets", ()) if p["type"] == "logs"]
    assert len(expressions) == 2 and all(e.startswith('{job="miniserve"}') for e in expressions)
    assert labels[0]["__path__"].startswith("/var/log/miniserve/")
    assert "/var/log/miniserve" in mounts(SERVICES["promtail"])


@pytest.mark.parametrize("name", PROMTAIL_FILES)
def test_promtail_understands_the_server_s_lines(server: ServerProcess, name: str) -> None:
    """Each line of a real log begins an entry, but for the lines of a traceback; its level is found."""
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "Hi"}).raise_for_status()
        http.post("/v1/completions", json={"prompt": "<<raise 0>>"})
    server.wait_for_line('"POST /v1/completions HTTP/1.1" 500')  # the last line of that request
    first_line = promtail_stage(name, "multiline")["firstline"]
    level = re.compile(promtail_stage(name, "regex")["expression"])
    entries = [line for line in server.log if re.match(first_line, line)]
    rest = [line for line in server.log if line not in entries]
    assert any(line.startswith("[miniserve] serving") for line in entries)
    assert "Traceback (most recent call last):" in rest and not any(" INFO " in line for line in rest)
    found = {match["level"] for line in entries if (match := level.match(line))}
    assert {"INFO", "ERROR"} <= found <= {"INFO", "WARNING", "ERROR", "CRITICAL"}


def test_the_second_log_panel_finds_the_access_lines(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={"prompt": "Hi"}).raise_for_status()
        http.get("/v1/models").raise_for_status()
    server.wait_for_line("GET /v1/models")
    [panel] = [panel for panel in read_dashboard()["panels"] if panel["title"] == "API calls"]
    contained = panel["targets"][0]["expr"].split("`")[1]
    lines = [line for line in server.log if contained in line]
    assert lines and all("/v1/completions" in line for line in lines)
