"""Random texts of a grammar, as a model that knows nothing would write them under its masks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from miniserve.text.tokenizer import Tokenizer

# What ends strings, objects and tags: chosen half of the time, so that walks end.
ENDING = frozenset('"}]\\n<>/;,')
# Tried every few tokens: no walk writes a whole tag by chance.
TAG = "\n</parameter>\n"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llguidance sees it: special tokens are control tokens, all others are their bytes."""

    ours: Tokenizer
    theirs: LLTokenizer
    end_id: int
    ending: np.ndarray[Any, np.dtype[np.bool_]]  # [num_token_ids]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        ids = range(tokenizer.num_token_ids)
        assert tokenizer.eos_token_id is not None
        ending = [set(_text(tokenizer, token_id)) <= ENDING for token_id in ids]
        wrapper = TokenizerWrapper(_Source(tokenizer))
        return cls(tokenizer, LLTokenizer(wrapper), tokenizer.eos_token_id, np.array(ending))

    def walk(self, lark: str, seed: int, *, beginning: str = "", max_tokens: int = 600) -> str | None:
        """A text of the grammar that begins with `beginning`; None if it is not complete after `max_tokens`."""
        choose = random.Random(seed)
        matcher = self._matcher(lark)
        written = self.ours.encode(beginning, add_special_tokens=False)
        assert matcher.consume_tokens(written), matcher.get_error()
        tag = self.ours.encode(TAG, add_special_tokens=False)
        while len(written) < max_tokens and not matcher.is_stopped():
            allowed = self._allowed(matcher)
            if matcher.is_accepting() and (choose.random() < 0.5 or len(written) > max_tokens // 2):
                return self._decode(written)
            allowed[self.end_id] = False
            if choose.random() < 0.1 and matcher.validate_tokens(tag) == len(tag):
                written += tag
                assert matcher.consume_tokens(tag), matcher.get_error()
                continue
            ending = allowed & self.ending
            ids = np.flatnonzero(ending if ending.any() and choose.random() < 0.5 else allowed)
            written.append(int(choose.choice(ids)))
            assert matcher.consume_token(written[-1]), matcher.get_error()
        assert not matcher.is_error(), matcher.get_error()
        return self._decode(written) if matcher.is_accepting() else None

    def accepts(self, lark: str, text: str) -> bool:
        """Whether `text` is a whole text of the grammar."""
        matcher = self._matcher(lark)
        token_ids = self.ours.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def _matcher(self, lark: str) -> LLMatcher:
        matcher = LLMatcher(self.theirs, grammar_from("lark", lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _allowed(self, matcher: LLMatcher) -> np.ndarray[Any, np.dtype[np.bool_]]:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: len(self.ending)].astype(bool)

    def _decode(self, token_ids: list[int]) -> str:
        return self.ours.decode(token_ids, skip_special_tokens=False)


class _Source:
    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.num_token_ids)
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace") or "?"
