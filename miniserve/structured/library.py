"""How llguidance is set up here: its limits, and the vocabulary that its grammars are matched against.

The rehearsal's process imports this too, so it imports little. Knows no requests, and no single grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLParserLimits, LLTokenizer

# Only the first token of what is forced is of interest, and no token is nearly as long.
_MAX_FORCED_TEXT = 512  # characters

TokenizeText = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar has to know of a tokenizer.

    Attributes:
        tokens: bytes by token id, exactly those that the token is shown as.
        special_ids: control tokens: no text of a grammar is ever spelled by one, only its name in a grammar.
        end_ids: those that end an answer, allowed where the grammar may end. At least one.
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    end_ids: Sequence[int]


class _Wrapper:
    """A vocabulary in the form that llguidance takes; it calls the object to tokenise text that a grammar forces."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokenize: TokenizeText, fallback: TokenizeText | None = None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self._tokenize = tokenize
        self._fallback = fallback

    def __call__(self, text: str) -> Sequence[int]:
        text = text[:_MAX_FORCED_TEXT]
        token_ids = self._tokenize(text)
        if self._fallback is None or self._spells(token_ids, text):
            return token_ids
        return self._fallback(text)

    def _spells(self, token_ids: Sequence[int], text: str) -> bool:
        """A tokenizer may have ids that the model has not, and lose what it cannot spell."""
        is_known = max(token_ids, default=-1) < len(self.tokens)
        return is_known and b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode()


def make_tokenizer(vocabulary: Vocabulary, tokenize: TokenizeText | None = None) -> LLTokenizer:
    """The vocabulary as llguidance wants it. Takes 0.2 s for 50,000 tokens, 0.6 s for 150,000.

    Args:
        vocabulary: of the model.
        tokenize: as the model's tokenizer would, special tokens spelled in the text being text; None takes the longest
            token at each place.
    """
    end_ids = list(vocabulary.end_ids)
    plain = LLTokenizer(_Wrapper(vocabulary, lambda _: ()), eos_token=end_ids, slices=[])  # type: ignore[arg-type]
    greedy = plain.greedy_tokenize
    return LLTokenizer(_Wrapper(vocabulary, tokenize or greedy, greedy), eos_token=end_ids)  # type: ignore[arg-type]


def parser_limits(*, spare: int = 1) -> LLParserLimits:
    """What one grammar may cost; beyond it the matcher fails.

    Args:
        spare: an answer has more room than its rehearsal, which does not come by every place.

    `step_max_items` is a fifth of the default. A mask usually takes 0.1 to 3 ms; of grammars made to be slow, a rule
    with itself as its first part in 100 alternatives takes 70 ms up to that limit, 300 alternatives take 500 ms, which
    the rehearsal refuses. With spare room, all of it is that much more.
    """
    return LLParserLimits(step_max_items=10_000 * spare, max_items_in_row=2000 * spare, verbose_errors=False)
