"""Where clients come in: the listening socket, and how many files may be open, connections among them."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from miniserve.config import ServerConfig
from miniserve.errors import ConfigError

MOST_FILES = 65536  # as many connections, about; nothing is kept for those that do not come


@contextlib.contextmanager
def listening_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """A bound socket: the Unix socket's path, or the first address of the host.

    Raises:
        ConfigError: it cannot be had; the message says which flag to change.
    """
    if config.uds is not None:
        with _unix_socket(Path(config.uds)) as listener:
            yield listener
        return
    with _tcp_socket(config.host, config.port) as listener:
        _bound_unread_answers(listener, config.timeout_unread)
        yield listener


def _bound_unread_answers(listener: socket.socket, seconds: int) -> None:
    """Have the kernel end connections, which inherit this, whose client takes nothing of what waits for it."""
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(1000 * seconds, 2**31 - 1))


def _tcp_socket(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening here, not later, makes a second server on the same port fail now.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_problem(host, port, error)) from None
    return listener


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what uses it, or take another one with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed to this user; take one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}; see --host and --port"


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: cannot listen there: {error.strerror or error}") from None
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _remove_stale_socket(path: Path) -> None:
    """A killed server leaves its socket behind; a living one must not lose it."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"--uds {path} exists and is not a socket; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"--uds {path}: {error.strerror}") from None
    raise ConfigError(f"--uds {path}: another server listens there; stop it, or name another path")


# Open files


def file_limit() -> int | None:
    """How many files this process may have open, connections among them; None where nobody says."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """To what the process may give itself. The usual 1024 are for programs that use `select`."""
    limit = file_limit()
    if sys.platform == "win32" or limit is None:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if limit < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a second bound, which it does not tell of
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
