"""Sockets before the server runs: what cannot be had is said in one line, and a stale socket is no obstacle."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miniserve.config import ServerConfig
from miniserve.errors import ConfigError
from miniserve.listener import listening_socket
from miniserve.logs import configure_logging, flush_logs


@pytest.fixture(autouse=True)
def restored_loggers() -> Iterator[None]:
    """`configure_logging` changes loggers that the whole process shares."""
    loggers = [logging.getLogger(name) for name in ("miniserve", "uvicorn", "uvicorn.access")]
    before = [(logger.level, logger.propagate, logger.handlers, logger.filters) for logger in loggers]
    yield
    for logger, (level, propagate, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers, logger.filters = propagate, handlers, filters


def test_a_free_port_is_taken() -> None:
    with listening_socket(ServerConfig(port=0)) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and port > 0
        with socket.create_connection((host, port), timeout=5):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no such bound")
@pytest.mark.parametrize(("seconds", "milliseconds"), [(7, 7000), (10**9, 2**31 - 1)])
def test_connections_inherit_the_time_for_unread_answers(seconds: int, milliseconds: int) -> None:
    with (
        listening_socket(ServerConfig(port=0, timeout_unread=seconds)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
    ):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with listening_socket(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"),
            listening_socket(ServerConfig(port=port)),
        ):
            pass


def test_an_ipv6_address() -> None:
    try:
        with listening_socket(ServerConfig(host="::1", port=0)) as listener:
            assert listener.family == socket.AF_INET6
    except ConfigError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


def test_a_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening_socket(ServerConfig(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()


def test_a_stale_unix_socket_is_no_obstacle(tmp_path: Path) -> None:
    """Bug kind: a killed server leaves its socket file, and the next start fails on it."""
    path = tmp_path / "a.sock"
    killed = socket.socket(socket.AF_UNIX)
    killed.bind(str(path))
    killed.close()
    assert path.is_socket()
    with listening_socket(ServerConfig(uds=str(path))), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_the_socket_of_a_living_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with listening_socket(ServerConfig(uds=str(path))):
        with (
            pytest.raises(ConfigError, match=r"--uds.*another server"),
            listening_socket(ServerConfig(uds=str(path))),
        ):
            pass
        assert path.is_socket()


def test_without_an_access_log_uvicorn_finds_no_handler() -> None:
    """It formats a line whenever it finds one, however high the level is."""
    configure_logging(ServerConfig(access_log=False))
    assert not logging.getLogger("uvicorn.access").hasHandlers()
    configure_logging(ServerConfig(access_log=True))
    assert logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO)


def test_the_access_log_leaves_out_what_monitoring_asks_all_day(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging(ServerConfig())
    line = '%s - "%s %s HTTP/%s" %d'
    for path in ("/health", "/metrics", "/v1/models"):
        logging.getLogger("uvicorn.access").info(line, "1.2.3.4:5", "GET", path, "1.1", 200)
    flush_logs()
    logged = capfd.readouterr().err
    assert "GET /v1/models" in logged and "/health" not in logged and "/metrics" not in logged
