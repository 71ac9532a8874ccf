"""Token ids of one request to text, as they come. Owns the bytes of a character that is not complete yet.

The same bytes as `Tokenizer.decode`, through Python's incremental UTF-8 decoder: the joined pushes equal the
decode of the whole by construction, at a cost per token that does not grow with the text. Does not know stop
strings, nor what the special tokens that it shows are for.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from miniserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the generated tokens of one request into text; the prompt is never pushed.

    Args:
        tokenizer: the model's.
        skip_special_tokens: special tokens leave no text,
        shown_ids: but these do.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_ids = shown_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; empty while a character is half there."""
        if self._shown_ids:
            data = b"".join(map(self._bytes_of, token_ids))
        else:
            data = self._tokenizer.decode_bytes(token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes((token_id,), skip_special_tokens=token_id not in self._shown_ids)
