"""The Dockerfile and the systemd unit start a server that the command line knows."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from dataclasses import fields
from pathlib import PurePosixPath

from miniserve.config import EngineConfig, ServerConfig, flag_name
from tests.deploy.files import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


FLAGS = {flag_name(field.name) for config in (EngineConfig, ServerConfig) for field in fields(config)}


def check_serves(command: list[str]) -> dict[str, str]:
    """The flags of a command that must be `miniserve serve`, with flags that there are."""
    program, subcommand, *flags = command
    assert (PurePosixPath(program).name, subcommand) == ("miniserve", "serve")
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.keys() <= FLAGS
    return given


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(DEPLOY / "miniserve.service")
    return parser["Service"]


def test_the_image_starts_a_server() -> None:
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert entry is not None
    given = check_serves(json.loads(entry[1]))
    assert given == {"--host": "0.0.0.0"}  # of the container; what is published is the user's choice


def test_the_image_s_port_is_the_default_one() -> None:
    port = ServerConfig().port
    assert f"EXPOSE {port}\n" in DOCKERFILE and f"http://127.0.0.1:{port}/health" in DOCKERFILE


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for line in sources for name in line.split()}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert names == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_images_are_pinned() -> None:
    images = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(images) == 2 and all(re.search(r":\d+\.\d+", image) for image in images)
    assert re.search(r"pip install .*uv==\d+\.\d+\.\d+$", DOCKERFILE, re.MULTILINE)


def test_the_unit_starts_a_server() -> None:
    command = shlex.split(unit()["ExecStart"])
    assert command[0].startswith(unit()["WorkingDirectory"])
    assert check_serves(command)["--host"] == ServerConfig().host


def test_the_unit_waits_for_running_requests() -> None:
    """Bug kind: systemd kills after its own time, and the answers that the server wanted to finish are cut."""
    assert int(unit()["TimeoutStopSec"]) > ServerConfig().timeout_graceful_shutdown
