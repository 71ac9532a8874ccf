"""Grammars, and answers on their way through one. Owns the cache of compiled grammars, and what compiling may cost.

Knows a vocabulary as bytes and ids; neither the model nor tensors.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from miniserve.errors import InvalidParameterError, QueueFullError
from miniserve.panics import panics_as_errors
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.library import Vocabulary, make_tokenizer, parser_limits
from miniserve.structured.named_tokens import misnamed_token
from miniserve.structured.numbers import inexact_number, lossy_multiple
from miniserve.structured.optional import too_many_optional
from miniserve.structured.reasons import in_words
from miniserve.structured.references import misread_reference
from miniserve.structured.rehearsal import Rehearsal
from miniserve.structured.shortest import unfinishable
from miniserve.structured.sources import refused, to_grammar

_MAX_CACHED_GRAMMARS = 64
_MAX_CACHED_CHARACTERS = 2**20
_NUM_REHEARSALS = 2
_MAX_WAIT_SECONDS = 10.0  # for one of them, which may have to be started first, on cores that are busy
# What the library does not notice, or not before it is in the middle of an answer.
_CHECKS = (inexact_number, lossy_multiple, misread_reference, too_many_optional)


class GrammarError(Exception):
    """An answer cannot go on within its grammar."""


class Tokenizer(Protocol):
    """What is needed of the model's tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token is shown as."""

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token rather than text."""

    def encode_literal(self, text: str) -> list[int]:
        """Tokens of `text`, none of them special."""


class Matcher:
    """Follows one answer. Not for two threads at once."""

    @panics_as_errors
    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._forced = self._find_forced()

    @property
    def num_words(self) -> int:
        """How many int32 a mask has."""
        return -(-self._tokenizer.vocab_size // 32)

    @property
    @panics_as_errors
    def complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @panics_as_errors
    def accept(self, token_ids: Iterable[int]) -> None:
        """Go on by these tokens.

        Raises:
            GrammarError: they are not allowed here, or following them takes too much.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(in_words(self._matcher.get_error()))
        self._forced = self._find_forced()

    @panics_as_errors
    def try_accept(self, token_id: int) -> bool:
        """Go on by this token if it is allowed here; returns whether it was.

        Raises:
            GrammarError: following it takes too much.
        """
        is_allowed = self._matcher.try_consume_tokens([token_id]) == 1
        if self._matcher.is_error():
            raise GrammarError(in_words(self._matcher.get_error()))
        self._forced = self._find_forced()
        return is_allowed

    @panics_as_errors
    def accept_text(self, text: str) -> None:
        """Go on by `text`, whatever its tokens. Raises as `accept`."""
        self.accept(self._tokenizer.greedy_tokenize(text))

    @panics_as_errors
    def token_of(self, text: str) -> int | None:
        """The token that is shown as exactly `text`; None where it takes several."""
        token_ids = self._tokenizer.greedy_tokenize(text)
        return token_ids[0] if len(token_ids) == 1 else None

    def forced(self) -> tuple[int, ...]:
        """The tokens that have to come next, as the tokenizer spells what is forced; none where there is a choice."""
        return self._forced

    @panics_as_errors
    def allows(self, token_id: int) -> bool:
        """Whether the mask has this token: it takes microseconds, the whole mask a tenth of a millisecond."""
        forced = self.forced()
        return token_id == forced[0] if forced else self._matcher.validate_tokens([token_id]) == 1

    @panics_as_errors
    def fill(self, row: NDArray[np.int32]) -> None:
        """Write the mask of what may come next.

        Args:
            row: int32 [num_words], contiguous; bit i % 32 of word i // 32 is set if token i is allowed.

        Raises:
            GrammarError: nothing may come, or finding out takes too much.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarError(in_words(self._matcher.get_error()))

    def _find_forced(self) -> tuple[int, ...]:
        """At once, while the memory that it reads is still in the processor's cache: a step later it is not."""
        return tuple(self._matcher.compute_ff_tokens())


class Grammar:
    """A compiled grammar, at its start. Never changes; one may serve any number of answers.

    Attributes:
        has_begun: it is of the rest of an answer, whose beginning is given.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, *, has_begun: bool = False) -> None:
        self.has_begun = has_begun
        self._matcher = matcher
        self._tokenizer = tokenizer

    @panics_as_errors
    def start(self) -> Matcher:
        """Begin an answer."""
        return Matcher(self._matcher.deep_copy(), self._tokenizer)

    @panics_as_errors
    def after(self, text: str) -> Grammar:
        """The grammar of what follows `text`, with which the answer begins.

        Raises:
            GrammarError: no answer begins so.
        """
        matcher = self._matcher.deep_copy()
        Matcher(matcher, self._tokenizer).accept_text(text)
        return Grammar(matcher, self._tokenizer, has_begun=True)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest. For any number of threads.

    Args:
        tokenizer: the model's.
        num_token_ids: ids from 0 that the model and the tokenizer both know.
        eos_token_ids: the tokens that end an answer; those that are not known are left out.
        max_tokens: of an answer, at the very most; None sets no bound.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_token_ids: int,
        eos_token_ids: frozenset[int],
        max_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self._longest_token = 1
        known_end_ids = (i for i in eos_token_ids if 0 <= i < num_token_ids)
        end_tokens = {i: tokenizer.token_bytes(i).decode(errors="replace") for i in known_end_ids}
        self._misnamed_token = partial(misnamed_token, num_token_ids=num_token_ids, end_tokens=end_tokens)
        self._vocabulary = partial(_vocabulary, tokenizer, num_token_ids, eos_token_ids)
        self._library_tokenizer: LLTokenizer | None = None
        self._cache = _Cache()
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_NUM_REHEARSALS)
        self._rehearsals = [Rehearsal(self._vocabulary) for _ in range(_NUM_REHEARSALS)]
        weakref.finalize(self, _close, list(self._rehearsals))

    def compile(self, asked: StructuredOutput) -> Grammar:
        """The grammar of an answer. Takes milliseconds, seconds at worst; the first one a second or two more.

        Raises:
            InvalidParameterError: it cannot be compiled, takes too much, or cannot be kept to.
            QueueFullError: others compile, and take long.
        """
        if (cached := self._cache.get(asked)) is not None:
            return cached
        grammar = to_grammar(asked)
        if reason := _unkept(asked) or self._misnamed_token(asked):
            raise refused(asked, reason)
        with self._turn() as rehearsal:
            if (cached := self._cache.get(asked)) is not None:  # while this thread waited
                return cached
            if refusal := rehearsal.refusal(grammar):
                raise _refused(asked, refusal)
            compiled = self._compile(asked, grammar)
            if reason := unfinishable(asked, longest_token=self._longest_token, max_tokens=self._max_tokens):
                raise refused(asked, reason)
            self._cache.put(asked, compiled)
        return compiled

    def close(self) -> None:
        """End the processes that were started. It may be used again."""
        _close(self._rehearsals)

    @contextmanager
    def _turn(self) -> Iterator[Rehearsal]:
        if not self._turns.acquire(timeout=_MAX_WAIT_SECONDS):
            raise QueueFullError("other grammars are being compiled, which takes long: try again later")
        try:
            with self._lock:
                rehearsal = self._rehearsals.pop()  # the one used last, so that a second one starts only in need
            try:
                yield rehearsal
            finally:
                with self._lock:
                    self._rehearsals.append(rehearsal)
        finally:
            self._turns.release()

    def _compile(self, asked: StructuredOutput, grammar: str) -> Grammar:
        tokenizer = self._library()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(spare=2))
        if matcher.is_error():
            raise _refused(asked, matcher.get_error())
        matcher.compute_bitmask()  # copies inherit what it has found out
        return Grammar(matcher, tokenizer)

    def _library(self) -> LLTokenizer:
        with self._lock:
            if self._library_tokenizer is None:
                vocabulary = self._vocabulary()
                self._longest_token = max(map(len, vocabulary.tokens))
                self._library_tokenizer = make_tokenizer(vocabulary, self._tokenizer.encode_literal)
            return self._library_tokenizer


class _Cache:
    """The grammars used last, bounded in number and in the length of their sources."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def get(self, asked: StructuredOutput) -> Grammar | None:
        """The grammar, which is now the one used last; None if it is not here."""
        with self._lock:
            if asked in self._grammars:
                self._grammars.move_to_end(asked)
            return self._grammars.get(asked)

    def put(self, asked: StructuredOutput, grammar: Grammar) -> None:
        """Keep it, and forget those that are too many."""
        with self._lock:
            if asked not in self._grammars:
                self._num_characters += len(asked.source)
            self._grammars[asked] = grammar
            while len(self._grammars) > _MAX_CACHED_GRAMMARS or self._num_characters > _MAX_CACHED_CHARACTERS:
                oldest, _ = self._grammars.popitem(last=False)
                self._num_characters -= len(oldest.source)


def _vocabulary(tokenizer: Tokenizer, num_token_ids: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    token_ids = range(num_token_ids)
    tokens = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    # An end token ends the answer wherever it comes, also where the tokenizer takes it for text.
    special_ids = [i for i in token_ids if i in eos_token_ids or tokenizer.is_special(i)]
    end_ids = [i for i in token_ids if i in eos_token_ids]
    if end_ids:
        return Vocabulary(tokens, special_ids, end_ids)
    # llguidance needs one: a token that the model does not have.
    return Vocabulary([*tokens, b"<end>"], [*special_ids, num_token_ids], [num_token_ids])


def _unkept(asked: StructuredOutput) -> str:
    """Why a grammar would not keep to what is asked for; empty if it would, as far as is known."""
    try:
        return next(filter(None, (check(asked) for check in _CHECKS)), "")
    except RecursionError:
        return "it is nested too deeply"


def _close(rehearsals: Iterable[Rehearsal]) -> None:
    for rehearsal in rehearsals:
        rehearsal.close()


def _refused(asked: StructuredOutput, message: str) -> InvalidParameterError:
    """What llguidance says, in our words. Only a grammar of the user's own has places that mean something."""
    return refused(asked, in_words(message, shows_place=asked.kind == "grammar" and not asked.sent_as))
