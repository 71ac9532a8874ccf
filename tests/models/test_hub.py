"""Downloads against a stand-in of the hub on this machine, each in a process with its own environment."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"old weights",
    "onnx/config.json": b"{}",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TOKEN = "hf_secret"


@dataclass
class Hub:
    """The stand-in: what it has been asked, and how it answers."""

    url: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization
    gated: bool = False
    silent: bool = False


@pytest.fixture
def stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization")
            hub.requests.append((self.path, authorization))
            if hub.silent:
                time.sleep(30)
                return
            status, headers, body = answer(hub, self.path, authorization)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - http.server wants this name

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


def answer(hub: Hub, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, as the hub gives them."""
    path = path.partition("?")[0]
    model_api, file_path = "/api/models/owner/model", "/owner/model/resolve/"
    if path.startswith(model_api):
        rest = path.removeprefix(model_api).strip("/").split("/")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if rest[0] == "tree":
            return 200, {}, json.dumps([tree_entry(name) for name in FILES]).encode()
        return 200, {}, json.dumps({"id": "owner/model", "sha": commit, "siblings": []}).encode()
    if path.startswith(file_path):
        if hub.gated and authorization != f"Bearer {TOKEN}":
            return 401, {"X-Error-Code": "GatedRepo"}, b""
        commit, name = path.removeprefix(file_path).split("/", 1)
        etag = hashlib.sha256(FILES[name]).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, FILES[name]
    return 401, {"X-Error-Code": "RepoNotFound"}, b""


def tree_entry(name: str) -> dict[str, Any]:
    oid = hashlib.sha1(FILES[name]).hexdigest()
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": oid}


@dataclass
class Outcome:
    """What one download printed: the folder, or the error."""

    folder: Path | None
    error: str
    stderr: str


SCRIPT = """
import json, sys
from miniserve.errors import HubError
from miniserve.models import hub
hub._PROBE_SECONDS = 2.0  # for the test of a hub that never answers
model_id, revision, weights = json.loads(sys.argv[1])
try:
    answer = {"folder": str(hub.download(model_id, revision, weights=weights)), "error": ""}
except HubError as error:
    answer = {"folder": None, "error": str(error)}
print(json.dumps(answer))
"""


def fetch(
    endpoint: str,
    cache: Path,
    model_id: str = "owner/model",
    revision: str | None = None,
    *,
    weights: bool = True,
    **environment: str,
) -> Outcome:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([model_id, revision, weights])],
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), **environment},
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,  # the guard of all tests here against a hang
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    folder = Path(answer["folder"]) if answer["folder"] else None
    return Outcome(folder, answer["error"], done.stderr)


def names(folder: Path | None) -> set[str]:
    assert folder is not None
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_download_takes_what_is_needed_and_says_who_asks(stand_in: Hub, tmp_path: Path) -> None:
    outcome = fetch(stand_in.url, tmp_path, HF_TOKEN=TOKEN)
    assert outcome.error == ""
    assert outcome.folder is not None
    assert names(outcome.folder) == WANTED
    assert (outcome.folder / "model.safetensors").read_bytes() == b"weights"
    # The library may also ask the server things that have nothing to do with the model.
    about_model = [sent for path, sent in stand_in.requests if "owner/model" in path]
    assert len(about_model) > len(WANTED)
    assert set(about_model) == {f"Bearer {TOKEN}"}
    assert outcome.stderr == ""  # no progress bar where there is no terminal


def test_without_weights_they_stay_on_the_hub(stand_in: Hub, tmp_path: Path) -> None:
    assert names(fetch(stand_in.url, tmp_path, weights=False).folder) == WANTED - {"model.safetensors"}


def test_a_revision_is_asked_for_by_name(stand_in: Hub, tmp_path: Path) -> None:
    folder = fetch(stand_in.url, tmp_path, revision="v1").folder
    assert folder is not None
    assert folder.name == COMMITS["v1"]
    unknown = fetch(stand_in.url, tmp_path, revision="v2")
    assert "cannot get owner/model from the hub: it has no revision v2" in unknown.error
    assert "--model smollm2" in unknown.error


def test_an_unknown_model_is_named(stand_in: Hub, tmp_path: Path) -> None:
    outcome = fetch(stand_in.url, tmp_path, "owner/nothing")
    assert "cannot get owner/nothing from the hub: no such model" in outcome.error
    assert "--model smollm2" in outcome.error
    assert "\n" not in outcome.error


def test_what_is_not_a_model_id_is_refused(stand_in: Hub, tmp_path: Path) -> None:
    assert "not a model id" in fetch(stand_in.url, tmp_path, "owner/mo del").error
    assert stand_in.requests == []


def test_a_gated_model_needs_the_token(stand_in: Hub, tmp_path: Path) -> None:
    stand_in.gated = True
    outcome = fetch(stand_in.url, tmp_path)
    assert "gated" in outcome.error
    assert "HF_TOKEN" in outcome.error
    assert names(fetch(stand_in.url, tmp_path, HF_TOKEN=TOKEN).folder) == WANTED


def test_the_cache_serves_when_there_is_no_hub(stand_in: Hub, tmp_path: Path) -> None:
    first = fetch(stand_in.url, tmp_path).folder
    asked = len(stand_in.requests)
    assert fetch(stand_in.url, tmp_path, HF_HUB_OFFLINE="1").folder == first
    assert len(stand_in.requests) == asked
    assert fetch("http://127.0.0.1:9", tmp_path).folder == first


def test_an_incomplete_cache_does_not_serve(stand_in: Hub, tmp_path: Path) -> None:
    """Bug kind: a folder of which only the configuration had come was taken for the model."""
    fetch(stand_in.url, tmp_path, weights=False)
    outcome = fetch(stand_in.url, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and the cached copy is incomplete" in outcome.error


def test_offline_without_a_cache_says_so(stand_in: Hub, tmp_path: Path) -> None:
    outcome = fetch(stand_in.url, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and it is not in the cache" in outcome.error
    assert stand_in.requests == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_no_network_fails_at_once(tmp_path: Path, endpoint: str) -> None:
    outcome = fetch(endpoint, tmp_path)
    assert "the hub cannot be reached" in outcome.error
    assert "it is not in the cache; --model smollm2" in outcome.error


def test_a_hub_that_never_answers_is_given_up(stand_in: Hub, tmp_path: Path) -> None:
    """Bug kind: behind a firewall that swallows packets the start hung for minutes without a word."""
    stand_in.silent = True
    outcome = fetch(stand_in.url, tmp_path)
    assert "the hub cannot be reached" in outcome.error
