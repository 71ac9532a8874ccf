"""Tools through the official client: a model that calls, hears the result and answers; streamed, parsed, and forced."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pydantic import BaseModel

from tests.contract.calls import CHAT, Server, check_error, fold, plain, streamed


class Weather(BaseModel):
    """Arguments of a tool."""

    city: str
    days: int


TOOL: ChatCompletionToolUnionParam = openai.pydantic_function_tool(Weather, name="weather")
FREE_TOOL: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ARGUMENTS = '{"city": "Paris", "days": 2}'


def call(name: str = "weather", arguments: str = ARGUMENTS) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def says(text: str) -> str:
    """What makes the model say it; the line break keeps the tag's bracket off the directive's."""
    return f"<<say {text}\n>>"


def test_call_result_answer(thinking: Server) -> None:
    """The round trip of an agent: its second prompt has the call and the result in it."""
    create = thinking.openai.chat.completions.create
    messages: list[ChatCompletionMessageParam] = [user(says(call()))]
    first = create(model="scripted", messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert first.message.tool_calls is not None
    [made] = first.message.tool_calls
    assert made.type == "function" and made.function.name == "weather"
    assert Weather.model_validate_json(made.function.arguments) == Weather(city="Paris", days=2)
    messages.append(first.message.model_dump(exclude_unset=True))  # type: ignore[arg-type]
    messages.append({"role": "tool", "tool_call_id": made.id, "content": "<<say It rains.>>"})
    second = create(model="scripted", messages=messages, tools=[TOOL]).choices[0]
    assert second.message.content == "It rains." and second.message.tool_calls is None
    assert second.finish_reason == "stop"


def test_the_stream_helper(thinking: Server) -> None:
    with thinking.openai.chat.completions.stream(
        model="scripted", messages=[user(says(f"Look: {call()}"))], tools=[TOOL]
    ) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == ARGUMENTS and len(deltas) > 1
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done.name == "weather" and done.parsed_arguments == Weather(city="Paris", days=2)
    final = stream.get_final_completion().choices[0]
    assert final.message.content is not None and final.message.content.strip() == "Look:"
    assert final.finish_reason == "tool_calls"


def test_parse(thinking: Server) -> None:
    said = says(call() + "\n" + call("weather", '{"city": "Rome", "days": 1}'))
    parsed = thinking.openai.chat.completions.parse(model="scripted", messages=[user(said)], tools=[TOOL])
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert [made.function.parsed_arguments for made in calls] == [
        Weather(city="Paris", days=2),
        Weather(city="Rome", days=1),
    ]


def test_streams_of_several_choices(thinking: Server) -> None:
    fields: dict[str, Any] = {
        "messages": [user(says(f"Both. {call()} and {call('time', '{}')}"))],
        "tools": [TOOL, FREE_TOOL],
        "tool_choice": "auto",
        "n": 3,
        "logprobs": True,
        "temperature": 0,
    }
    whole, joined = plain(thinking.post(CHAT, **fields)), fold(thinking.post(CHAT, **streamed(fields)))
    assert joined.content() == whole.content()
    assert whole.tool_calls == [[("weather", ARGUMENTS), ("time", "{}")]] * 3
    assert whole.finish_reasons == ["tool_calls"] * 3


def test_asynchronous_streams_side_by_side(thinking: Server) -> None:
    async def arguments(client: openai.AsyncOpenAI, city: str) -> str:
        text = ""
        asked = says(call("time", json.dumps({"city": city})))
        async for chunk in await client.chat.completions.create(
            model="scripted",
            messages=[user(asked)],
            tools=[FREE_TOOL],
            stream=True,
        ):
            for part in chunk.choices[0].delta.tool_calls or []:
                text += part.function.arguments or "" if part.function else ""
        return text

    async def run() -> None:
        async with thinking.async_openai() as client:
            cities = ["Paris", "Rome", 'a "quoted" }', "東京"]
            texts = await asyncio.gather(*(arguments(client, city) for city in cities))
            assert [json.loads(text)["city"] for text in texts] == cities

    asyncio.run(run())


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})],
)
def test_a_model_that_has_to_call_does(thinking: Server, choice: Any, names: set[str]) -> None:
    """It would rather say something else. It must not reason: it would never come to an end."""
    fields: dict[str, Any] = {"tools": [TOOL, FREE_TOOL], "tool_choice": choice, "max_tokens": 400}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    for answer in (thinking.chat("<<say I will not>>", **fields), thinking.chat_stream("<<say No>>", **fields)):
        [calls] = answer.tool_calls
        assert calls and {name for name, _ in calls} <= names and answer.text == ""
        assert answer.finish_reason == "tool_calls"
        for name, arguments in calls:
            if name == "weather":
                Weather.model_validate_json(arguments)


def test_a_function_without_parameters_gets_none(thinking: Server) -> None:
    """Bug: its arguments were invented. What the model writes of its own accord stays as it is."""
    tool = {"type": "function", "function": {"name": "now"}}
    fields: dict[str, Any] = {"tools": [tool], "parallel_tool_calls": False, "max_tokens": 400}
    said = says(call("now", '{"a": 1}'))
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        [[(name, arguments)]] = thinking.chat(said, tool_choice=choice, **fields).tool_calls
        assert name == "now" and json.loads(arguments) == {}
    assert thinking.chat(said, **fields).tool_calls == [[("now", '{"a": 1}')]]


@pytest.mark.parametrize("max_tokens", [1, 5, 70, 75, 80])
def test_a_call_that_is_cut_before_its_name_leaves_nothing(thinking: Server, max_tokens: int) -> None:
    """Bug: where the model had to call, the beginning of a call that the limit cut was shown as text."""
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": max_tokens}
    said = says(call() + "\n" + call())
    for answer in (thinking.chat(said, **fields), thinking.chat_stream(said, **fields)):
        assert answer.text == "" and answer.finish_reason == "length"
        [calls] = answer.tool_calls or [[]]
        assert [name for name, _ in calls] == ["weather"] * len(calls)
        assert bool(calls) is (max_tokens > 5)


def test_beside_a_response_format_a_cut_call_leaves_nothing(thinking: Server) -> None:
    """Bug: the beginning of its tag was shown as the answer. What is cut of a JSON answer is shown."""
    fields: dict[str, Any] = {"tools": [TOOL], "response_format": {"type": "json_object"}}
    for said, is_answer in ((call(), False), ('{"a": "<tool_call>"}', True)):
        for max_tokens in (1, 4, 11, 19, 25):
            for send in (thinking.chat, thinking.chat_stream):
                answer = send(says(said), **fields, max_tokens=max_tokens)
                assert answer.text == (said[:max_tokens] if is_answer else "")


def test_text_around_calls_stays_apart(thinking: Server) -> None:
    """Bug: it was glued together."""
    for send in (thinking.chat, thinking.chat_stream):
        assert send(says(f"Let me look.{call('time', '{}')}Done?"), tools=[FREE_TOOL]).text == "Let me look.\nDone?\n"


def test_arguments_are_json_where_a_line_break_was_not_escaped(thinking: Server) -> None:
    """Bug: they ended there."""
    said = says(call("time", '{"city": "a\nb"}'))
    for send in (thinking.chat, thinking.chat_stream):
        [[(_, arguments)]] = send(said, tools=[FREE_TOOL]).tool_calls
        assert json.loads(arguments) == {"city": "a\nb"}


def test_only_one_call_where_they_may_not_be_parallel(thinking: Server) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 400}
    for choice in ("auto", "required"):
        answer = thinking.chat(says(call() + "\n" + call()), tool_choice=choice, **fields)
        assert answer.tool_calls == [[("weather", ARGUMENTS)]]


def test_what_a_strict_tool_gets_is_valid(thinking: Server) -> None:
    """The model begins a call, and would then write what the schema forbids."""
    answer = thinking.chat(says(call("weather", '{"town": 5}')), tools=[TOOL], max_tokens=400)
    [[(name, arguments)]] = answer.tool_calls
    assert name == "weather" and Weather.model_validate_json(arguments)


def test_a_template_that_knows_no_tools(scripted: Server) -> None:
    """The functions are told in a system message; the calls are found all the same."""
    fields: dict[str, Any] = {"messages": [user(says(f"{call('time', '{}')}"))], "tools": [FREE_TOOL]}
    assert plain(scripted.post(CHAT, **fields)).tool_calls == [[("time", "{}")]]
    tokens = [
        scripted.post("/tokenize", messages=fields["messages"], **more).json()["count"]
        for more in ({}, {"tools": [FREE_TOOL]})
    ]
    assert tokens[1] > tokens[0] + 100


def test_a_real_model_calls(real: Server) -> None:
    """135 M parameters that were never taught to: the grammar makes the call valid."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    answer = real.chat("What is the weather in Rome?", **fields, max_tokens=120)
    [[(name, arguments)]] = answer.tool_calls
    assert name == "weather" and answer.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(arguments), schema)


def test_tools_that_cannot_be(thinking: Server) -> None:
    wrong: list[Any] = [
        [{"type": "function", "function": {"name": "a b"}}],
        [TOOL, TOOL],
        [{"type": "custom", "custom": {"name": "x"}}],
    ]
    for tools in wrong:
        check_error(thinking.post(CHAT, messages=[user("Hi")], tools=tools), 400, "invalid_value", "tools")
    unreadable = {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": unreadable, "strict": True}}
    param = "tools[0].function.parameters"
    message = check_error(thinking.post(CHAT, messages=[user("Hi")], tools=[tool]), 400, "invalid_value", param)
    assert message.startswith(f"{param} of 'f' ") and "https://example.com/schema.json" in message
