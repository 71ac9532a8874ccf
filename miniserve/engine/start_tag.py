"""The tokens that may spell the tag with which reasoning begins, where a grammar would not let them through.

Owns how far the tag has been spelled, in bytes: a token may be half a character. Whether it is the tag in the end, the
reasoning's splitter says.
"""

from __future__ import annotations

from miniserve.text.tokenizer import Tokenizer

_BEHIND = "\n"  # what models write behind the tag, often with a part of it as one token


class StartTag:
    """Follows the first tokens of one answer.

    The first token of the tag is the one with which the model's tokenizer spells it: any other is more likely to begin
    something else. Once it has begun, in the prompt perhaps, it may go on in any tokens.
    """

    def __init__(self, tokenizer: Tokenizer, tag: str, begun: str = "") -> None:
        self._tokenizer = tokenizer
        self._tag = tag.encode()
        self._first_ids = _first_ids(tokenizer, tag)
        self._seen = begun.encode()

    @property
    def next_ids(self) -> tuple[int, ...]:
        """The tokens with which the tag may begin, or go on."""
        spelled = _without_space(self._seen)
        if not spelled:
            return self._first_ids
        if not self._tag.startswith(spelled):
            return ()
        return self._tokenizer.beginnings_of(self._tag[len(spelled) :] + _BEHIND.encode())

    def push(self, token_id: int) -> None:
        """Follow a token."""
        self._seen = _without_space(self._seen + self._tokenizer.token_bytes(token_id))


def _first_ids(tokenizer: Tokenizer, tag: str) -> tuple[int, ...]:
    """None where the vocabulary cannot spell the tag."""
    if (token_id := tokenizer.added_id(tag)) is not None:
        return (token_id,)
    spellings = [tokenizer.encode_literal(text) for text in (tag, tag + _BEHIND)]
    if tokenizer.decode(spellings[0]) != tag:
        return ()
    return tuple(dict.fromkeys(spelling[0] for spelling in spellings))


def _without_space(data: bytes) -> bytes:
    """White space before the tag does not count; of a character that is half there nobody knows yet."""
    text = data.decode(errors="surrogateescape").lstrip()
    return text.encode(errors="surrogateescape")
