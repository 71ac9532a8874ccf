"""A request as the scheduler sees it. Mutable, and written by the scheduler and its KV cache manager only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from miniserve.outputs import PLAIN_TEXT, FinishReason, OutputFormat
from miniserve.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()  # in the queue, never run or preempted; or a fork that waits for its parent
    RUNNING = auto()  # holds KV blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens on its way through the engine.

    Attributes:
        token_ids: prompt and output, append-only.
        num_computed_tokens: how many of `token_ids` have their KV in the cache; catches up with `num_tokens`.
        num_cached_tokens: how many prompt tokens the prefix cache gave at the first admission.
        block_ids: the KV blocks held, in token order.
        block_hashes: chained hashes of the whole blocks of `token_ids`, computed once each.
        cache_salt: mixed into the block hashes: requests share prefixes only under the same salt.
        priority: where the scheduler goes by priority, lower comes first.
        output_format: of no interest to the scheduler.
        parent: the request of the same prompt whose computation this one waits for, to share it; None for most.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: bytes = b""
    priority: int = 0
    output_format: OutputFormat = PLAIN_TEXT
    parent: Request | None = None
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_fork(self) -> bool:
        """Whether it is another choice of its parent's prompt: the prompt is counted there."""
        return self.parent is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand for its tokens: not while its prompt's logprobs have to be computed."""
        return self.sampling.prompt_logprobs is None or self.num_output_tokens > 0
