"""The engine on its thread: a script for a model, a real event loop, and everything between them real.

Nothing here waits for a time to pass: the scripted runner's gate holds a step for as long as a test needs it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, ParamSpec

import pytest

from miniserve.core.request import Request
from miniserve.core.schedule import ScheduledRequest, SchedulerOutput
from miniserve.engine.async_engine import AsyncEngine
from miniserve.engine.build import EngineParts
from miniserve.engine.engine import ENGINE_FAILED
from miniserve.engine.metrics import MetricsHook
from miniserve.engine.output_stream import OutputStream
from miniserve.errors import (
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    InternalError,
    InvalidParameterError,
    QueueFullError,
)
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat
from miniserve.sampling_params import SamplingParams
from miniserve.structured.masks import MaskQuery, MaskWorker
from tests.engine.scripted import (
    EOS,
    Script,
    ScriptedRunner,
    make_async_engine,
    make_choices,
    make_input_processor,
    make_parts,
    make_request,
    scripted_logprobs,
    token,
    tokens,
)

P = ParamSpec("P")
LARGE: dict[str, Any] = {"max_model_len": 400, "num_blocks": 401}  # room for requests that a test has to end
HELLO = [token("Hello"), token(" world"), EOS]


def on_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), 60)

        asyncio.run(bounded())

    return run


@asynccontextmanager
async def running(
    script: Script = MappingProxyType({}), **options: Any
) -> AsyncIterator[tuple[AsyncEngine, ScriptedRunner]]:
    engine, runner = make_async_engine(script, **options)
    engine.start()
    try:
        await engine.wait_ready()
        yield engine, runner
    finally:
        runner.gate.set()
        await engine.stop()


def make_long_request(request_id: str, prompt: str = "abc") -> Request:
    """It runs to the end of the context."""
    processor = make_input_processor(max_model_len=LARGE["max_model_len"])
    return processor.process_prompt(request_id, prompt, SamplingParams(max_tokens=None))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.0005)


class Stepper:
    """Lets the engine thread compute step by step: between the calls, it waits in the middle of a step."""

    def __init__(self, runner: ScriptedRunner, num_computed: int = 0) -> None:
        self._runner = runner
        self._permits = runner.permits = threading.Semaphore(0)
        self._num_allowed = num_computed

    async def allow(self, number: int) -> None:
        """Compute so many steps, and begin another one."""
        self._num_allowed += number
        for _ in range(number):
            self._permits.release()
        await until(lambda: self._runner.num_entered > self._num_allowed)

    def open(self) -> None:
        """Hold nothing up any more."""
        self._permits.release(10_000)


async def read(stream: OutputStream) -> list[EngineOutput]:
    async with stream as outputs:
        return [output async for output in outputs]


def text_of(outputs: Sequence[EngineOutput], request_id: str | None = None) -> str:
    return "".join(output.text for output in outputs if request_id in (None, output.request_id))


def has_confirmed_all(engine: AsyncEngine) -> bool:
    """The end of every request has come back to the event loop."""
    return not engine._streams


def is_idle(engine: AsyncEngine) -> bool:
    scheduler = engine.parts.engine.scheduler
    return scheduler.num_running + scheduler.num_waiting == 0


async def settled(engine: AsyncEngine) -> None:
    """The engine has no requests, and holds nothing for those it had."""
    await until(lambda: is_idle(engine))
    assert engine.parts.engine.scheduler.kv.pool.num_used == 0
    gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "kv_blocks_used", "batch_tokens")
    assert [metric(engine, name) for name in gauges] == [0] * 5
    await until(lambda: engine.health().last_step_age_seconds == 0)


def metric(engine: AsyncEngine, name: str, **labels: str) -> float | None:
    labels = {"model_name": "scripted", **labels}
    return engine.metrics.registry.get_sample_value(f"miniserve_{name}", labels)


@on_loop
async def test_an_answer() -> None:
    async with running({"a": HELLO}) as (engine, _):
        outputs = await read(engine.submit([[make_request("a")]]))
        assert text_of(outputs) == "Hello world"
        assert outputs[-1].finish_reason is FinishReason.STOP
        health = engine.health()
        assert (health.status, health.healthy, health.last_step_age_seconds) == ("ok", True, 0)
        await settled(engine)


@on_loop
async def test_many_streams_with_random_aborts() -> None:
    """Each prompt is answered with itself, so a mixed-up answer shows. A third of the readers leave early."""

    def echo(item: ScheduledRequest) -> Sequence[int]:
        return [*item.token_ids[: item.num_prompt_tokens], EOS]

    rng = random.Random(0)

    async def client(engine: AsyncEngine, number: int) -> bool:
        prompt = f"<{number}:{'xyz'[number % 3] * rng.randrange(8)}>"
        stop_after = rng.randrange(6) if number % 3 == 0 else None
        await asyncio.sleep(rng.random() * 0.02)
        texts = []
        async with engine.submit([[make_request(f"r{number}", prompt, max_tokens=20)]]) as outputs:
            async for output in outputs:
                texts.append(output.text)
                if stop_after is not None and len(texts) > stop_after:
                    return False
        assert "".join(texts) == prompt
        return True

    async with running(echo, num_blocks=20) as (engine, _):
        answered = await asyncio.gather(*(client(engine, number) for number in range(60)))
        assert sum(answered) >= 40
        await settled(engine)
        assert text_of(await read(engine.submit([[make_request("canary", "abc")]]))) == "abc"


@pytest.mark.parametrize(
    ("max_num_seqs", "num_steps"),
    [(8, 0), (8, 1), (8, 2), (8, 3), (8, 6), (1, 1), (1, 5)],
    ids=["inbox", "prompt", "late prompt", "last chunk", "decoding", "queue", "long in the queue"],
)
@on_loop
async def test_abort_in_each_phase(max_num_seqs: int, num_steps: int) -> None:
    """Gone within one step: only the one that is being computed may still hold it."""
    async with running(max_num_seqs=max_num_seqs, **LARGE) as (engine, runner):
        stepper = Stepper(runner)
        keeper = engine.submit([[make_long_request("keeper")]])  # keeps the engine stepping
        await stepper.allow(0)
        stream = engine.submit([[make_long_request("a", "x" * 40)]])
        await stepper.allow(num_steps)
        async with stream:
            pass
        await stepper.allow(4)
        assert is_in(runner.steps[: num_steps + 1], "a") == (num_steps > 0 and max_num_seqs > 1)
        assert len(runner.steps) == num_steps + 4 and not is_in(runner.steps[num_steps + 1 :], "a")
        assert metric(engine, "requests_finished_total", reason="abort") == 1
        async with keeper:
            stepper.open()
        await settled(engine)


def is_in(steps: Sequence[SchedulerOutput], request_id: str) -> bool:
    return any(item.request_id == request_id for step in steps for item in step.scheduled)


@on_loop
async def test_a_cancelled_reader_aborts() -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        task = asyncio.create_task(read(engine.submit([[make_request("a")]])))
        await until(runner.entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.gate.set()
        await settled(engine)
        assert len(runner.steps) == 1


@on_loop
async def test_a_slow_reader_gets_everything_at_once() -> None:
    line = tokens("abcdefgh")
    async with running({"a": line}) as (engine, _):
        async with engine.submit([[make_request("a", "xyz", max_tokens=8, logprobs=1, prompt_logprobs=0)]]) as outputs:
            await until(lambda: engine.stats.snapshot()["requests_finished"]["length"] == 1)
            await until(lambda: has_confirmed_all(engine))
            merged = [output async for output in outputs]
        text = "".join(output.text for output in merged)
        assert len(merged) == 1 and text == "abcdefgh"
        [output] = merged
        assert output.token_ids == tuple(line)
        assert output.logprobs == tuple(scripted_logprobs(token_id, 1) for token_id in line)
        assert output.prompt_logprobs == (None, scripted_logprobs(token("y"), 0), scripted_logprobs(token("z"), 0))
        assert output.finish_reason is FinishReason.LENGTH and output.usage.completion_tokens == 8


@on_loop
async def test_choices_and_prompts_in_one_stream() -> None:
    script = {"a": tokens("aa"), "a-1": tokens("bbb"), "c": tokens("c"), "c-1": tokens("d")}
    async with running({name: [*line, EOS] for name, line in script.items()}) as (engine, _):
        outputs = await read(engine.submit([make_choices("a", 2), make_choices("c", 2, "other")]))
        assert [text_of(outputs, name) for name in script] == ["aa", "bbb", "c", "d"]
        assert len([output for output in outputs if output.finish_reason is FinishReason.STOP]) == 4
        await settled(engine)


@on_loop
async def test_what_is_ready_can_be_taken_at_once() -> None:
    async with running({"a": [EOS], "a-1": [EOS], "a-2": [EOS]}) as (engine, _):
        outputs = engine.submit([make_choices("a", 3)])
        await until(lambda: has_confirmed_all(engine))
        taken = [await outputs.__anext__(), *outputs.ready()]
        assert [output.request_id for output in taken] == ["a", "a-1", "a-2"]
        assert outputs.ready() == [] and await read(outputs) == []


@on_loop
async def test_leaving_aborts_the_choices_that_run() -> None:
    async with running({"a": [EOS]}) as (engine, runner):
        stepper = Stepper(runner)
        async with engine.submit([make_choices("a", 3)]) as outputs:
            await stepper.allow(1)
            async for output in outputs:
                assert output.finish_reason is FinishReason.STOP
                break
        stepper.open()
        await settled(engine)
        assert engine.stats.snapshot()["requests_finished"] == {"stop": 1, "length": 0, "abort": 2, "error": 0}


@on_loop
async def test_one_hand_over_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a wake-up of the event loop for each token of each request."""
    async with running() as (engine, runner):
        loop = asyncio.get_running_loop()
        calls = []
        hand_over = loop.call_soon_threadsafe

        def count(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return hand_over(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        streams = [engine.submit([[make_request(f"r{number}", max_tokens=9)]]) for number in range(8)]
        for stream in streams:
            await read(stream)
        assert 9 <= len(calls) <= len(runner.steps)


# Admission


@on_loop
async def test_the_queue_is_bounded() -> None:
    async with running(max_num_seqs=1, max_queued_requests=2) as (engine, runner):
        runner.gate.clear()
        streams = [engine.submit([[make_request(f"r{number}", max_tokens=1)]]) for number in range(3)]
        for refused in (engine.check_admission, lambda: engine.submit([[make_request("late")]])):
            with pytest.raises(QueueFullError, match="at most 2") as caught:
                refused()
            assert caught.value.status == 429
        runner.gate.set()
        assert [text_of(await read(stream)) for stream in streams] == ["."] * 3
        assert text_of(await read(engine.submit([[make_request("late", max_tokens=1)]]))) == "."
        await settled(engine)


@on_loop
async def test_the_choices_of_one_call_are_bounded_too() -> None:
    """Bug: one call with n = 128 passed any bound."""
    async with running(max_num_seqs=1, max_queued_requests=2) as (engine, runner):
        runner.gate.clear()
        first = engine.submit([[make_request("first", max_tokens=1)]])
        with pytest.raises(QueueFullError):
            engine.submit([make_choices("three", 3)])
        with pytest.raises(InvalidParameterError, match="4 choices, and this server takes 3") as caught:
            engine.submit([make_choices("four", 4)])
        assert caught.value.param == "n"
        runner.gate.set()
        assert text_of(await read(first)) == "."
        await settled(engine)


@on_loop
async def test_aborted_requests_leave_the_queue() -> None:
    """Bug: clients that gave up while they waited kept their places, and later ones were refused."""
    async with running(max_num_seqs=1, max_queued_requests=2) as (engine, runner):
        runner.gate.clear()
        for number in range(3):
            async with engine.submit([[make_request(f"r{number}")]]):
                pass
        runner.gate.set()
        await settled(engine)
        await until(lambda: has_confirmed_all(engine))
        assert text_of(await read(engine.submit([[make_request("next", max_tokens=1)]]))) == "."


@on_loop
async def test_what_only_the_engine_can_refuse() -> None:
    """The second prompt is longer than the KV cache: the first one, queued already, is taken back."""
    async with running(num_blocks=3) as (engine, _):
        with pytest.raises(ContextLengthError):
            await read(engine.submit([make_choices("a", 2), [make_request("b", "x" * 20)]]))
        await settled(engine)
        assert text_of(await read(engine.submit([[make_request("a", max_tokens=1)]]))) == "."


@on_loop
async def test_an_id_is_in_use_until_its_end() -> None:
    """Bug: outputs of an aborted request went to the next one with its id."""
    async with running() as (engine, runner):
        runner.gate.clear()
        stream = engine.submit([[make_request("a")]])
        with pytest.raises(InvalidParameterError, match="'a' is in use"):
            engine.submit([[make_request("b")], [make_request("a")]])
        async with stream:
            pass
        with pytest.raises(InvalidParameterError, match="in use"):
            engine.submit([[make_request("a")]])
        runner.gate.set()
        await until(lambda: has_confirmed_all(engine))
        assert text_of(await read(engine.submit([[make_request("a", max_tokens=2)]]))) == ".."


# Failures


@on_loop
async def test_a_request_that_fails() -> None:
    async with running() as (engine, runner):
        runner.raising["bad"] = ValueError("a secret")
        streams = [engine.submit([[make_request(name, max_tokens=3)]]) for name in ("good", "bad", "fine")]
        results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        assert isinstance(results[1], InternalError) and "secret" not in str(results[1])
        for result in (results[0], results[2]):
            assert not isinstance(result, BaseException) and text_of(result) == "..."
        assert engine.health().healthy
        await settled(engine)


@on_loop
async def test_a_request_that_cannot_even_be_added() -> None:
    """Bug: an exception when a request's text or grammar was set up ended the engine, and with it all requests."""
    async with running({"b": HELLO}) as (engine, _):
        broken = [[make_request("a")], [make_request("c", output_format=OutputFormat(grammar=BrokenGrammar()))]]
        beside = engine.submit([[make_request("b")]])
        with pytest.raises(InternalError, match=ENGINE_FAILED):
            await read(engine.submit(broken))
        assert text_of(await read(beside)) == "Hello world"
        await settled(engine)


@pytest.mark.parametrize("name", ["push", "merge"])
@on_loop
async def test_an_output_that_cannot_be_handed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an exception at one request's output lost those behind it in the step, whose readers waited for ever."""
    owner = {"push": OutputStream, "merge": EngineOutput}[name]
    original = getattr(owner, name)

    def broken(receiver: Any, output: EngineOutput) -> Any:
        if output.request_id == "a":
            raise MemoryError
        return original(receiver, output)

    monkeypatch.setattr(owner, name, broken)
    async with running({"b": HELLO}) as (engine, _):
        streams = [engine.submit([[make_request(request_id, max_tokens=9)]]) for request_id in "ab"]
        await until(lambda: engine.parts.engine.scheduler.num_running == 0)  # nobody reads: outputs are merged
        async with streams[0] as broken_stream:
            with pytest.raises(InternalError, match=ENGINE_FAILED):
                await read(broken_stream)
        assert text_of(await read(streams[1])) == "Hello world"
        await settled(engine)


class BrokenGrammar:
    def start(self) -> Any:
        raise MemoryError


@on_loop
async def test_text_before_an_error_is_not_lost() -> None:
    """Also when the error came before the reader looked."""
    async with running({"a": tokens("ab")}) as (engine, runner):
        stepper = Stepper(runner)
        stream = engine.submit([[make_request("a")]])
        await stepper.allow(2)
        runner.raising["a"] = ValueError()
        stepper.open()
        await until(lambda: has_confirmed_all(engine))
        texts = []
        with pytest.raises(InternalError):
            async with stream as outputs:
                async for output in outputs:
                    texts.append(output.text)
        assert texts == ["ab"]
        await settled(engine)


@on_loop
async def test_one_failing_choice_ends_the_stream() -> None:
    async with running(**LARGE) as (engine, runner):
        runner.errors["a-1"] = "not a number"
        with pytest.raises(InternalError, match="not a number"):
            await read(engine.submit([make_choices("a", 3, max_tokens=28)]))
        await settled(engine)


@on_loop
async def test_a_runner_that_fails_once() -> None:
    async with running() as (engine, runner):
        runner.raise_once = RuntimeError("a hiccup")
        streams = [engine.submit([[make_request(name, max_tokens=3)]]) for name in "ab"]
        assert [text_of(await read(stream)) for stream in streams] == ["...", "..."]


@on_loop
async def test_a_runner_that_always_fails() -> None:
    async with running() as (engine, runner):
        runner.raising = {name: RuntimeError("broken") for name in "abc"}
        streams = [engine.submit([[make_request(name)]]) for name in "abc"]
        for stream in streams:
            with pytest.raises(InternalError):
                await read(stream)
        await settled(engine)
        assert engine.stats.snapshot()["requests_finished"]["error"] == 3


@on_loop
async def test_an_error_of_the_scheduler_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the engine thread died, and its clients waited for ever under a green health."""
    async with running() as (engine, runner):
        runner.gate.clear()
        streams = [engine.submit([[make_request(name)]]) for name in "abc"]
        await until(runner.entered.is_set)

        def fail(*_: object) -> None:
            raise AssertionError("a block is free twice")

        monkeypatch.setattr(engine.parts.engine.scheduler, "update", fail)
        runner.gate.set()
        for stream in streams:
            with pytest.raises(EngineUnavailableError, match="must be restarted"):
                await read(stream)
        health = engine.health()
        assert (health.status, health.healthy, health.last_step_age_seconds) == ("dead", False, 0)
        with pytest.raises(EngineUnavailableError):
            engine.submit([[make_request("d")]])
        with pytest.raises(EngineUnavailableError):
            _ = engine.parts


@on_loop
async def test_a_stuck_step_shows(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the engine's loop hung, and its health stayed green, and its clients waited for ever."""
    async with running(stuck_after=0.05) as (engine, runner):
        runner.gate.clear()
        async with engine.submit([[make_request("a", max_tokens=2)]]) as stream:
            with pytest.raises(EngineUnavailableError, match="busy with one step"):
                await read(stream)
        health = engine.health()
        assert health.status == "stuck" and not health.healthy and health.last_step_age_seconds > 0.05
        assert engine.stats.snapshot()["last_step_age_seconds"] > 0
        with pytest.raises(EngineUnavailableError, match="busy with one step"):
            engine.check_admission()
        [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
        assert "1 requests fail" in record.getMessage() and "gate.wait" in record.getMessage(), "where it hangs"


@on_loop
async def test_a_step_that_ends_after_all() -> None:
    """It serves again, and nothing is left of those who did not wait."""
    async with running(stuck_after=0.05) as (engine, runner):
        runner.gate.clear()
        async with engine.submit([[make_request("a", max_tokens=2)]]) as stream:
            with pytest.raises(EngineUnavailableError):
                await read(stream)
        runner.gate.set()
        await until(lambda: engine.health().status == "ok")
        await settled(engine)
        assert text_of(await read(engine.submit([[make_request("b", max_tokens=2)]]))) == ".."
        await settled(engine)


@on_loop
async def test_a_process_that_was_stopped_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: when it went on, it said that the step had hung, and all that ran had failed."""
    ahead = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr("miniserve.engine.async_engine.time", clock)
    async with running(stuck_after=50.0) as (engine, runner):
        runner.gate.clear()
        stream = engine.submit([[make_request("a", max_tokens=2)]])
        await until(lambda: engine.health().last_step_age_seconds > 0)
        ahead = 100.0
        assert engine.health().healthy and engine.health().last_step_age_seconds < 10
        await asyncio.sleep(1.1)  # it has looked again
        assert engine.health().healthy
        runner.gate.set()
        assert text_of(await read(stream)) == ".."
        await settled(engine)


@on_loop
async def test_what_came_before_a_stuck_step_is_not_lost() -> None:
    async with running(stuck_after=0.05) as (engine, runner):
        runner.permits = threading.Semaphore(2)
        outputs = []
        async with engine.submit([[make_request("a", max_tokens=5)]]) as stream:
            with pytest.raises(EngineUnavailableError):
                async for output in stream:
                    outputs.append(output)
        assert text_of(outputs) == ".."
        runner.permits.release(9)
        await settled(engine)


@on_loop
async def test_drain_does_not_wait_for_a_stuck_step() -> None:
    async with running(stuck_after=0.05) as (engine, runner):
        runner.gate.clear()
        engine.submit([[make_request("a")]])
        await until(lambda: engine.health().status == "stuck")
        await asyncio.wait_for(engine.drain(grace=100.0), 5)
        runner.gate.set()


# Loading and ending


@pytest.mark.parametrize("error", [ConfigError("no such model"), RuntimeError("a bug")])
@on_loop
async def test_a_build_that_fails(error: Exception) -> None:
    def build(hooks: Sequence[MetricsHook]) -> EngineParts:
        raise error

    engine = AsyncEngine(build, model_name="none")
    engine.start()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            await engine.wait_ready()
        assert caught.value is error
    assert engine.health().status == "dead" and not engine.health().healthy
    with pytest.raises(EngineUnavailableError):
        engine.check_admission()
    await engine.stop()


class SlowBuild:
    """Builds on demand."""

    def __init__(self) -> None:
        self.may_build = threading.Event()

    def __call__(self, hooks: Sequence[MetricsHook]) -> EngineParts:
        assert self.may_build.wait(60)
        return make_parts(hooks=hooks)


@on_loop
async def test_loading() -> None:
    build = SlowBuild()
    engine = AsyncEngine(build, model_name="scripted")
    assert engine.health().status == "loading"
    engine.start()
    assert engine.health().status == "loading" and not engine.health().healthy
    assert engine.stats.snapshot()["device"] is None
    for refused in (lambda: engine.parts, engine.check_admission, lambda: engine.submit([[make_request("a")]])):
        with pytest.raises(EngineUnavailableError, match="being loaded"):
            refused()
    build.may_build.set()
    await engine.wait_ready()
    assert engine.health().status == "ok"
    assert engine.parts.backend_name == engine.stats.snapshot()["backend"] == "script"
    await engine.stop()


@pytest.mark.parametrize("drain", [True, False])
@on_loop
async def test_stop_while_loading(drain: bool) -> None:
    """It does not wait for a model that nobody wants any more."""
    build = SlowBuild()
    engine = AsyncEngine(build, model_name="scripted")
    engine.start()
    if drain:
        await engine.drain(60)
    await engine.stop()
    assert engine.health().status == "stopped"
    with pytest.raises(EngineUnavailableError):
        await engine.wait_ready()
    build.may_build.set()
    await until(lambda: not engine._thread.is_alive())


@on_loop
async def test_stop_without_start() -> None:
    engine, _ = make_async_engine()
    await engine.stop()
    assert engine.health().status == "stopped"


@on_loop
async def test_drain() -> None:
    async with running(max_num_seqs=1) as (engine, runner):
        runner.gate.clear()
        streams = [engine.submit([[make_request(name, max_tokens=3)]]) for name in "ab"]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        drain = asyncio.create_task(engine.drain(60))
        await until(lambda: engine.health().status == "draining")
        assert not engine.health().healthy
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            engine.submit([[make_request("c")]])
        assert not drain.done()
        runner.gate.set()
        await drain
        assert [text_of(await reader) for reader in readers] == ["...", "..."]
        await settled(engine)


@pytest.mark.parametrize("grace", [0, 0.01])
@on_loop
async def test_drain_runs_out_of_grace(grace: float) -> None:
    async with running(max_num_seqs=1) as (engine, runner):
        runner.gate.clear()
        streams = [engine.submit([[make_request(name)]]) for name in "ab"]
        await engine.drain(grace)
        for stream in streams:
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                await read(stream)
        runner.gate.set()
        await until(lambda: metric(engine, "requests_finished_total", reason="abort") == 2)
        await settled(engine)


@pytest.mark.parametrize("grace", [0, 60])
@on_loop
async def test_drain_of_an_idle_engine(grace: float) -> None:
    async with running() as (engine, _):
        await engine.drain(grace)
        assert engine.health().status == "draining"


@on_loop
async def test_stop_fails_who_waits() -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        readers = [asyncio.create_task(read(engine.submit([[make_request(name)]]))) for name in "ab"]
        await until(runner.entered.is_set)
        stop = asyncio.create_task(engine.stop())
        for reader in readers:
            with pytest.raises(EngineUnavailableError):
                await reader
        assert not stop.done()  # the step is still being computed
        runner.gate.set()
        await stop
        assert engine.health().status == "stopped" and not engine._thread.is_alive()
        assert len(runner.steps) == 1
        with pytest.raises(EngineUnavailableError):
            engine.submit([[make_request("c")]])


@on_loop
async def test_the_threads_of_masks_end_with_the_engine() -> None:
    """Bug: they stayed, and one that was stuck in a grammar held up the end of the process."""
    masks = MaskWorker()
    async with running(masks=masks):
        masks.start([MaskQuery("a", Anything())]).result()  # type: ignore[arg-type]
        [thread] = masks._threads
    thread.join(60)
    assert not thread.is_alive()


class Anything:
    """A matcher of any text."""

    num_words = 1

    def fill(self, row: Any) -> None:
        row[:] = -1


def test_a_closed_loop_ends_the_thread() -> None:
    """Bug: without a listener, the thread went on computing until the process ended."""

    engine, runner = make_async_engine(**LARGE)

    async def walk_away() -> None:
        engine.start()
        await engine.wait_ready()
        runner.gate.clear()
        engine.submit([[make_long_request("a")]])

    asyncio.run(walk_away())
    runner.gate.set()
    engine._thread.join(60)
    assert not engine._thread.is_alive() and len(runner.steps) <= 2


# Accounting


@on_loop
async def test_every_number_after_a_known_load() -> None:
    """Bug: an abort counter that stayed 0, and token counters that disagreed with the sum of all usage."""
    script: dict[str, Sequence[int]] = {"stop": HELLO, "n": tokens("abcd"), "n-1": tokens("ef"), "n-2": [EOS]}
    async with running(script, **LARGE) as (engine, runner):
        answers = [
            await read(engine.submit([[make_request("stop", "x" * 9)]])),
            await read(engine.submit([[make_request("again", "x" * 9, max_tokens=5)]])),
            await read(engine.submit([make_choices("n", 3, "prompt", max_tokens=4)])),
            await read(engine.submit([[make_request("score", "a prompt", max_tokens=0, prompt_logprobs=0)]])),
        ]
        runner.raising["error"] = ValueError()
        with pytest.raises(InternalError):
            await read(engine.submit([[make_request("error", "12345")]]))
        await abort_one_that_decodes_and_one_that_waits(engine, runner)
        await settled(engine)

        finished = {"stop": 2, "length": 4, "abort": 2, "error": 1}
        assert {r: metric(engine, "requests_finished_total", reason=r) for r in finished} == finished
        usages = [output.usage for answer in answers for output in answer if output.finish_reason is not None]
        generated = sum(usage.completion_tokens for usage in usages)
        aborted_tokens = 2  # one that its reader saw, and one of the step in which it was aborted
        assert generated == 3 + 5 + (4 + 4 + 1) + 0
        assert metric(engine, "generation_tokens_total") == generated + aborted_tokens
        assert metric(engine, "prompt_tokens_total") == 9 + 9 + len("prompt") + len("a prompt") + len("decoding")
        # Who got a token: stop, again, three choices, and the aborted one that decoded.
        assert metric(engine, "time_to_first_token_seconds_count") == 6
        assert metric(engine, "inter_token_latency_seconds_count") == generated + aborted_tokens - 6
        assert metric(engine, "time_per_output_token_seconds_count") == 5  # all of them but the choice of one token
        assert metric(engine, "e2e_latency_seconds_count") == 9
        assert metric(engine, "queue_time_seconds_count") == 8  # one never ran
        assert metric(engine, "step_duration_seconds_count") == engine_steps(runner)
        # Those whose prompt may be found: not the one that has its prompt scored, and each prompt once.
        queries = 9 + 9 + len("prompt") + len("12345") + len("decoding")
        assert metric(engine, "prefix_cache_queries_total") == queries
        assert metric(engine, "prefix_cache_hits_total") == 8
        assert metric(engine, "preemptions_total") == 0
        assert_stats_agree(engine)


async def abort_one_that_decodes_and_one_that_waits(engine: AsyncEngine, runner: ScriptedRunner) -> None:
    stepper = Stepper(runner, num_computed=len(runner.steps))
    async with engine.submit([[make_long_request("decoding", "decoding")]]) as outputs:
        await stepper.allow(1)
        await outputs.__anext__()
        async with engine.submit([[make_long_request("waiting")]]):
            pass
    stepper.open()


def engine_steps(runner: ScriptedRunner) -> int:
    """The steps of the engine: the failed one was computed twice, once in common and once alone."""
    return len(runner.steps) - 1


def assert_stats_agree(engine: AsyncEngine) -> None:
    numbers = engine.stats.snapshot()
    assert numbers["prompt_tokens_total"] == metric(engine, "prompt_tokens_total")
    assert numbers["generation_tokens_total"] == metric(engine, "generation_tokens_total")
    assert numbers["preemptions"] == metric(engine, "preemptions_total")
    for reason, number in numbers["requests_finished"].items():
        assert number == metric(engine, "requests_finished_total", reason=reason)


def make_long(names: str) -> list[list[Request]]:
    return [[make_request(name, max_tokens=25)] for name in names]


@on_loop
async def test_preemptions_are_counted() -> None:
    async with running(num_blocks=11) as (engine, _):
        outputs = await read(engine.submit(make_long("abc")))
        assert [text_of(outputs, name) for name in "abc"] == ["." * 25] * 3
        scheduler = engine.parts.engine.scheduler
        assert metric(engine, "preemptions_total") == scheduler.num_preemptions > 0
        assert metric(engine, "inter_token_latency_seconds_count") == 3 * 24
        await settled(engine)
