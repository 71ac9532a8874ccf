"""An engine whose model is a script: the real scheduler, text processing and hooks around a runner that reads lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.config import ResolvedConfig
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request
from miniserve.core.schedule import RunnerOutput, SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.engine.build import EngineParts
from miniserve.engine.engine import Engine
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.metrics import MetricsHook, StepStats
from miniserve.engine.output_processor import OutputProcessor
from miniserve.outputs import EngineOutput
from miniserve.sampling_params import SamplingParams
from miniserve.text.tokenizer import Tokenizer

PIECES = ("Hello", " world", "ST", "OP", "see STOP here", "S")  # whole tokens, beside the 256 bytes
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


def make_tokenizer() -> Tokenizer:
    """256 bytes, the pieces, <bos> and <eos>. A prompt gets no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in PIECES])
    backend.add_special_tokens(["<bos>", "<eos>"])
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
    """Samples token by token what the script says for each request, then "." for ever; records the steps."""

    def __init__(self, script: Mapping[str, Sequence[int]]) -> None:
        self.script = dict(script)
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> Any:
        self.steps.append(step)
        return None

    def sample(self, step: SchedulerOutput, logits: Any) -> RunnerOutput:
        sampled: list[tuple[int, ...]] = []
        for item in step.scheduled:
            line = self.script.get(item.request_id, ())
            position = item.end - item.num_prompt_tokens
            following = line[position] if 0 <= position < len(line) else token(".")
            sampled.append((following,) if item.samples else ())
        return RunnerOutput(tuple(sampled))


class RecordingHook:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.finished: list[EngineOutput] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_finished(self, output: EngineOutput) -> None:
        self.finished.append(output)


def make_engine(
    script: Mapping[str, Sequence[int]],
    *,
    num_blocks: int = 33,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    hooks: Sequence[MetricsHook] = (),
) -> Engine:
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    return Engine(scheduler, ScriptedRunner(script), OutputProcessor(TOKENIZER), hooks)


def make_input_processor(*, num_token_ids: int | None = None, max_model_len: int = MAX_MODEL_LEN) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        num_token_ids=TOKENIZER.num_token_ids if num_token_ids is None else num_token_ids,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
    )


def make_request(request_id: str, prompt: str = "abc", **sampling: Any) -> Request:
    return make_input_processor().process_prompt(request_id, prompt, SamplingParams(**sampling))


def make_parts(script: Mapping[str, Sequence[int]], **engine: Any) -> EngineParts:
    resolved = ResolvedConfig(
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        block_size=BLOCK_SIZE,
        attention_backend="auto",
        prefix_caching=True,
        seed=None,
        threads=1,
    )
    return EngineParts(make_engine(script, **engine), make_input_processor(), resolved, {"temperature": 0.5}, ())
