"""Libraries in Rust that go wrong, as ordinary exceptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LibraryPanicError(Exception):
    """A library has met what its authors held to be impossible."""


def panics_as_errors(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let callers see a panic as any other fault of one request.

    The bindings raise it as a `BaseException` that is no `Exception`, so that nobody who keeps faults apart from one
    another would catch it.

    Raises:
        LibraryPanicError: the library panicked.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise LibraryPanicError(str(panic)) from panic

    return call
