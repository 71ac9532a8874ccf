"""Logprobs in OpenAI's two shapes: a list of objects for chat, four parallel lists for completions. And of a prompt.

A token is bytes and not always text: half a character is shown escaped, as `\\xe4\\xbd`, with the true bytes beside it
(chat) or behind "bytes:" (completions). Does not know where the numbers come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Protocol

from miniserve.outputs import TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no minus infinity
Entry = tuple[int, TokenLogprobs | None]  # a token, and how probable it was (None: nothing precedes it)


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's true bytes."""

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token."""


class LogprobsFormat(Protocol):
    """Formats the logprobs of one choice, piece by piece: the joined pieces are the whole."""

    def format(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """The next tokens' part."""


class ChatLogprobs:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer

    def format(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """The next tokens' part."""
        return {"content": [self._token(entry) for _, entry in entries if entry is not None]}

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._candidate(*candidate) for candidate in entry.top]
        return {**self._candidate(entry.token_id, entry.logprob), "top_logprobs": top}

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`.

    Args:
        skip_special: special tokens leave no text, so they move no offset.
        start: the offset of the first token; below 0 where a prompt's first tokens are not part of its text.
        end_of_prompt: the offset of the first output token, where the prompt is among the tokens.
        num_prompt_tokens: how many of the tokens are the prompt's.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        skip_special: bool,
        start: int = 0,
        end_of_prompt: int = 0,
        num_prompt_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._offset = start
        self._end_of_prompt = end_of_prompt
        self._prompt_tokens_left = num_prompt_tokens
        self._decoder = utf8_decoder()

    def format(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """The next tokens' part."""
        parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in entries:
            parts["tokens"].append(self._key(token_id))
            parts["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            parts["top_logprobs"].append(None if entry is None else self._top(entry))
            parts["text_offset"].append(self._next_offset(token_id))
        return parts

    def _next_offset(self, token_id: int) -> int:
        """The offset of this token; moves on behind it."""
        if self._prompt_tokens_left > 0:
            self._prompt_tokens_left -= 1
            offset = min(max(self._offset, 0), self._end_of_prompt)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            if self._prompt_tokens_left == 0:
                self._offset = self._end_of_prompt
                self._decoder.reset()
            return offset
        offset = self._offset
        if not (self._skip_special and self._tokenizer.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The candidates and the token itself. Of two that read the same, the more probable stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._key(token_id), finite(logprob))
        return top

    def _key(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id), prefix="bytes:")


def format_prompt_logprobs(
    entries: Iterable[Entry], num_top: int, tokenizer: TokenBytes
) -> list[dict[str, Any] | None]:
    """For each token of a prompt, itself and the `num_top` most probable ones there, by token id."""
    return [None if entry is None else _by_token_id(entry, num_top, tokenizer) for _, entry in entries]


def _by_token_id(entry: TokenLogprobs, num_top: int, tokenizer: TokenBytes) -> dict[str, Any]:
    candidates = [(entry.token_id, entry.logprob, entry.rank)]
    candidates += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)]
    described: dict[str, Any] = {}
    for token_id, logprob, rank in candidates:
        text = token_text(tokenizer.token_bytes(token_id))
        described.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": text})
    return described


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Characters as they become whole; what never does is U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def token_text(raw: bytes, *, prefix: str = "") -> str:
    """A token's text; where it is not whole characters, its bytes spelled out behind `prefix`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """A number that JSON can carry."""
    return max(logprob, MIN_LOGPROB)
