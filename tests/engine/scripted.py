"""An engine whose model is a script: the real scheduler, text processing and hooks around a runner that reads lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.config import ResolvedConfig
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.engine.async_engine import AsyncEngine
from miniserve.engine.build import EngineParts
from miniserve.engine.engine import Engine
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.metrics import MetricsHook, StepStats
from miniserve.engine.output_processor import OutputProcessor
from miniserve.outputs import PLAIN_TEXT, EngineOutput, OutputFormat, TokenLogprobs
from miniserve.sampling_params import SamplingParams
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.tokenizer import Tokenizer

PIECES = ("Hello", " world", "ST", "OP", "see STOP here", "S")  # whole tokens, beside the 256 bytes
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
Script = Mapping[str, Sequence[int]] | Callable[[ScheduledRequest], Sequence[int]]


def make_tokenizer(*tokens: str, special: Sequence[str] = ()) -> Tokenizer:
    """256 bytes, the pieces, <bos> and <eos>, then `tokens` and `special` ones. A prompt gets no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in tokens])
    backend.add_special_tokens(list(special))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return Tokenizer(
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
        )
    )


TOKENIZER = make_tokenizer()
assert TOKENIZER.eos_token_id is not None
EOS: int = TOKENIZER.eos_token_id


def token(text: str) -> int:
    """The id of a piece or of a single character of one byte."""
    [token_id] = TOKENIZER.encode(text, add_special_tokens=False)
    return token_id


def tokens(text: str) -> list[int]:
    """One id a byte, unless the text has pieces."""
    return TOKENIZER.encode(text, add_special_tokens=False)


class ScriptedRunner:
    """Samples token by token what the script says for each request, then "." for ever; records the steps.

    Where a mask forbids that, the lowest id that it allows.

    Attributes:
        script: the lines by request id, or a function that finds the line of a scheduled request.
        raising: exceptions by request id: a step with that request raises it.
        raise_once: raised by the next step, whatever is in it.
        errors: by request id, the error that the runner reports for it instead of its first token.
        gate: each step waits until it is set; open at first. `entered` is set when a step has come to it.
        permits: where set, each step takes one, and waits until there is one.
        num_entered: steps that have come to the gate; one more than `steps` while one waits.
        masks: what `sample` was given each time.
    """

    def __init__(self, script: Script = MappingProxyType({})) -> None:
        self.script = script
        self.steps: list[SchedulerOutput] = []
        self.raising: dict[str, Exception] = {}
        self.raise_once: Exception | None = None
        self.errors: dict[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.permits: threading.Semaphore | None = None
        self.num_entered = 0
        self.masks: list[Mapping[str, Any]] = []

    def execute(self, step: SchedulerOutput) -> Any:
        self.num_entered += 1
        self.entered.set()
        assert self.gate.wait(60), "nobody opened the gate"
        assert self.permits is None or self.permits.acquire(timeout=60), "nobody gave a permit"
        self.steps.append(step)
        once, self.raise_once = self.raise_once, None
        for error in (once, *(self.raising.get(item.request_id) for item in step.scheduled)):
            if error is not None:
                raise error
        return None

    def sample(
        self, step: SchedulerOutput, logits: Any, masks: Mapping[str, Any] = MappingProxyType({})
    ) -> RunnerOutput:
        self.masks.append(masks)
        return RunnerOutput(tuple(self._result(item, masks.get(item.request_id)) for item in step.scheduled))

    def _result(self, item: ScheduledRequest, mask: Any) -> RunnerResult:
        token_ids = (_allowed(self._next_token(item), mask),) if item.samples else ()
        if token_ids and item.request_id in self.errors:
            return RunnerResult(error=self.errors[item.request_id])
        return RunnerResult(
            token_ids,
            logprobs=tuple(scripted_logprobs(token_id, item.sampling.logprobs) for token_id in token_ids)
            if item.sampling.logprobs is not None
            else (),
            prompt_logprobs=self._prompt_logprobs(item) if item.wants_prompt_logprobs else (),
        )

    def _next_token(self, item: ScheduledRequest) -> int:
        line = self.script(item) if callable(self.script) else self.script.get(item.request_id, ())
        position = item.end - item.num_prompt_tokens
        return line[position] if 0 <= position < len(line) else token(".")

    def _prompt_logprobs(self, item: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
        positions = range(item.start + 1, min(item.end + 1, item.num_prompt_tokens))
        number = item.sampling.prompt_logprobs or 0
        return tuple(scripted_logprobs(item.token_ids[position], number) for position in positions)


def _allowed(token_id: int, mask: Any) -> int:
    if mask is None:
        return token_id
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return token_id if token_id in allowed else int(allowed[0])


def scripted_logprobs(token_id: int, number: int) -> TokenLogprobs:
    """What the script thinks of a token: it is the most probable one, the ids after it follow."""
    top = tuple(((token_id + rank) % TOKENIZER.num_token_ids, -(rank + 1.0)) for rank in range(number))
    return TokenLogprobs(token_id, -1.0, top)


class RecordingHook:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.outputs: list[EngineOutput] = []
        self.gaps: list[float | None] = []

    @property
    def finished(self) -> list[EngineOutput]:
        return [output for output in self.outputs if output.finish_reason is not None]

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
        assert request.request_id == output.request_id
        self.outputs.append(output)
        self.gaps.append(gap)


def make_engine(
    script: Script,
    *,
    num_blocks: int = 33,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = MAX_MODEL_LEN,
    prefix_caching: bool = True,
    hooks: Sequence[MetricsHook] = (),
    tokenizer: Tokenizer = TOKENIZER,
    masks: Any = None,
) -> Engine:
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE, prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return Engine(scheduler, ScriptedRunner(script), OutputProcessor(tokenizer), hooks, masks)


def make_input_processor(
    *,
    num_token_ids: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    kv_capacity_tokens: int = 10_000,
    chat_template: ChatTemplate | None = None,
) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        num_token_ids=TOKENIZER.num_token_ids if num_token_ids is None else num_token_ids,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
        eos_token_ids=frozenset({EOS}),
        chat_template=chat_template,
    )


def make_request(
    request_id: str, prompt: str = "abc", output_format: OutputFormat = PLAIN_TEXT, **sampling: Any
) -> Request:
    request = make_input_processor().process_prompt(request_id, prompt, SamplingParams(**sampling))
    request.output_format = output_format
    return request


def make_choices(request_id: str, n: int, prompt: str = "abc", **sampling: Any) -> list[Request]:
    """A request and its n - 1 forks."""
    return make_input_processor().choices(make_request(request_id, prompt, **sampling), n)


def make_parts(script: Script = MappingProxyType({}), **options: Any) -> EngineParts:
    """All of an engine; `options` as of `make_engine`."""
    engine = make_engine(script, **options)
    scheduler = engine.scheduler
    resolved = ResolvedConfig(
        device="cpu",
        dtype="float32",
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        kernels="torch",
        quantization="none",
        kv_cache_dtype="auto",
        attention_backend="auto",
        cuda_graphs=False,
        prefix_caching=True,
        seed=None,
        threads=1,
    )
    return EngineParts(
        engine=engine,
        input_processor=make_input_processor(
            max_model_len=scheduler.max_model_len, kv_capacity_tokens=scheduler.kv.capacity_tokens
        ),
        resolved=resolved,
        backend_name="script",
        sampling_defaults={"temperature": 0.5},
        summary=(),
    )


def make_async_engine(script: Script = MappingProxyType({}), **options: Any) -> tuple[AsyncEngine, ScriptedRunner]:
    """An async engine over a script, not started, and its runner. `options` of `AsyncEngine`, else of `make_engine`."""
    own = {name: options.pop(name) for name in ("max_queued_requests", "stuck_after") if name in options}
    runner = ScriptedRunner(script)

    def build(hooks: Sequence[MetricsHook]) -> EngineParts:
        parts = make_parts(script, hooks=hooks, **options)
        parts.engine.runner = runner
        return parts

    return AsyncEngine(build, model_name="scripted", **own), runner
