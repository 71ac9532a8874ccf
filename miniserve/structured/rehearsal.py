"""Tries a grammar in a process of its own before it is let into this one.

llguidance cannot be interrupted, and its limits do not cover everything: a short grammar may compile for hours, take
gigabytes, or overflow the stack. Here that ends a child process, with an alarm clock, little memory and a small stack,
and the grammar is refused. What the child survives does no harm where there is more room.

The child is this module, run as a program: JSON lines in, first the vocabulary, then grammars; JSON lines out. Clock
and limits are those of POSIX: elsewhere no grammar is tried, and so none is taken.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import psutil
from llguidance import LLMatcher, LLTokenizer

from miniserve.errors import InternalError, InvalidParameterError
from miniserve.structured.library import Vocabulary, make_tokenizer, parser_limits

logger = logging.getLogger(__name__)

REHEARSAL_SECONDS = 1.5
ANSWER_SECONDS = 10.0  # after which a process does not work, but stands still
START_SECONDS = 60.0
# Steps of each walk, and how often it goes inward where it can: chance alone would end most objects at once, write
# blanks, or stay in the first string. Two long ones come deep.
_WALKS = ((16, 0.7), (128, 1.0), (128, 0.7), *9 * ((16, 0.7),))
_INWARD = ("{", "[", '"', ":", ",")
_WALK_SECONDS = 0.1  # of processor time, for all but the first; most grammars take half of it for all
_MAX_MASK_SECONDS = 0.25  # of processor time
_MAX_GRAMMAR_BYTES = 2**26
_MEMORY_BYTES = 2**31  # address space, most of which is never touched
# Less than any thread has in which a grammar is compiled or followed.
_STACK_BYTES = 2**20
_TOO_HARD = f"it takes more than {REHEARSAL_SECONDS:g} s, or too much memory, to compile"


class Rehearsal:
    """One child process, started when it is needed first, and again after a grammar that ended it.

    For one thread at a time.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self, grammar: str) -> str:
        """Why llguidance should not be given this grammar; empty if it may. Takes `REHEARSAL_SECONDS` at most.

        Raises:
            InvalidParameterError: this system cannot hold a process to limits.
            InternalError: no process can be started, or it was killed or held up by somebody else.
        """
        if os.name != "posix":
            raise InvalidParameterError(
                "structured answers, and calls that are demanded or strict, need a POSIX system: what a grammar may "
                f"cost cannot be limited on {sys.platform}; run the server on Linux or macOS, or leave them out",
                param="structured_outputs",
            )
        if self._process is not None and self._process.poll() is not None:  # by no grammar's doing
            self.close()
        process = self._process or self._start()
        try:
            reply = _exchange(process, {"grammar": grammar}, ANSWER_SECONDS)
        except (OSError, ValueError):  # it has ended
            self.close()
            if process.returncode == -signal.SIGKILL:
                logger.error("the process that tries grammars was killed, or did not answer in %g s", ANSWER_SECONDS)
                raise InternalError("the process that tries grammars was killed: try again") from None
            return _TOO_HARD
        return str(reply["refusal"])

    def close(self) -> None:
        """End the child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what is still in the pipe has no reader
                pipe.close()
        process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        vocabulary = self._vocabulary()
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
            )
            fields = {"tokens": tokens, "special_ids": vocabulary.special_ids, "end_ids": vocabulary.end_ids}
            _exchange(process, fields, START_SECONDS)
        except (OSError, ValueError) as error:
            self.close()
            logger.exception("the process that tries grammars cannot be started")
            raise InternalError("the process that tries grammars cannot be started") from error
        return process


def _exchange(process: subprocess.Popen[bytes], message: object, seconds: float) -> Any:
    """One line there, one line back; raises ValueError or OSError if there is none, in so many seconds at most."""
    assert process.stdin is not None and process.stdout is not None
    # The only way out of a pipe whose other end stands still.
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        _write(process.stdin, message)
        return json.loads(process.stdout.readline())
    finally:
        timer.cancel()


def _write(pipe: IO[bytes], message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


# The child


def rehearse(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compile it and begin some answers: what cannot be done, or is too much; empty if all is well."""
    before = _resident_bytes()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        return matcher.get_error()
    begun, deadline = time.thread_time(), math.inf
    for seed, (num_steps, inward_share) in enumerate(_WALKS):
        if time.thread_time() > deadline:
            break
        if error := _Walk(matcher.deep_copy(), tokenizer, random.Random(seed), inward_share).go(num_steps, deadline):
            return error
        deadline = begun + _WALK_SECONDS  # but the first walk is made to its end
    return "it takes too much memory" if _resident_bytes() - before > _MAX_GRAMMAR_BYTES else ""


class _Walk:
    """Writes the beginning of an answer."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, dice: random.Random, inward_share: float) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._dice = dice
        self._inward_share = inward_share
        self._inward = [ids[0] for text in _INWARD if len(ids := tokenizer.greedy_tokenize(text)) == 1]

    def go(self, num_steps: int, deadline: float) -> str:
        """At most so many steps, and none begins after `deadline`. What is wrong; empty if nothing is."""
        num_written = 0
        while num_written < num_steps and (start := time.thread_time()) < deadline:
            mask = self._matcher.compute_bitmask()
            if time.thread_time() - start > _MAX_MASK_SECONDS:
                return "it takes too long to find out what may come next: too much of it matches at once"
            token_id = self._next_token(mask)
            if token_id is None or not self._matcher.consume_token(token_id) or self._matcher.is_stopped():
                break
            num_written += 1
        return _failure(self._matcher, is_at_start=not num_written)

    def _next_token(self, mask: bytes) -> int | None:
        deeper = [i for i in self._inward if mask[i // 8] >> i % 8 & 1]
        if deeper and self._dice.random() < self._inward_share:
            return deeper[0]
        return _some_token(mask, self._tokenizer, self._dice)


def _failure(matcher: LLMatcher, *, is_at_start: bool) -> str:
    error = matcher.get_error() if matcher.is_error() else ""
    if "NoExtension" in error:  # a dead end is reached by chance, unless it is at the beginning
        error = "no answer is possible" if is_at_start else ""
    elif "satisfy the grammar" in error:  # what the mask allowed
        error = "it asks for text that the model has no tokens for"
    return error


def _some_token(mask: bytes, tokenizer: LLTokenizer, dice: random.Random) -> int | None:
    """One of the allowed tokens that do not end the answer."""
    first, end_ids = dice.randrange(len(mask)), tokenizer.eos_tokens
    for place in (*range(first, len(mask)), *range(first)):
        token_ids = [8 * place + bit for bit in range(8) if mask[place] >> bit & 1] if mask[place] else []
        if allowed := [token_id for token_id in token_ids if token_id not in end_ids]:
            chosen: int = dice.choice(allowed)
            return chosen
    return None


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _serve() -> None:
    read, write = sys.stdin.buffer, sys.stdout.buffer
    fields = json.loads(read.readline())
    tokens = [token.encode("latin-1") for token in fields["tokens"]]
    tokenizer = make_tokenizer(Vocabulary(tokens, fields["special_ids"], fields["end_ids"]))
    _write(write, {})
    for line in read:
        # The alarm ends the process, whatever code is running, and whether or not the parent is still there.
        signal.setitimer(signal.ITIMER_REAL, REHEARSAL_SECONDS)
        refusal = rehearse(tokenizer, json.loads(line)["grammar"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(write, {"refusal": refusal})


def _main() -> None:
    import resource  # not on every system

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is meant
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, _MEMORY_BYTES)):
        with suppress(OSError, ValueError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
