from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deploy.check_queries import Query, ask, dashboard_queries, fill_in, main
from tests.contract.process import ServerProcess
from tests.deploy.files import DEPLOY, ROOT, metrics_in, read_dashboard, read_yaml

RULES = [rule for group in read_yaml("prometheus/alerts.yml")["groups"] for rule in group["rules"]]
MANUAL = ROOT / "docs" / "MONITORING.md"


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_uses_what_the_server_exposes(exposed: dict[str, set[str]], rule: dict[str, str]) -> None:
    assert metrics_in(rule["expr"]) <= exposed.keys()
    assert metrics_in(rule["expr"]) or 'up{job="miniserve"}' in rule["expr"]
    assert f"| {rule['alert']} |" in MANUAL.read_text()


def test_rules_and_target_are_loaded() -> None:
    config = read_yaml("prometheus/prometheus.yml")
    assert [(DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["miniserve"]


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "deploy/prometheus/prometheus.yml"), ("test", "rules", "tests/deploy/alerts_test.yml")],
)
def test_promtool(promtool: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run([promtool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_has_data(prometheus: str, server: ServerProcess) -> None:
    """A real Prometheus scrapes the server while it works."""
    command = [sys.executable, "deploy/check_queries.py", "--url", server.url, "--prometheus", prometheus]
    done = subprocess.run([*command, "--scrape-interval", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    num_queries = len(dashboard_queries(read_dashboard()))
    assert done.stdout.count("\nok   ") + done.stdout.startswith("ok   ") == num_queries + 1  # and the rules


# The check itself


def test_rows_and_log_panels_have_no_queries_for_prometheus() -> None:
    dashboard = {
        "panels": [
            {"type": "row", "title": "A section"},
            {"title": "Log", "targets": [{"datasource": {"type": "loki"}, "expr": "{a}", "refId": "A"}]},
            {
                "title": "One",
                "targets": [{"datasource": {"type": "prometheus"}, "expr": "a", "legendFormat": "{{model_name}} p50"}],
            },
        ]
    }
    assert dashboard_queries(dashboard) == [Query("One, p50", "a")]


def test_variables_are_filled_in() -> None:
    assert fill_in('rate(a{b=~"$model"}[$__rate_interval])', 5) == 'rate(a{b=~".*"}[20s])'


def test_an_unknown_variable_is_an_error() -> None:
    """Bug kind: Prometheus takes a regular expression with a variable's name in it, which matches nothing."""
    with pytest.raises(ValueError, match=r"\$instance .* add it to fill_in"):
        fill_in('a{b=~"$instance"}', 5)


def answering(body: object) -> httpx.Client:
    return httpx.Client(
        base_url="http://prometheus", transport=httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    )


def test_not_a_number_is_no_data() -> None:
    """Bug kind: a quantile of nothing is a series, and a check that counts series is content."""
    values = [{"value": [0, text]} for text in ("NaN", "+Inf", "0", "1.5")]
    with answering({"status": "success", "data": {"result": values}}) as server:
        assert ask(server, "a") == [0.0, 1.5]


def test_a_refused_query_is_an_error() -> None:
    refusal = {"status": "error", "error": "parse error at char 1"}
    with answering(refusal) as server, pytest.raises(ValueError, match="refuses a: parse error at char 1"):
        ask(server, "a")


def test_no_prometheus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--prometheus", str(tmp_path / "none")]) == 2
    assert "name it with --prometheus" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so before it starts Prometheus, for which any program can stand here."""
    assert main(["--url", "http://127.0.0.1:1", "--prometheus", sys.executable]) == 2
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_query_without_data_fails_the_check(
    prometheus: str, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it ends: what it waits for never comes."""
    arguments = ["--url", server.url, "--prometheus", prometheus, "--scrape-interval", "1", "--timeout", "0"]
    monkeypatch.setattr("deploy.check_queries.dashboard_queries", lambda _: [Query("Ghost", "miniserve_ghost")])
    assert main(arguments) == 1
    assert "NO   Ghost: no data for miniserve_ghost" in capsys.readouterr().out
