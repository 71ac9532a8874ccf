"""What tests of grammars share: the embedded model's tokenizer, masks as sets, and answers written at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from miniserve.structured.compiler import Grammar, GrammarCompiler, Matcher
from miniserve.text.tokenizer import Tokenizer

END_ID = 2
END_IDS = frozenset({0, END_ID})


@dataclass(frozen=True)
class Model:
    """A tokenizer and its compiler."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_literal(text)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode_bytes(token_ids).decode()


def allowed(matcher: Matcher) -> set[int]:
    """The mask as token ids."""
    row = np.zeros(matcher.num_words, np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def matches(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer: every token is in the mask, and then the end is."""
    matcher = grammar.start()
    for token_id in model.encode(text):
        if token_id not in allowed(matcher):
            return False
        matcher.accept([token_id])
    return matcher.complete or END_ID in allowed(matcher)


def random_answer(model: Model, grammar: Grammar, *, seed: int, num_tokens: int) -> tuple[str, bool]:
    """A text of tokens drawn evenly from those that are allowed; whether it got to an end."""
    dice, matcher = random.Random(seed), grammar.start()
    token_ids: list[int] = []
    while not matcher.complete and len(token_ids) < num_tokens:
        following = allowed(matcher)
        may_end = bool(following & END_IDS)
        going_on = sorted(following - END_IDS)
        if may_end and (not going_on or dice.random() < 0.5):
            return model.decode(token_ids), True
        # A long answer should get to its end: half of the time, one of the shortest tokens.
        if dice.random() < 0.5:
            going_on = sorted(going_on, key=lambda token_id: len(model.tokenizer.token_bytes(token_id)))[:3]
        token_ids.append(dice.choice(going_on))
        matcher.accept([token_ids[-1]])
    return model.decode(token_ids) if matcher.complete else "", matcher.complete
