"""The scripted server with parts that fail where a prompt says so.

    python -m tests.faults.faulty_server --port 0

Besides the directives of `tests.contract.scripted_server`, each at token N (from 0) of the answer:

    <<memory N>>      the runner runs out of memory, also when it computes the request alone
    <<sampler N>>     the sampler raises, the same

and at two characters:

    \\x7f             the tokenizer raises when it encodes or decodes it
    ~                a grammar raises when it is to take it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import miniserve.engine.build
from miniserve.cli import main
from miniserve.core.schedule import RunnerOutput, SchedulerOutput
from miniserve.structured.compiler import Matcher
from miniserve.text.tokenizer import Tokenizer
from tests.contract import scripted_server
from tests.contract.scripted_server import DirectedRunner, build_scripted
from tests.engine.scripted import TOKENIZER

POISON, GRAMMAR_POISON = "\x7f", "~"
SECRET = "a secret of the inside"


class FaultyRunner(DirectedRunner):
    """Fails in its two parts."""

    def execute(self, step: SchedulerOutput) -> Any:
        """Out of memory where it was asked for."""
        if _is_asked("memory", step):
            raise MemoryError(SECRET)
        return super().execute(step)

    def sample(
        self, step: SchedulerOutput, logits: Any, masks: Mapping[str, Any] = MappingProxyType({})
    ) -> RunnerOutput:
        """Or nothing."""
        if _is_asked("sampler", step):
            raise RuntimeError(SECRET)
        return super().sample(step, logits, masks)


def _is_asked(fault: str, step: SchedulerOutput) -> bool:
    for item in step.scheduled:
        prompt = Tokenizer.decode(TOKENIZER, item.token_ids[: item.num_prompt_tokens])
        found = re.search(rf"<<{fault} (\d+)>>", prompt)
        if found and item.samples and item.end - item.num_prompt_tokens == int(found[1]):
            return True
    return False


class PoisonedTokenizer(Tokenizer):
    """Cannot stand one character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Unless the poison is in it."""
        if POISON in text:
            raise RuntimeError(SECRET)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The same."""
        data = super().decode_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        if POISON.encode() in data:
            raise RuntimeError(SECRET)
        return data

    def token_bytes(self, token_id: int) -> bytes:
        """The same, when an answer is written: grammars ask for all tokens."""
        data = super().token_bytes(token_id)
        if data == POISON.encode() and sys._getframe(1).f_globals["__name__"].startswith("miniserve.api"):
            raise RuntimeError(SECRET)
        return data


_accept = Matcher.accept


def _accept_or_fail(matcher: Matcher, token_ids: Iterable[int]) -> None:
    """In place of `Matcher.accept`."""
    taken = tuple(token_ids)
    if GRAMMAR_POISON.encode() in Tokenizer.decode_bytes(TOKENIZER, taken):
        raise RuntimeError(SECRET)
    _accept(matcher, taken)


if __name__ == "__main__":
    TOKENIZER.__class__ = PoisonedTokenizer
    Matcher.accept = _accept_or_fail  # type: ignore[method-assign, assignment]
    scripted_server.DirectedRunner = FaultyRunner  # type: ignore[misc]
    miniserve.engine.build.build_engine = build_scripted
    sys.exit(main(["serve", "--model", "scripted", *sys.argv[1:]]))
