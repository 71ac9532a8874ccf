"""The server as a child: it comes up before the eyes of the user, and nothing of it stays."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miniserve.tui import spawned_server
from miniserve.tui.errors import ChatError
from miniserve.tui.settings import Settings, parse_args
from miniserve.tui.spawned_server import SpawnedServer
from tests.tui.chat_server import DEADLINE, ChatServer
from tests.tui.screen import Screen, play
from tests.tui.test_faults import free_port

FAKE = str(Path(__file__).with_name("fake_serve.py"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def logs_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def settings() -> Settings:
    return Settings(base_url=f"http://127.0.0.1:{free_port()}/v1")


@pytest.fixture
def spawned(tmp_path: Path, settings: Settings) -> Iterator[Callable[[str], SpawnedServer]]:
    """Makes a started child of a mode; whatever a test leaves is stopped."""
    servers = []

    def make(mode: str) -> SpawnedServer:
        server = SpawnedServer((sys.executable, FAKE, mode, str(tmp_path)), settings.base_url)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.stop()


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_wait_is_visible_and_ends_with_health(
    spawned: Callable[[str], SpawnedServer], settings: Settings, tmp_path: Path
) -> None:
    server = spawned("serve")

    async def scenario(screen: Screen) -> None:
        await screen.until_shown("weights:  50%")
        assert "the server is loading, " in screen.everything()
        assert "10%" not in screen.everything(), "a progress bar shows its last state only"
        (tmp_path / "healthy").touch()
        await screen.until_shown("tiny")
        assert "loading" not in screen.everything()

    play(scenario, server, base_url=settings.base_url)
    pid = int((tmp_path / "pid").read_text())
    assert server.log == tmp_path / f"miniserve-serve-{pid}.log"
    server.stop()
    assert not is_alive(pid) and server.exit_code == -signal.SIGTERM
    assert server.log.exists(), "whoever stops a server may want to read its log"
    server.remove_log()
    assert not server.log.exists()


def test_a_failed_start_shows_the_end_of_the_log(spawned: Callable[[str], SpawnedServer], settings: Settings) -> None:
    server = spawned("fail")

    async def scenario(screen: Screen) -> None:
        await screen.until_shown("the server ended with code 2")
        assert "error: no such model" in screen.everything() and str(server.log) in screen.everything().replace(
            "\n", ""
        )

    play(scenario, server, base_url=settings.base_url)
    server.remove_log()
    assert server.log.exists(), "its path was on the screen"


def test_a_server_that_died_is_started_again_by_the_next_question(
    spawned: Callable[[str], SpawnedServer], settings: Settings, tmp_path: Path
) -> None:
    server = spawned("serve")
    (tmp_path / "healthy").touch()

    async def scenario(screen: Screen) -> None:
        await screen.until_shown("tiny")
        first = int((tmp_path / "pid").read_text())
        os.kill(first, signal.SIGKILL)
        await screen.until(lambda: server.exit_code is not None, "it dies")
        await screen.ask("Hi")
        await screen.until(lambda: int((tmp_path / "pid").read_text()) != first, "another one starts")

    play(scenario, server, base_url=settings.base_url)


def test_a_child_that_ignores_sigterm_is_killed(
    spawned: Callable[[str], SpawnedServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawned_server, "STOP_SECONDS", 0.2)
    server = spawned("stubborn")
    wait_for((tmp_path / "pid").exists, "it starts")
    server.stop()
    server.remove_log()
    assert server.exit_code == -signal.SIGKILL and server.log.exists()


def test_a_port_in_use_is_not_mistaken_for_the_child(tmp_path: Path) -> None:
    """The health of whoever listens there would pass for the child's."""
    with ChatServer() as other:
        server = SpawnedServer((sys.executable, FAKE, "serve", str(tmp_path)), other.base_url)
        with pytest.raises(ChatError, match=r"in use.*--base-url"):
            server.start()
    assert not list(tmp_path.iterdir())


def test_the_key_goes_through_the_environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys; print(os.environ['MINISERVE_API_KEY'], sys.argv[1:])"
    server = SpawnedServer((sys.executable, "-c", code), settings.base_url, "secret")
    server.start()
    wait_for(lambda: server.exit_code is not None, "it ends")
    key, _, flags = server.last_lines(1).partition(" ")
    assert key == "secret" and "--port" in flags and "secret" not in flags


class Terminal:
    """`tui.py --spawn` with the fake server, in a terminal of its own."""

    def __init__(self, mode: str, folder: Path, base_url: str) -> None:
        command = (sys.executable, FAKE, mode, str(folder))
        flags = ("--spawn", "--base-url", base_url)
        code = f"import sys; from miniserve.tui.main import main; sys.exit(main({command!r}, {flags!r}))"
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            (sys.executable, "-c", code), cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.output = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self.output += data
        except OSError:
            pass  # the other end is closed

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        return self.process.wait(DEADLINE)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, b"\x03"], ids=str)
def test_no_child_stays_however_the_client_ends(
    how: signal.Signals | bytes, settings: Settings, tmp_path: Path
) -> None:
    if how is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells a child of its parent's death")
    (tmp_path / "healthy").touch()
    terminal = Terminal("serve", tmp_path, settings.base_url)
    wait_for(lambda: b"tiny" in terminal.output, "the model's name is on the screen")
    pid = int((tmp_path / "pid").read_text())
    if isinstance(how, bytes):
        terminal.press(how)
    else:
        terminal.process.send_signal(how)
    code = {signal.SIGKILL: -signal.SIGKILL, b"\x03": 0}.get(how, 128 + how if isinstance(how, int) else 0)
    assert terminal.end() == code
    wait_for(lambda: not is_alive(pid), "the child ends")
    assert b"Traceback" not in terminal.output


def test_a_signal_while_the_server_loads(settings: Settings, tmp_path: Path) -> None:
    terminal = Terminal("serve", tmp_path, settings.base_url)
    wait_for(lambda: b"loading" in terminal.output, "it loads")
    terminal.process.terminate()
    assert terminal.end() == 128 + signal.SIGTERM
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_the_reason_of_a_failed_start_stays_in_the_terminal(settings: Settings, tmp_path: Path) -> None:
    terminal = Terminal("fail", tmp_path, settings.base_url)
    wait_for(lambda: b"no such model" in terminal.output, "the reason is shown")
    seen = len(terminal.output)
    terminal.press(b"\x03")
    assert terminal.end() == 2
    wait_for(lambda: b"no such model" in terminal.output[seen:], "it is told again after the screen has gone")


@pytest.mark.parametrize(
    "flags",
    [
        ["--base-url", "127.0.0.1:8000"],
        ["--base-url", "http://host:65536/v1"],
        ["--base-url", "http://host:0/v1"],
        ["--api-key", "k\n"],
        ["--temperature", "nan"],
        ["--serve-args=--model smollm2"],
        ["--spawn", "--serve-args=--port=9000"],
        ["--spawn", "--serve-args='--model"],
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(flags)
    assert exit_.value.code == 2
    assert next(flag for flag in reversed(flags) if flag.startswith("--")).partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ['"unclosed', "--model 'a b", "--model a\\"])
def test_serve_args_that_no_shell_could_split_are_explained(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse said "invalid split value"."""
    with pytest.raises(SystemExit):
        parse_args(["--spawn", f"--serve-args={text}"])
    message = capsys.readouterr().err
    assert f"--serve-args: {text!r} has an open quote, or ends in a backslash" in message


def test_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISERVE_API_KEY", "from the environment")
    settings = parse_args(["--spawn", "--serve-args=--model 'a b' --dtype bfloat16"])
    assert settings.base_url == "http://127.0.0.1:8000/v1" and settings.api_key == "from the environment"
    assert list(settings.serve_args) == ["--model", "a b", "--dtype", "bfloat16"]
    assert parse_args(["--base-url", "https://[::1]:65535/v1", "--temperature", "0"]).temperature == 0
