"""What a request may ask of the sampler, and when it ends. Owns the validation of all of it.

Knows nothing of the vocabulary: token ids are checked against it by the input processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from miniserve.errors import InvalidParameterError, shown
from miniserve.strict_json import check_json

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 512
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_GRAMMAR_LENGTH = 2**17  # characters
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")
# Up to this temperature the scaled logits overflow before the choice can differ from the argmax.
GREEDY_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer has to look like. Whether it can be compiled, the compiler finds out.

    Attributes:
        kind: of `source`: a JSON schema, a regular expression, a JSON list of strings of which one is the answer, or a
            grammar in llguidance's Lark.
        source: its text.
        sent_as: the field that it comes from, for messages; empty is that of `kind` in structured_outputs.

    Raises:
        InvalidParameterError: the kind is not known, or `source` is no text, empty or too long.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    source: str
    sent_as: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidParameterError(
                f"structured_outputs must be of the kind {', '.join(GRAMMAR_KINDS)}; got {shown(self.kind)}",
                param="structured_outputs",
            )
        if not isinstance(self.source, str):
            raise InvalidParameterError(f"{self.name} must be text, got {shown(self.source)}", param=self.param)
        if not self.source:
            raise InvalidParameterError(f"{self.name} is empty", param=self.param)
        if len(self.source) > MAX_GRAMMAR_LENGTH:
            raise InvalidParameterError(
                f"{self.name} has {len(self.source)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed",
                param=self.param,
            )

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.sent_as or f"structured_outputs.{self.kind}"

    @property
    def param(self) -> str:
        """The field of the request that it is, or is in."""
        return self.name.partition(".")[0]

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool, sent_as: str = "") -> StructuredOutput:
        """An answer that is valid against a JSON schema.

        Raises:
            InvalidParameterError: it is too long, or has what JSON does not know.
        """
        name = sent_as or "structured_outputs.json"
        check_json(schema, name, name.partition(".")[0])
        return cls("json", json.dumps(schema, ensure_ascii=False), sent_as)

    @classmethod
    def choice(cls, answers: Sequence[str]) -> StructuredOutput:
        """An answer that is one of these strings.

        Raises:
            InvalidParameterError: they are too long, or not all are valid text.
        """
        check_json(list(answers), "structured_outputs.choice", "structured_outputs")
        return cls("choice", json.dumps(list(answers), ensure_ascii=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, when to stop, and what to report about it.

    Attributes:
        temperature: in [0, 2]; 0 (and anything up to `GREEDY_TEMPERATURE`) is greedy.
        top_p: in (0, 1]; keeps the most probable tokens up to and including the one that crosses it.
        top_k: keeps the k most probable tokens; 0 or -1 keeps all.
        min_p: in [0, 1]; drops tokens less probable than min_p times the most probable one.
        presence_penalty: in [-2, 2]; subtracted once from the logits of tokens that the output has.
        frequency_penalty: in [-2, 2]; subtracted as often as the output has the token.
        repetition_penalty: in (0, 100]; divides the positive and multiplies the negative logits of tokens that the
            prompt or the output has (Keskar et al., 2019); 1 is off.
        logit_bias: token id -> number in [-100, 100], added to its logit.
        max_tokens: at most this many output tokens; None is the rest of the context; 0 only computes the prompt.
        min_tokens: no end token, stop token or stop string ends the output before it has this many tokens.
        stop: the output ends before the first of these strings; it is not part of the text.
        stop_token_ids: the output ends with the first of these tokens; its text is not shown.
        include_stop_str_in_output: show the stop string, or the text of the stop token, all the same.
        ignore_eos: the model's own end-of-sequence tokens do not end the output.
        skip_special_tokens: special tokens leave no text.
        seed: makes the answer reproducible, whatever runs beside it; None draws one per request.
        logprobs: report each output token's logprob, and those of this many most probable ones, in [0, 20].
        prompt_logprobs: the same of the prompt's tokens; the prefix cache is not read then.
        structured_outputs: what the answer has to look like; None for a free answer. Once it is complete, the output
            ends.

    Raises:
        InvalidParameterError: a value is out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, open_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_int("max_tokens", self.max_tokens, 0, MAX_TOKENS, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens is {self.min_tokens}, which is more than max_tokens, {self.max_tokens}",
                param="min_tokens",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameterError(f"{name} must be true or false, got {shown(value)}", param=name)
        if not isinstance(self.structured_outputs, (StructuredOutput, NoneType)):
            raise InvalidParameterError(
                f"structured_outputs must be a StructuredOutput, got {shown(self.structured_outputs)}",
                param="structured_outputs",
            )
        self._check_logit_bias()
        self._check_stops()

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameterError("logit_bias must map token ids to numbers", param="logit_bias")
        _check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "keys")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, what="logit_bias has a token id that")
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), (tuple, list)):
                raise InvalidParameterError(f"{name} must be a tuple or a list", param=name)
        _check_length("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        _check_length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameterError("stop strings must be non-empty strings", param="stop")
            if len(text) > MAX_STOP_STRING_LENGTH:
                raise InvalidParameterError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_STRING_LENGTH} are allowed",
                    param="stop",
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def filters(self) -> bool:
        """Whether tokens are left out that would be drawn too rarely: which, depends on all that may be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _check_length(name: str, length: int, limit: int, what: str) -> None:
    if length > limit:
        raise InvalidParameterError(f"{name} has {length} {what}; at most {limit} are allowed", param=name)


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is in no interval.
    if not valid or not low <= value <= high or (open_low and value == low):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidParameterError(f"{name} must be a number in {interval}, got {shown(value)}", param=name)


def _check_int(
    name: str,
    value: int | None,
    low: int,
    high: int | None = None,
    *,
    optional: bool = False,
    what: str | None = None,
) -> None:
    if optional and value is None:
        return
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < low or (high is not None and value > high):  # type: ignore[operator]
        interval = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidParameterError(f"{what or name} must be an integer {interval}, got {shown(value)}", param=name)
