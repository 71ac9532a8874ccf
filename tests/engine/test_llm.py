"""The offline twin around a scripted engine: batches, one or many, and what happens when something is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miniserve.engine.input_processor import Prompt
from miniserve.engine.llm import LLM
from miniserve.engine.openai_fields import parse_response_format
from miniserve.errors import ContextLengthError, InternalError, InvalidParameterError
from miniserve.outputs import FinishReason, ToolCall, Usage
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.text.chat_template import ChatTemplate
from tests.chat_templates import THINKING_WITH_TOOLS
from tests.engine.scripted import (
    EOS,
    TOKENIZER,
    ScriptedRunner,
    make_input_processor,
    make_parts,
    scripted_logprobs,
    token,
    tokens,
)

HELLO = [token("Hello"), token(" world"), EOS]


def make_llm(*lines: list[int], **engine: Any) -> LLM:
    """The n-th request answers with the n-th line."""
    return LLM.from_parts(make_parts({f"offline-{n}": line for n, line in enumerate(lines)}, **engine))


def runner_of(llm: LLM) -> ScriptedRunner:
    runner = llm.parts.engine.runner
    assert isinstance(runner, ScriptedRunner)
    return runner


def steps_of(llm: LLM) -> int:
    return len(runner_of(llm).steps)


def test_one_prompt() -> None:
    [output] = make_llm(HELLO).generate("abc", SamplingParams())
    assert output.text == "Hello world"
    assert output.prompt_token_ids == tuple(tokens("abc"))
    assert output.token_ids == tuple(HELLO)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=0)
    assert output.timing.first_token is not None and 0 < output.timing.first_token <= output.timing.total
    assert output.logprobs == () and output.prompt_logprobs is None


@pytest.mark.parametrize("prompts", ["ab", [5, 6], (5, 6), ["ab"], [[5, 6]], [(5, 6)]])
def test_one_prompt_in_each_spelling(prompts: Any) -> None:
    [output] = make_llm(HELLO).generate(prompts)
    assert output.text == "Hello world" and len(output.prompt_token_ids) == 2


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    """Not in the order in which they end."""
    prompts: list[Prompt] = ["x", [1, 2], "z"]
    outputs = make_llm([*tokens("aaaa"), EOS], [EOS], [*tokens("cc"), EOS]).generate(prompts)
    assert [output.text for output in outputs] == ["aaaa", "", "cc"]
    assert [output.request_id for output in outputs] == ["offline-0", "offline-1", "offline-2"]


def test_all_prompts_are_one_batch() -> None:
    llm = make_llm(HELLO, HELLO, HELLO)
    llm.generate(["a", "b", "c"])
    assert steps_of(llm) == 3


def test_no_prompts() -> None:
    assert make_llm().generate([]) == []


def test_sampling_for_each_prompt() -> None:
    llm = make_llm()
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [output.text for output in outputs] == [".", "..."]


def test_one_sampling_for_all() -> None:
    outputs = make_llm().generate(["a", "b"], SamplingParams(max_tokens=2))
    assert [output.text for output in outputs] == ["..", ".."]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_sampling_params(number: int) -> None:
    llm = make_llm()
    with pytest.raises(InvalidParameterError, match=f"2 prompts and {number}") as caught:
        llm.generate(["a", "b"], [SamplingParams()] * number)
    assert caught.value.param == "sampling"


def test_defaults_are_the_models() -> None:
    llm = make_llm()
    assert llm.default_sampling_params() == SamplingParams(temperature=0.5)
    assert llm.default_sampling_params(temperature=0, top_k=3) == SamplingParams(temperature=0, top_k=3)
    [request] = llm.prompt_requests("a")
    assert request.sampling == SamplingParams(temperature=0.5)


def test_an_invalid_prompt_runs_nothing() -> None:
    llm = make_llm()
    with pytest.raises(InvalidParameterError):
        llm.generate(["good", ""])
    with pytest.raises(ContextLengthError):
        llm.generate(["good", "x" * 40])
    assert steps_of(llm) == 0 and not llm.parts.engine.has_work


def test_a_prompt_that_only_the_engine_refuses_runs_nothing() -> None:
    """It fits into the context, but not into the KV cache."""
    llm = make_llm(num_blocks=3)
    with pytest.raises(ContextLengthError):
        llm.generate(["good", "x" * 20], SamplingParams(max_tokens=1))
    assert steps_of(llm) == 0 and not llm.parts.engine.has_work
    [output] = llm.generate("good", SamplingParams(max_tokens=1))
    assert output.text == "."


def test_stream_is_the_answer_in_pieces() -> None:
    llm = make_llm(HELLO)
    outputs = list(llm.stream(llm.prompt_requests("abc")))
    assert [output.text for output in outputs] == ["Hello", " world", ""]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]


def test_closing_the_stream_aborts_the_rest() -> None:
    llm = make_llm([EOS], tokens("aaaa"), tokens("bbbb"))
    requests = llm.prompt_requests(["a", "b", "c"])
    stream = llm.stream(requests)
    next(stream)
    stream.close()
    assert not llm.parts.engine.has_work
    assert llm.parts.engine.scheduler.kv.pool.num_used == 0
    reasons = [request.finish_reason for request in requests]
    assert reasons == [FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT]


def test_a_failing_step_leaves_a_usable_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.parts.engine.runner, "sample", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"])
    assert not llm.parts.engine.has_work
    [output] = llm.generate("c", SamplingParams(max_tokens=2))
    assert output.text == ".."


def test_chat() -> None:
    llm = make_llm(HELLO, HELLO, HELLO)
    sampling = SamplingParams(max_tokens=8)
    message = {"role": "user", "content": "hi"}
    [output] = llm.chat([message], sampling)
    assert output.prompt_token_ids == tuple(tokens("user: hi\n"))
    first, second = llm.chat([[message], [message, {"role": "bot", "content": "yo"}]], sampling)
    assert first.prompt_token_ids == output.prompt_token_ids
    assert second.prompt_token_ids == tuple(tokens("user: hi\nbot: yo\n"))


def test_chat_without_messages() -> None:
    with pytest.raises(InvalidParameterError):
        make_llm().chat([[]])


def make_thinking_llm(*lines: str) -> LLM:
    parts = make_parts(
        {f"offline-{n}": [*tokens(line), EOS] for n, line in enumerate(lines)}, max_model_len=1024, num_blocks=513
    )
    template = ChatTemplate(THINKING_WITH_TOOLS, TOKENIZER.special_tokens)
    processor = make_input_processor(max_model_len=1024, chat_template=template)
    return LLM.from_parts(replace(parts, input_processor=processor))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FREE = SamplingParams(max_tokens=None)


def test_chat_with_tools_and_reasoning() -> None:
    llm = make_thinking_llm(f"<think>why</think>So: {CALL}", f"{CALL}{CALL}", CALL)
    message = {"role": "user", "content": "hi"}
    first, second = llm.chat([[message], [message]], FREE, tools=[TOOL])
    assert (first.reasoning, first.text, first.tool_calls) == ("why", "So:", (ToolCall("f", '{"a": 1}'),))
    assert first.usage.reasoning_tokens == len("<think>why</think>")
    assert (second.reasoning, second.text, len(second.tool_calls)) == ("", "", 2)
    assert TOKENIZER.decode(first.prompt_token_ids).startswith("tools: f")
    [without] = llm.chat([message], FREE)
    assert (without.text, without.tool_calls) == (CALL, ())


def test_a_structure_that_has_begun_has_no_calls() -> None:
    """Bug: what looked like a call was taken out of its middle."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    sampling = replace(FREE, structured_outputs=StructuredOutput("regex", r"It is (.|\n)*"))
    [output] = make_thinking_llm(CALL).chat(messages, sampling, tools=[TOOL], continue_final_message=True)
    assert (output.text, output.tool_calls) == (CALL, ())


def test_chat_options_reach_the_prompt() -> None:
    llm = make_thinking_llm("because</think>So.", "So.", "b")
    message = {"role": "user", "content": "hi"}
    [opened] = llm.chat([message], FREE, chat_template_kwargs={"enable_thinking": True})
    assert (opened.reasoning, opened.text) == ("because", "So.")
    [closed] = llm.chat([message], FREE, reasoning_effort="none")
    assert TOKENIZER.decode(closed.prompt_token_ids).endswith("</think>\n\n")
    [going_on] = llm.chat([message, {"role": "assistant", "content": "a"}], FREE, continue_final_message=True)
    assert TOKENIZER.decode(going_on.prompt_token_ids) == "user: hi\nassistant: a"


def test_what_the_answer_looks_like_reaches_the_request() -> None:
    """Whether it is kept to, the tests of grammars say."""
    llm = make_llm()
    message = {"role": "user", "content": "hi"}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    requests = llm.chat_requests([message], answer_format=parse_response_format(schema))
    assert requests[0].sampling.structured_outputs == StructuredOutput.json({"type": "array"})
    assert requests[0].output_format.grammar is not None
    [request] = llm.prompt_requests("abc", SamplingParams(structured_outputs=StructuredOutput.choice(["a"])))
    assert request.output_format.grammar is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", "f"),
        ("tool_choice", "any"),
        ("response_format", {"type": "xml"}),
        ("reasoning_effort", "huge"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "x"),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"a": float("nan")}),
        ("chat_template_kwargs", {"a": object()}),
        ("parallel_tool_calls", "x"),
        ("parallel_tool_calls", None),
        ("continue_final_message", "x"),
        ("continue_final_message", 1),
        ("reasoning_effort", []),
        ("reasoning_effort", 5),
        ("tools", 5),
        ("tools", [None]),
        ("tool_choice", 5),
        ("tool_choice", {"type": "function", "function": []}),
        ("response_format", "json"),
        ("response_format", {"type": []}),
        ("response_format", {"type": "json_object", "schema": {"minimum": float("nan")}}),
        ("response_format", {"type": "json_object", "schema": {"const": object()}}),
        ("response_format", {"type": "json_object", "schema": {1: {}}}),
        ("response_format", {"type": "json_object", "schema": {"const": 10**5000}}),
    ],
)
def test_a_wrong_chat_option_runs_nothing(field: str, value: Any) -> None:
    llm = make_llm(HELLO)
    with pytest.raises(InvalidParameterError) as error:
        llm.chat([{"role": "user", "content": "hi"}], **{field: value})
    assert error.value.param == field and steps_of(llm) == 0


def test_the_second_request_hits_the_prefix_cache() -> None:
    """Bug: the same short completion twice gave an empty text and a dead worker."""
    llm = make_llm(HELLO, HELLO)
    first, second = (llm.generate("x" * 9)[0] for _ in range(2))
    assert (first.text, second.text) == ("Hello world", "Hello world")
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 8)


def test_two_open_streams_get_their_own_outputs() -> None:
    """Bug: a step served the requests of both, and the stream that stepped took the other's outputs for its own."""
    llm = make_llm([*tokens("aaaa"), EOS], HELLO)
    stream = llm.stream(llm.prompt_requests("x"))
    texts = [next(stream).text]
    [other] = llm.generate("y")
    assert other.text == "Hello world"
    texts += [output.text for output in stream]
    assert "".join(texts) == "aaaa"
    assert not llm.parts.engine.has_work


def endless() -> list[Any]:
    value: list[Any] = []
    value += [value, value]
    return value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"minimum": float("nan")}}}, "schema.properties.a.minimum is nan, which is no number"),
        ({"enum": [1, -float("inf")]}, r"schema.enum\[1\] is -inf"),
        ({"const": {"a": {1, 2}}}, "schema.const.a is of the type set, which JSON does not have"),
        ({"const": {"a": {None: 1}}}, "schema.const.a has the key None; keys of JSON are strings"),
        ({"const": "\ud800"}, "schema.const has half a surrogate pair"),
        ({"const": endless()}, "nests more than 100 deep"),
    ],
    ids=["nan", "infinity", "set", "key", "surrogate", "endless"],
)
def test_a_schema_that_json_cannot_spell_is_named(schema: Any, message: str) -> None:
    """Bug: the message named a column of a text that nobody had written."""
    with pytest.raises(InvalidParameterError, match=message):
        make_llm().chat([{"role": "user", "content": "hi"}], response_format={"type": "json_object", "schema": schema})


def test_tools_that_json_cannot_spell_are_named() -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"default": object()}}}}
    with pytest.raises(
        InvalidParameterError, match=r"tools\[0\]\.function\.parameters.*a\.default is of the type object"
    ):
        make_llm().chat([{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": function}])


def test_two_forms_of_the_answer() -> None:
    """Bug: one of them won without a word."""
    sampling = SamplingParams(structured_outputs=StructuredOutput.choice(["a"]))
    with pytest.raises(InvalidParameterError, match="response_format and structured_outputs") as error:
        make_llm().chat([{"role": "user", "content": "hi"}], sampling, response_format={"type": "json_object"})
    assert error.value.param == "structured_outputs"


@pytest.mark.parametrize("prompts", [None, 5, [None], [3.5], b"abc", [b"abc"], {"a": 1}, [True], ["a", 5]])
def test_prompts_of_a_wrong_type(prompts: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make_llm(HELLO).generate(prompts)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("sampling", ["x", [None], 5, {"temperature": 0}, iter([])])
def test_sampling_of_a_wrong_type(sampling: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make_llm(HELLO).generate("abc", sampling)
    assert error.value.param == "sampling"


@pytest.mark.parametrize(
    "messages",
    [
        *("hi", None, 5, b"hi", [5], [None], ["hi"], [[5]], [{"role": "user", "content": "hi"}, "x"]),
        [{"role": "user", "content": {"a"}}],
        [{"role": "user", "content": "hi", "extra": float("inf")}],
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"n": float("nan")}}}],
            },
        ],
    ],
    ids=repr,
)
def test_messages_of_a_wrong_type(messages: Any) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make_llm(HELLO).chat(messages)
    assert error.value.param == "messages"


def test_logprobs() -> None:
    [output] = make_llm(HELLO).generate("abc", SamplingParams(logprobs=1, prompt_logprobs=2))
    assert output.logprobs == tuple(scripted_logprobs(token_id, 1) for token_id in HELLO)
    assert output.prompt_logprobs == (None, scripted_logprobs(token("b"), 2), scripted_logprobs(token("c"), 2))


def test_a_request_that_the_engine_fails_on() -> None:
    llm = make_llm(HELLO, HELLO)
    runner_of(llm).errors["offline-0"] = "it broke"
    with pytest.raises(InternalError, match="offline-0: it broke"):
        llm.generate(["a", "b"])
    assert not llm.parts.engine.has_work
    [output] = llm.generate("c", SamplingParams(max_tokens=2))
    assert output.text == ".."
