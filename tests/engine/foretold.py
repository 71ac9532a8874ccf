"""What a scripted model says, and what has to come of it: told in advance, by code that shares nothing with the engine.

The script depends on the whole prefix and on the seed, so that each sequence has words of its own. It has characters in
several bytes, and pieces of stop strings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from zlib import crc32

from miniserve.core.request import Request
from miniserve.outputs import EngineOutput, FinishReason, TokenLogprobs, Usage
from miniserve.sampling_params import SamplingParams
from tests.engine.scripted import EOS, TOKENIZER, token, tokens

assert TOKENIZER.bos_token_id is not None
BOS: int = TOKENIZER.bos_token_id
CHARACTERS = "é€😀"  # each byte is a token
WORDS = ("a", "b", "S", "ST", "OP", "Hello", " world", "see STOP here")
SAID = {token(word): word.encode() for word in WORDS}
SAID |= {token_id: bytes([byte]) for token_id, byte in zip(tokens(CHARACTERS), CHARACTERS.encode(), strict=True)}
SPECIAL = {EOS: "<eos>", BOS: "<bos>"}
SCRIPT = (*SAID, *SPECIAL)
GOES_ON = {half: rest for char in CHARACTERS for half, rest in pairwise(tokens(char))}
GOES_ON[token("ST")] = token("OP")


def wishes(prefix: Sequence[int], seed: int | None) -> list[int]:
    """The script: the tokens that a greedy model would like to say next, the best first."""
    number = _number(prefix, seed)
    first = number % len(SCRIPT)
    rest = GOES_ON.get(prefix[-1])
    goes_on = [rest] if rest is not None and number % 4 else []  # most of what has begun becomes whole
    return [*goes_on, *SCRIPT[first:], *SCRIPT[:first]]


def next_token(
    prefix: Sequence[int], seed: int | None, banned: Collection[int] = (), allowed: Collection[int] | None = None
) -> int:
    """The best that may be said. What a grammar allows comes before what is banned."""
    fitting = [token_id for token_id in wishes(prefix, seed) if allowed is None or token_id in allowed]
    return next((token_id for token_id in fitting if token_id not in banned), fitting[0])


def logprobs_at(prefix: Sequence[int], token_id: int, number: int) -> TokenLogprobs:
    """What the script thinks of `token_id` behind `prefix`."""
    others = wishes(prefix, None)[:number]
    top = tuple((other, -(rank + 1.0)) for rank, other in enumerate(others))
    return TokenLogprobs(token_id, -(_number(prefix, token_id) % 1000) / 8, top, rank=_number(prefix, 0) % 7 + 1)


def _number(prefix: Sequence[int], seed: int | None) -> int:
    return crc32(repr((*prefix, seed)).encode())


@dataclass
class Answer:
    """All that a request says if nothing goes wrong.

    Attributes:
        shown: for each number of tokens, from 1 on, the whole text that is out with the last of them.
    """

    token_ids: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | str | None = None


def foretell(
    prompt: Sequence[int], asked: SamplingParams, limit: int, places: Sequence[Collection[int]] | None = None
) -> Answer:
    """The answer to a prompt, left alone.

    Args:
        limit: of prompt and answer, in tokens.
        places: what a grammar allows for each token of the answer; None is a free answer.
    """
    answer, data, text = Answer(), b"", ""
    if asked.max_tokens == 0:
        return answer
    while True:
        output = answer.token_ids
        allowed = None if places is None else places[len(output)]
        output.append(next_token([*prompt, *output], asked.seed, _banned(asked, len(output)), allowed))
        by_id = _stops_by_id(asked, output)
        data += b"" if by_id else _said(output[-1], asked)
        is_whole = not by_id and places is not None and len(output) == len(places)
        is_over = by_id or is_whole or len(output) == asked.max_tokens or len(prompt) + len(output) == limit
        before, text = text, data.decode(errors="replace") if is_over else whole_characters(data)
        found = _first_stop(text, len(before), asked.stop) if len(output) >= asked.min_tokens else None
        if found is not None:
            end, stop = found
            answer.shown.append(text[:end] if asked.include_stop_str_in_output else text[: end - len(stop)])
            answer.reason, answer.stop_reason = FinishReason.STOP, stop
            return answer
        if is_over:
            answer.shown.append(text + (_spelled(output[-1], asked) if by_id else ""))
            answer.reason = FinishReason.STOP if by_id or is_whole else FinishReason.LENGTH
            answer.stop_reason = _stop_id(output[-1], asked) if by_id else None
            return answer
        answer.shown.append(text[: len(text) - _num_held(text, asked)])


def _end_ids(asked: SamplingParams) -> set[int]:
    return {*asked.stop_token_ids, *(() if asked.ignore_eos else (EOS,))}


def _banned(asked: SamplingParams, num_before: int) -> set[int]:
    return _end_ids(asked) if num_before < asked.min_tokens else set()


def _stops_by_id(asked: SamplingParams, output: Sequence[int]) -> bool:
    return output[-1] in _end_ids(asked) and len(output) > asked.min_tokens


def _stop_id(token_id: int, asked: SamplingParams) -> int | str | None:
    """What the client is told: nothing of an end-of-sequence token; the string that it sent, if it is that."""
    if token_id == EOS and not asked.ignore_eos:
        return None
    return SPECIAL[token_id] if SPECIAL.get(token_id) in asked.stop else token_id


def _said(token_id: int, asked: SamplingParams) -> bytes:
    if token_id in SPECIAL:
        return b"" if asked.skip_special_tokens else SPECIAL[token_id].encode()
    return SAID[token_id]


def _spelled(token_id: int, asked: SamplingParams) -> str:
    """Of the stop token, if it is to be shown."""
    if not asked.include_stop_str_in_output or (token_id == EOS and not asked.ignore_eos):
        return ""
    return SPECIAL.get(token_id) or SAID[token_id].decode(errors="replace")


def whole_characters(data: bytes) -> str:
    """The text of `data` without a character that has begun, and may become whole."""
    for length in range(min(3, len(data)), 0, -1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-length].decode(errors="replace")
    return data.decode(errors="replace")


def _first_stop(text: str, begin: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string that ends behind `begin`, of several the longest; and where it ends."""
    for end in range(begin + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def _num_held(text: str, asked: SamplingParams) -> int:
    """How much of the end of `text` may become a stop string."""
    if asked.include_stop_str_in_output:
        return 0
    return max((n for stop in asked.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@dataclass
class Life:
    """A request, what it has to say, and what it has said so far."""

    request: Request
    prompt: tuple[int, ...]
    answer: Answer
    num_tokens: int = 0
    text: str = ""
    has_prompt_logprobs: bool = False
    num_cached_tokens: int | None = None

    def take(self, output: EngineOutput) -> None:
        """Check what comes while nothing goes wrong, or at the end."""
        asked, answer = self.request.sampling, self.answer
        before = (*self.prompt, *answer.token_ids[: self.num_tokens])
        self._add(output)
        assert output.error is None and output.reasoning == ""
        is_over = self.num_tokens == len(answer.token_ids)
        assert output.token_ids or self.num_tokens == 0
        assert output.finish_reason is (answer.reason if is_over else None)
        assert output.stop_reason == (answer.stop_reason if is_over else None)
        assert output.usage.completion_tokens == self.num_tokens
        number = asked.logprobs
        assert list(output.logprobs) == [
            logprobs_at((*before, *output.token_ids[:place]), token_id, number)
            for place, token_id in enumerate(output.token_ids)
            if number is not None
        ]
        wants_prompt = asked.prompt_logprobs is not None and not self.has_prompt_logprobs
        assert output.prompt_logprobs == (self._prompt_logprobs() if wants_prompt else None)
        self.has_prompt_logprobs = True

    def take_end(self, output: EngineOutput, reason: FinishReason) -> None:
        """Check the last output of a request that ends before its time: what was out stays, nothing is added."""
        assert (output.finish_reason, output.stop_reason) == (reason, None)
        assert (output.token_ids, output.text, output.logprobs, output.prompt_logprobs) == ((), "", (), None)
        self._add(output)

    def _add(self, output: EngineOutput) -> None:
        start, end = self.num_tokens, self.num_tokens + len(output.token_ids)
        assert output.token_ids == tuple(self.answer.token_ids[start:end])
        self.num_tokens, self.text = end, self.text + output.text
        assert self.text == (self.answer.shown[end - 1] if end else "")
        cached = output.usage.cached_tokens
        assert output.usage == Usage(len(self.prompt), output.usage.completion_tokens, cached)
        assert self.num_cached_tokens in (None, cached)
        if end:
            self.num_cached_tokens = cached
        timing = output.timing
        assert timing is not None
        times = [time for time in (timing.queue, timing.first_token, timing.total) if time is not None]
        assert times == sorted(times) and (timing.first_token is not None or end == 0)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        number = self.request.sampling.prompt_logprobs
        assert number is not None
        places = range(1, len(self.prompt))
        return (None, *(logprobs_at(self.prompt[:place], self.prompt[place], number) for place in places))
