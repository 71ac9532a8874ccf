"""A panic of a library in Rust concerns the request that met it, as any exception does."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.panics import LibraryPanicError, panics_as_errors
from miniserve.structured.compiler import Grammar, Matcher
from tests.engine.scripted import make_tokenizer


class PanicError(BaseException):
    """As the bindings raise it."""


class Panicking:
    """A library's object, each method of which panics."""

    def __getattr__(self, name: str) -> Any:
        def panic(*_args: Any, **_kwargs: Any) -> Any:
            raise PanicError(f"index out of bounds in {name}")

        return panic


def test_what_is_no_panic_stays_as_it_is() -> None:
    for kind in (ValueError, KeyboardInterrupt, SystemExit):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind

        with pytest.raises(kind):
            panics_as_errors(fail)()
    assert panics_as_errors(lambda a, b: a + b)(1, b=2) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda matcher: matcher.accept([1]),
        lambda matcher: matcher.try_accept(1),
        lambda matcher: matcher.accept_text("a"),
        lambda matcher: matcher.token_of("a"),
        lambda matcher: matcher.allows(1),
        lambda matcher: matcher.complete,
    ],
)
def test_a_grammar(call: Any) -> None:
    """Bug kind: it went by every handler of faults, and ended the engine."""
    matcher = Matcher.__new__(Matcher)
    library: Any = Panicking()
    matcher._matcher = matcher._tokenizer = library
    matcher._forced = ()
    with pytest.raises(LibraryPanicError, match="out of bounds"):
        call(matcher)


def test_the_start_of_a_grammar() -> None:
    library: Any = Panicking()
    with pytest.raises(LibraryPanicError):
        Grammar(library, library).start()


@pytest.mark.parametrize("method", ["encode", "encode_literal"])
def test_a_tokenizer(method: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer._backend = tokenizer._plain = Panicking()  # type: ignore[assignment]
    options = {"add_special_tokens": False} if method == "encode" else {}
    with pytest.raises(LibraryPanicError):
        getattr(tokenizer, method)("a", **options)
