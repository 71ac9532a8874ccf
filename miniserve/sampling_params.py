"""What a request may ask of the sampler, and when it ends. Owns the validation of all of it.

Knows nothing of the vocabulary: token ids are checked against it by the input processor.
"""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.errors import InvalidParameterError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 512
MAX_SEED = 2**63 - 1
# Up to this temperature the scaled logits overflow before the choice can differ from the argmax.
GREEDY_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    Attributes:
        temperature: in [0, 2]; 0 (and anything up to `GREEDY_TEMPERATURE`) is greedy.
        top_p: in (0, 1]; keeps the most probable tokens up to and including the one that crosses it.
        top_k: keeps the k most probable tokens; 0 or -1 keeps all.
        min_p: in [0, 1]; drops tokens less probable than min_p times the most probable one.
        max_tokens: at most this many output tokens; None is the rest of the context.
        stop: the output ends before the first of these strings; it is not part of the text.
        stop_token_ids: the output ends with the first of these tokens; its text is not shown.
        ignore_eos: the model's own end-of-sequence tokens do not end the output.
        seed: makes the answer reproducible, whatever runs beside it; None draws one per request.

    Raises:
        InvalidParameterError: a value is out of range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), (tuple, list)):
                raise InvalidParameterError(f"{name} must be a tuple or a list", param=name)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        self._check_stop_strings()

    def _check_stop_strings(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
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


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is in no interval.
    if not valid or not low <= value <= high or (open_low and value == low):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidParameterError(f"{name} must be a number in {interval}, got {value!r}", param=name)


def _check_int(name: str, value: int, low: int, high: int | None = None) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or value < low or (high is not None and value > high):
        interval = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidParameterError(f"{name} must be an integer {interval}, got {value!r}", param=name)
