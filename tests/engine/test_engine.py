"""The loop: a script for a model, and everything around it real."""

from __future__ import annotations

from typing import Any

import pytest

from miniserve.core.request import Request, RequestStatus
from miniserve.core.scheduler import RequestNews
from miniserve.engine.engine import ENGINE_FAILED, Engine
from miniserve.engine.metrics import StepStats
from miniserve.engine.output_processor import Processed
from miniserve.errors import ContextLengthError, DeviceFailedError, InternalError, InvalidParameterError
from miniserve.outputs import EngineOutput, FinishReason, OutputFormat, Usage
from tests.engine.scripted import (
    EOS,
    RecordingHook,
    ScriptedRunner,
    make_choices,
    make_engine,
    make_request,
    scripted_logprobs,
    token,
    tokens,
)


def run(engine: Engine) -> list[list[EngineOutput]]:
    """The outputs of each step until there is no work."""
    steps = []
    while engine.has_work:
        steps.append(engine.step())
        assert len(steps) < 200, "the engine does not come to an end"
    return steps


def text_of(outputs: list[list[EngineOutput]], request_id: str) -> str:
    return "".join(output.text for step in outputs for output in step if output.request_id == request_id)


def num_used_blocks(engine: Engine) -> int:
    return engine.scheduler.kv.pool.num_used


def test_an_answer() -> None:
    engine = make_engine({"a": [token("Hello"), token(" world"), EOS, token("S")]})
    engine.add(make_request("a"))
    steps = run(engine)
    assert [[output.text for output in step] for step in steps] == [["Hello"], [" world"], [""]]
    last = steps[-1][0]
    assert last.finish_reason is FinishReason.STOP and last.stop_reason is None
    assert last.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=0)
    assert num_used_blocks(engine) == 0


def test_max_tokens() -> None:
    engine = make_engine({})
    engine.add(make_request("a", max_tokens=3))
    steps = run(engine)
    assert text_of(steps, "a") == "..."
    assert steps[-1][0].finish_reason is FinishReason.LENGTH


def test_one_token_is_not_lost() -> None:
    """Bug: a stream with max_tokens 1 had no content."""
    engine = make_engine({"a": [token("Hello")]})
    engine.add(make_request("a", max_tokens=1))
    [[output]] = run(engine)
    assert (output.text, output.finish_reason) == ("Hello", FinishReason.LENGTH)


def test_context_is_the_limit_without_max_tokens() -> None:
    engine = make_engine({})
    engine.add(make_request("a", "x" * 31, max_tokens=None))
    steps = run(engine)
    assert text_of(steps, "a") == "."
    assert steps[-1][0].finish_reason is FinishReason.LENGTH


def test_stop_string_ends_the_request_in_that_step() -> None:
    engine = make_engine({"a": [token("S"), token("ST"), token("OP"), token("S")]})
    request = make_request("a", stop=("STOP",))
    engine.add(request)
    steps = run(engine)
    assert len(steps) == 3  # nothing is computed after it
    assert text_of(steps, "a") == "S"
    assert (steps[-1][0].finish_reason, steps[-1][0].stop_reason) == (FinishReason.STOP, "STOP")
    assert request.status is RequestStatus.FINISHED and request.finish_reason is FinishReason.STOP
    assert num_used_blocks(engine) == 0


def test_stop_string_of_the_last_allowed_token() -> None:
    engine = make_engine({"a": [token("ST"), token("OP")]})
    request = make_request("a", stop=("STOP",), max_tokens=2)
    engine.add(request)
    steps = run(engine)
    assert (steps[-1][0].finish_reason, steps[-1][0].stop_reason) == (FinishReason.STOP, "STOP")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "STOP")
    assert num_used_blocks(engine) == 0


def test_neighbours_go_on_after_a_stop() -> None:
    engine = make_engine({"a": [token("see STOP here")], "b": [token("Hello"), token(" world"), EOS]})
    engine.add(make_request("a", stop=("STOP",)))
    engine.add(make_request("b", stop=("never",)))
    steps = run(engine)
    assert [len(step) for step in steps] == [2, 1, 1]
    assert (text_of(steps, "a"), text_of(steps, "b")) == ("see ", "Hello world")


def test_a_step_of_chunks_has_no_outputs() -> None:
    engine = make_engine({"a": [token("Hello"), EOS]}, max_num_batched_tokens=4)
    engine.add(make_request("a", "x" * 10))
    assert [[output.text for output in step] for step in run(engine)] == [[], [], ["Hello"], [""]]


def test_a_step_without_work() -> None:
    engine = make_engine({})
    assert engine.step() == [] and not engine.has_work


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
def test_abort_in_each_phase(num_steps: int) -> None:
    """In the queue, in the middle of the prompt, at its last chunk, while decoding."""
    hook = RecordingHook()
    engine = make_engine({}, max_num_batched_tokens=4, hooks=[hook])
    engine.add(make_request("a", "x" * 10))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("a")
    assert output is not None
    assert (output.request_id, output.text, output.finish_reason) == ("a", "", FinishReason.ABORT)
    assert output.usage == Usage(10, max(0, num_steps - 2), 0)
    assert hook.finished == [output]
    assert num_used_blocks(engine) == 0 and not engine.has_work
    assert engine.step() == []


def test_abort_leaves_the_others_alone() -> None:
    engine = make_engine({"b": tokens("bbbb")}, max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        engine.add(make_request(request_id, max_tokens=4))
    engine.step()
    engine.abort("a")
    steps = run(engine)
    assert text_of(steps, "b") == "bbb"
    assert text_of(steps, "c") == "...."
    assert text_of(steps, "a") == ""


def test_abort_of_the_unknown_and_the_finished() -> None:
    engine = make_engine({"a": [EOS]})
    engine.add(make_request("a"))
    run(engine)
    assert engine.abort("a") is None
    assert engine.abort("nobody") is None


def test_an_aborted_preempted_request() -> None:
    """Ten blocks of four: two requests of 3 + 29 tokens do not fit; the newer one waits without blocks."""
    engine = make_engine({}, num_blocks=11)
    for request_id in ("a", "b"):
        engine.add(make_request(request_id, max_tokens=29))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    output = engine.abort("b")
    assert output is not None and output.finish_reason is FinishReason.ABORT
    assert text_of(run(engine), "b") == ""
    assert num_used_blocks(engine) == 0


def test_text_after_preemption_is_neither_lost_nor_repeated() -> None:
    """Bug: with a cache so small that requests are computed again, output was incomplete or doubled."""
    line = tokens("abcdefghijklmnopqrstuvwxyz")
    engine = make_engine({"a": line, "b": line}, num_blocks=11)
    for request_id in ("a", "b"):
        engine.add(make_request(request_id, max_tokens=26))
    steps = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert text_of(steps, "a") == text_of(steps, "b") == "abcdefghijklmnopqrstuvwxyz"
    last = [output for step in steps for output in step if output.finish_reason is not None]
    assert [output.usage for output in last if output.usage is not None] == [Usage(3, 26, 0)] * 2


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = make_engine({"a": [EOS]}, num_blocks=3)
    with pytest.raises(ContextLengthError, match="8"):  # two blocks of four tokens
        engine.add(make_request("a", "x" * 8))
    engine.add(make_request("a", "x" * 7))
    with pytest.raises(InvalidParameterError):
        engine.add(make_request("a"))
    assert len(run(engine)) == 1


def test_an_id_may_be_used_again() -> None:
    engine = make_engine({"a": [token("Hello"), EOS]})
    for _ in range(2):
        engine.add(make_request("a"))
        assert text_of(run(engine), "a") == "Hello"


def test_hooks_get_exact_numbers() -> None:
    hook = RecordingHook()
    engine = make_engine({"a": [token("Hello"), EOS]}, max_num_batched_tokens=8, num_blocks=11, hooks=[hook])
    engine.add(make_request("a", "x" * 10))
    engine.add(make_request("b", "y" * 4, max_tokens=1))
    outputs = run(engine)
    scheduled = [(stats.num_scheduled_requests, stats.num_scheduled_tokens) for stats in hook.steps]
    assert scheduled == [(1, 8), (2, 6), (1, 1)]
    assert [(stats.num_running, stats.num_waiting) for stats in hook.steps] == [(1, 1), (1, 0), (0, 0)]
    # Of ten blocks: a's first two; a's three, after b has ended; none.
    assert [stats.kv_usage for stats in hook.steps] == pytest.approx([0.2, 0.3, 0.0])
    assert [stats.prefix_query_tokens for stats in hook.steps] == [10, 14, 14]
    assert all(stats.duration > 0 and stats.preemptions == 0 for stats in hook.steps)
    assert hook.finished == [outputs[1][1], outputs[2][0]]
    assert [output.request_id for output in hook.finished] == ["b", "a"]


def test_hooks_see_prefix_hits_and_preemptions() -> None:
    hook = RecordingHook()
    engine = make_engine({}, num_blocks=11, hooks=[hook])
    for _ in range(2):
        engine.add(make_request("a", "x" * 9, max_tokens=1))
        run(engine)
    assert (hook.steps[-1].prefix_query_tokens, hook.steps[-1].prefix_hit_tokens) == (18, 8)
    assert hook.finished[-1].usage == Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=8)
    for request_id in ("b", "c"):
        engine.add(make_request(request_id, max_tokens=29))
    run(engine)
    assert hook.steps[-1].preemptions == engine.scheduler.num_preemptions > 0


def test_the_runner_sees_each_token_once() -> None:
    """Guard for the scripted runner: the steps cover the sequence without gaps."""
    engine = make_engine({"a": [*tokens("abc"), EOS]}, max_num_batched_tokens=4)
    engine.add(make_request("a", "x" * 10))
    run(engine)
    assert isinstance(engine.runner, ScriptedRunner)
    spans = [(step.scheduled[0].start, step.scheduled[0].end) for step in engine.runner.steps]
    assert spans == [(0, 4), (4, 8), (8, 10), (10, 11), (11, 12), (12, 13)]


# When something fails


def runner_of(engine: Engine) -> ScriptedRunner:
    assert isinstance(engine.runner, ScriptedRunner)
    return engine.runner


def ends(steps: list[list[EngineOutput]]) -> dict[str, FinishReason]:
    return {output.request_id: output.finish_reason for step in steps for output in step if output.finish_reason}


def three_requests(engine: Engine) -> None:
    for request_id in ("a", "b", "c"):
        engine.add(make_request(request_id, request_id * 3, max_tokens=3))


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_request_that_the_runner_cannot_compute(after: int, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: one bad request killed the engine, and with it all others."""
    hook = RecordingHook()
    engine = make_engine({}, hooks=[hook])
    three_requests(engine)
    steps = [engine.step() for _ in range(after)]
    runner_of(engine).raising["b"] = ValueError("secret path")
    steps += run(engine)
    assert ends(steps) == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    assert text_of(steps, "a") == text_of(steps, "c") == "..."
    [failed] = [output for output in hook.finished if output.request_id == "b"]
    assert failed.error == ENGINE_FAILED and failed.usage == Usage(3, after, 0)
    assert "secret path" in caplog.text and "request b" in caplog.text
    assert num_used_blocks(engine) == 0


def test_a_runner_that_fails_once_harms_nobody() -> None:
    engine = make_engine({})
    three_requests(engine)
    engine.step()
    runner_of(engine).raise_once = RuntimeError("a hiccup")
    assert set(ends(run(engine)).values()) == {FinishReason.LENGTH}


def test_a_step_that_fails_at_once_has_its_blocks_cleared_all_the_same() -> None:
    """Bug: computed again request by request, they kept what a failed request had left in them."""
    engine = make_engine({})
    three_requests(engine)
    engine.step()
    runner_of(engine).errors = dict.fromkeys("abc", "not a number")
    engine.step()
    for request_id in ("d", "e"):
        engine.add(make_request(request_id, request_id * 5, max_tokens=1))
    runner_of(engine).raise_once = RuntimeError("a hiccup")
    engine.step()
    *_, whole, first, second = runner_of(engine).steps
    assert whole.scheduled == first.scheduled + second.scheduled
    assert len(whole.blocks_to_clear) == 3
    assert sorted(first.blocks_to_clear + second.blocks_to_clear) == sorted(whole.blocks_to_clear)
    assert set(first.blocks_to_clear) <= set(first.scheduled[0].block_ids)


def test_a_runner_that_always_fails_ends_all() -> None:
    engine = make_engine({})
    runner_of(engine).raising = dict.fromkeys("abc", RuntimeError("broken"))
    three_requests(engine)
    [outputs] = run(engine)
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * 3
    assert num_used_blocks(engine) == 0
    engine.add(make_request("d", max_tokens=1))
    assert text_of(run(engine), "d") == "."


@pytest.mark.parametrize("name", ["execute", "sample"])
def test_a_device_that_fails_ends_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: each request failed alone, for ever, and health stayed green."""
    engine = make_engine({})
    engine.add(make_request("a"))

    def fail(*_args: Any) -> Any:
        raise DeviceFailedError("cuda has failed")

    monkeypatch.setattr(engine.runner, name, fail)
    with pytest.raises(DeviceFailedError):
        engine.step()


def test_what_the_runner_says_is_wrong_reaches_the_output() -> None:
    engine = make_engine({})
    runner_of(engine).errors["b"] = "not a number"
    three_requests(engine)
    steps = run(engine)
    [failed] = [output for output in steps[0] if output.finish_reason]
    assert (failed.request_id, failed.finish_reason, failed.error) == ("b", FinishReason.ERROR, "not a number")
    assert len(runner_of(engine).steps) == 3


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_failing_output_processor_ends_that_request(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    engine = make_engine({})
    process = engine.output_processor.process

    def fail(news: RequestNews) -> Processed | None:
        if news.request.request_id == "a":
            raise IndexError("a bug")
        return process(news)

    monkeypatch.setattr(engine.output_processor, "process", fail)
    request = make_request("a", max_tokens=max_tokens)
    engine.add(request)
    engine.add(make_request("b", max_tokens=3))
    steps = run(engine)
    assert ends(steps) == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert request.finish_reason is FinishReason.ERROR and steps[0][0].error == ENGINE_FAILED
    assert num_used_blocks(engine) == 0


class GrammarThatCannotBegin:
    def start(self) -> None:
        raise MemoryError("secret")


@pytest.mark.parametrize("broken", [0, 2])
def test_a_request_whose_output_cannot_be_followed_is_not_taken_in(broken: int) -> None:
    """Bug: it stayed in the scheduler, where nobody knew its text, and the next step ended the engine."""
    hook = RecordingHook()
    engine = make_engine({}, hooks=[hook])
    choices = make_choices("a", 3, max_tokens=1)
    choices[broken].output_format = OutputFormat(grammar=GrammarThatCannotBegin())
    engine.add(make_request("b", max_tokens=3))
    engine.step()
    with pytest.raises(InternalError, match=ENGINE_FAILED):
        engine.add(choices[0], choices[1:])
    assert engine.scheduler.num_running == 1 and engine.scheduler.num_waiting == 0
    engine.add(make_request("a", max_tokens=1))
    assert ends(run(engine)) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert [output.request_id for output in hook.finished] == ["a", "b"]


def test_an_error_of_the_scheduler_propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine({})
    engine.add(make_request("a"))

    def fail(*_: object) -> None:
        raise AssertionError("a block is free twice")

    monkeypatch.setattr(engine.scheduler, "update", fail)
    with pytest.raises(AssertionError, match="free twice"):
        engine.step()


def test_a_failing_hook_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an exception in the metrics ended the engine."""

    class FailingHook:
        def on_step(self, stats: StepStats) -> None:
            raise ValueError("no step")

        def on_output(self, request: Request, output: EngineOutput, gap: float | None) -> None:
            raise ValueError("no output")

    after = RecordingHook()
    engine = make_engine({}, hooks=[FailingHook(), after])
    engine.add(make_request("a", max_tokens=3))
    assert text_of(run(engine), "a") == "..."
    assert (len(after.steps), len(after.outputs)) == (3, 3)
    assert len([record for record in caplog.records if "FailingHook" in record.getMessage()]) == 1


def test_hooks_get_each_output_with_its_gap() -> None:
    hook = RecordingHook()
    engine = make_engine({}, hooks=[hook])
    engine.add(make_request("a", max_tokens=3))
    steps = run(engine)
    assert hook.outputs == [output for step in steps for output in step]
    assert hook.gaps[0] is None and all(gap is not None and gap > 0 for gap in hook.gaps[1:])


# Choices, logprobs, lengths


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_share_one_prefill(prefix_caching: bool) -> None:
    engine = make_engine({"a": tokens("aa"), "a-1": tokens("bb"), "a-2": tokens("cc")}, prefix_caching=prefix_caching)
    first, *forks = make_choices("a", 3, "x" * 9, max_tokens=2)
    engine.add(first, forks)
    steps = run(engine)
    assert [text_of(steps, request_id) for request_id in ("a", "a-1", "a-2")] == ["aa", "bb", "cc"]
    # The prompt of nine tokens once; of each fork what is beyond its two whole blocks; one decode step each.
    assert sum(step.num_tokens for step in runner_of(engine).steps) == 9 + 2 * 1 + 3 * 1
    assert num_used_blocks(engine) == 0


def test_a_refused_parent_leaves_no_forks_behind() -> None:
    engine = make_engine({}, num_blocks=3)
    first, *forks = make_choices("a", 3, "x" * 8)
    with pytest.raises(ContextLengthError):
        engine.add(first, forks)
    assert not engine.has_work
    assert engine.abort("a-1") is None


def test_logprobs_over_chunks_and_preemptions() -> None:
    """Two requests with logprobs that do not fit together, in chunks of four tokens."""
    engine = make_engine({}, num_blocks=11, max_num_batched_tokens=4)
    for request_id in ("a", "b"):
        engine.add(make_request(request_id, "abcdefghij", max_tokens=20, logprobs=1, prompt_logprobs=1))
    steps = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for request_id in ("a", "b"):
        outputs = [output for step in steps for output in step if output.request_id == request_id]
        assert outputs[0].prompt_logprobs == (None, *(scripted_logprobs(token(char), 1) for char in "bcdefghij"))
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        entries = [entry for output in outputs for entry in output.logprobs]
        assert entries == [scripted_logprobs(token("."), 1)] * 20


def test_a_prompt_alone_gives_one_output() -> None:
    engine = make_engine({}, max_num_batched_tokens=4)
    engine.add(make_request("a", "abcdef", max_tokens=0, prompt_logprobs=0))
    [first, [output]] = run(engine)
    assert first == [] and (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 6
