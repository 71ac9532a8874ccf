"""The real server (command line, uvicorn, application, scheduler, text) around a model that its prompts direct.

    python -m tests.contract.scripted_server --port 0

Takes the flags of `serve`, `--chat-template` among them. A prompt without a directive is answered with itself;
directives stand in the prompt, and the last one of a kind counts:

    <<say TEXT>>      answer TEXT
    <<bytes HEX>>     answer these bytes, one token each, whether they are UTF-8 or not
    <<ids 1,2,3>>     answer these tokens
    <<endless>>       answer "." for ever
    <<pause MS>>      each step with this request takes so long
    <<until PATH>>    each step with this request waits until the file is there
    <<raise N>>       the step that should give token N (from 0) raises, also when computed alone
    <<error N>>       the model has no answer (not a number) at token N
    <<die N>>         the scheduler itself fails at token N: the engine cannot go on

One token a byte, but for the pieces of `tests.engine.scripted`. An answer ends with the end token. Under a grammar,
a token that it forbids is replaced by one that it allows, which closes what is open as soon as it can.
"""

from __future__ import annotations

import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import miniserve.engine.build
from miniserve.cli import main
from miniserve.config import DEFAULT_BLOCK_SIZE, EngineConfig, ResolvedConfig
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import RequestNews, Scheduler
from miniserve.engine.build import EngineParts
from miniserve.engine.engine import Engine
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.metrics import MetricsHook
from miniserve.engine.output_processor import OutputProcessor
from miniserve.text.chat_template import ChatTemplate
from tests.engine.scripted import EOS, TOKENIZER, scripted_logprobs, token, tokens

DIRECTIVE = re.compile(r"<<(\w+) ?(.*?)>>", re.DOTALL)
MAX_SCRIPTS = 4096
UNTIL_SECONDS = 60
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}"
    "{% endif %}"
    "{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}"
)


class Script:
    """What one prompt asks for."""

    def __init__(self, prompt: str, prompt_ids: Sequence[int]) -> None:
        asked = dict(DIRECTIVE.findall(prompt))
        self.pause = int(asked.get("pause", 0)) / 1000
        self.until = Path(asked["until"]) if "until" in asked else None
        self.raise_at = _number(asked.get("raise"))
        self.error_at = _number(asked.get("error"))
        self.die_at = _number(asked.get("die"))
        self._endless = "endless" in asked
        self._line = _line(asked, prompt_ids)

    def token(self, position: int, banned: frozenset[int]) -> int:
        """Token number `position` of the answer."""
        if self._endless:
            return token(".")
        chosen = self._line[position] if position < len(self._line) else EOS
        return token(".") if chosen in banned else chosen


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _line(asked: dict[str, str], prompt_ids: Sequence[int]) -> list[int]:
    if "say" in asked:
        return tokens(asked["say"])
    if "bytes" in asked:
        return [TOKENIZER_BYTES[byte] for byte in bytes.fromhex(asked["bytes"])]
    if "ids" in asked:
        return [int(number) for number in asked["ids"].split(",")]
    return list(prompt_ids)


TOKENIZER_BYTES = {
    TOKENIZER.token_bytes(token_id)[0]: token_id
    for token_id in range(TOKENIZER.num_token_ids)
    if len(TOKENIZER.token_bytes(token_id)) == 1
}


class Scripts:
    """The scripts of the requests that were seen last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Script] = OrderedDict()

    def of(self, item: ScheduledRequest) -> Script:
        """The script of a scheduled request."""
        if item.request_id not in self._known:
            prompt_ids = list(item.token_ids[: item.num_prompt_tokens])
            prompt = TOKENIZER.decode(prompt_ids, skip_special_tokens=False)
            self._known[item.request_id] = Script(prompt, prompt_ids)
            if len(self._known) > MAX_SCRIPTS:
                self._known.popitem(last=False)
        return self._known[item.request_id]


def _position(item: ScheduledRequest) -> int | None:
    """The number of the output token that the step gives; None where it gives none."""
    return item.end - item.num_prompt_tokens if item.samples else None


class DirectedRunner:
    """Does what the prompts say."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def execute(self, step: SchedulerOutput) -> Any:
        """Take the time that was asked for, and fail where it was asked for."""
        for item in step.scheduled:
            script, position = self._scripts.of(item), _position(item)
            _wait(script)
            if position is not None and position == script.raise_at:
                raise RuntimeError("a secret of the engine at 0x7f00deadbeef")
        return None

    def sample(
        self, step: SchedulerOutput, logits: Any, masks: Mapping[str, Any] = MappingProxyType({})
    ) -> RunnerOutput:
        """The next token of each answer."""
        return RunnerOutput(tuple(self._result(item, masks.get(item.request_id)) for item in step.scheduled))

    def _result(self, item: ScheduledRequest, mask: Any) -> RunnerResult:
        script, position, number = self._scripts.of(item), _position(item), item.sampling.logprobs
        if position is not None and position == script.error_at:
            return RunnerResult(error="the logits are not finite")
        token_ids = () if position is None else (_allowed(script.token(position, item.banned_ids), mask),)
        return RunnerResult(
            token_ids,
            logprobs=() if number is None else tuple(scripted_logprobs(token_id, number) for token_id in token_ids),
            prompt_logprobs=_prompt_logprobs(item) if item.wants_prompt_logprobs else (),
        )


def _allowed(token_id: int, mask: Any) -> int:
    """The token, or one in place of it that the mask allows."""
    if mask is None:
        return token_id
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    ways_out = (EOS, *(TOKENIZER_BYTES[byte] for byte in b'"}],:{['))
    return next((choice for choice in (token_id, *ways_out) if bits[choice]), int(bits.argmax()))


def _wait(script: Script) -> None:
    time.sleep(script.pause)
    give_up = time.monotonic() + UNTIL_SECONDS
    while script.until is not None and not script.until.exists() and time.monotonic() < give_up:
        time.sleep(0.002)


def _prompt_logprobs(item: ScheduledRequest) -> tuple[Any, ...]:
    positions = range(item.start + 1, min(item.end + 1, item.num_prompt_tokens))
    return tuple(scripted_logprobs(item.token_ids[at], item.sampling.prompt_logprobs or 0) for at in positions)


class MortalScheduler(Scheduler):
    """Fails where a prompt says so: what an engine cannot go on after."""

    scripts: Scripts

    def update(self, output: SchedulerOutput, runner_output: RunnerOutput) -> list[RequestNews]:
        """As the real one, or not at all."""
        for item in output.scheduled:
            position = _position(item)
            if position is not None and position == self.scripts.of(item).die_at:
                raise AssertionError("the scheduler is broken")
        return super().update(output, runner_output)


def build_scripted(
    asked: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    on_build: Callable[[str], None] = lambda _line: None,
    hooks: Sequence[MetricsHook] = (),
) -> EngineParts:
    """In place of `build_engine`."""
    scripts = Scripts()
    template = TEMPLATE if asked.chat_template is None else Path(asked.chat_template).read_text()
    block_size = asked.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = asked.num_kv_blocks or asked.max_num_seqs * -(-asked.max_model_len // block_size) + 1
    kv = KVCacheManager(num_blocks, block_size, asked.prefix_caching)
    scheduler = MortalScheduler(
        kv,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_model_len=asked.max_model_len,
    )
    scheduler.scripts = scripts
    return EngineParts(
        engine=Engine(scheduler, DirectedRunner(scripts), OutputProcessor(TOKENIZER), hooks),
        input_processor=InputProcessor(
            TOKENIZER,
            num_token_ids=TOKENIZER.num_token_ids,
            max_model_len=asked.max_model_len,
            kv_capacity_tokens=kv.capacity_tokens,
            eos_token_ids=frozenset({EOS}),
            chat_template=ChatTemplate(template, TOKENIZER.special_tokens),
            priorities=asked.scheduling_policy == "priority",
        ),
        resolved=ResolvedConfig(
            device="cpu",
            dtype="float32",
            max_model_len=asked.max_model_len,
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            block_size=block_size,
            kernels="torch",
            quantization="none",
            kv_cache_dtype="auto",
            attention_backend="auto",
            cuda_graphs=False,
            prefix_caching=asked.prefix_caching,
            seed=asked.seed,
            threads=1,
        ),
        backend_name="script",
        sampling_defaults={},
        summary=(),
    )


if __name__ == "__main__":
    miniserve.engine.build.build_engine = build_scripted
    sys.exit(main(["serve", "--model", "scripted", *sys.argv[1:]]))
