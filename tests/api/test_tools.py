"""Tool calls over HTTP, as a model writes them with Hermes' tags, with and without reasoning before them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from miniserve.core.schedule import ScheduledRequest
from tests.api.answers import join, whole, without_ids
from tests.api.driver import CHAT, HELLO, Answer, Api
from tests.chat_templates import THINKING_WITH_TOOLS
from tests.engine.scripted import EOS, TOKENIZER, tokens


def tool(name: str, **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


TOOLS = [tool("weather"), tool("time")]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("weather", '{"city": "Paris é \\" \\u00e9 }"}')
ROME = call("time", '{"city": "Rome"}')
LINES = {
    "one": PARIS,
    "two": f"{PARIS}\n{ROME}",
    "text": f"Let me look.\n{PARIS}",
    "reasoning": f"<think>I need both, </tool_call></think>\n\nWell: {PARIS}\n{ROME}",
    "broken": '<tool_call>\n{"nome": 5}\n</tool_call> and so on',
    "cut": f"{PARIS}\n" + ROME[:-20],
    "no call": "<think>No.</think>It is sunny.",
}


def says(line: str, **options: Any) -> Api:
    return Api(lambda _: [*tokens(line), EOS], template=THINKING_WITH_TOOLS, max_model_len=1024, **options)


def prompt_of(api: Api, **fields: Any) -> str:
    """The prompt that the engine gets."""
    api.model.steps.clear()
    assert api.chat(max_tokens=1, **fields).status == 200
    item = api.model.steps[0].scheduled[0]
    return TOKENIZER.decode(item.token_ids[: item.num_prompt_tokens], skip_special_tokens=False)


def test_a_plain_answer() -> None:
    with says(LINES["one"]) as api:
        answer = api.chat(tools=TOOLS)
        [choice] = answer.json()["choices"]
        [made] = choice["message"].pop("tool_calls")
        assert made.pop("id").startswith("call_")
        assert made == {
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris é \\" \\u00e9 }"}'},
        }
        assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
        assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None


def test_arguments_come_as_they_are_written() -> None:
    with says(PARIS) as api:
        api.model.permits = permits = threading.Semaphore(0)

        async def scenario() -> None:
            exchange = api.exchange("POST", CHAT, HELLO | {"tools": TOOLS, "stream": True}).start()
            for step in range(80):  # the reader has seen a step's output when the next one begins
                while api.model.num_entered <= step:
                    await asyncio.sleep(0.001)
                for _ in range(10):
                    await asyncio.sleep(0)
                permits.release()
            await exchange.until(lambda exchange: exchange.body.count(b'"arguments"') > 10)
            assert b'finish_reason":"' not in exchange.body
            permits.release(1000)
            await exchange.finish()

        api.run(scenario())


def test_a_stream_chunk_by_chunk() -> None:
    with says(LINES["text"]) as api:
        events = api.chat(tools=TOOLS, stream=True).events()
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        start, *more = calls
        assert set(start) == {"index", "id", "type", "function"} and start["index"] == 0
        assert start["function"] == {"name": "weather", "arguments": ""}
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in more)
        joined = "".join(part["function"]["arguments"] for part in more)
        assert json.loads(joined) == {"city": 'Paris é " é }'}
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me look."
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert api.chat(tools=TOOLS, stream=True).body.isascii()


@pytest.mark.parametrize("more", [{"n": 1}, {"n": 2, "logprobs": True, "top_logprobs": 1}], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 40},
        {"max_tokens": 90},
        {"parallel_tool_calls": False},
        {"stop": "Rome"},
        {"tool_choice": "none"},
        {"include_reasoning": False},
        {"return_token_ids": True},
    ],
)
@pytest.mark.parametrize("line", list(LINES.values()), ids=list(LINES))
def test_a_stream_is_the_plain_answer_in_pieces(line: str, fields: dict[str, Any], more: dict[str, Any]) -> None:
    with says(line) as api:
        asked = {"tools": TOOLS, **fields, **more}
        plain, streamed = api.chat(**asked), api.chat(**asked, stream=True, stream_options={"include_usage": True})
        assert without_ids(join(streamed)) == without_ids(whole(plain))
        usage = streamed.events()[-1]["usage"]
        for name in ("completion_tokens", "completion_tokens_details"):
            assert usage[name] == plain.json()["usage"][name]
        assert token_ids(streamed) == [choice.get("token_ids", []) for choice in plain.json()["choices"]]


def token_ids(stream: Answer) -> list[list[int]]:
    """The ids of each choice, from the chunks."""
    ids: dict[int, list[int]] = {}
    for event in stream.events():
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return [ids[index] for index in sorted(ids)]


def test_two_calls_and_one() -> None:
    with says(LINES["two"]) as api:
        for fields, names in (({}, ["weather", "time"]), ({"parallel_tool_calls": False}, ["weather"])):
            message = api.chat(tools=TOOLS, **fields).json()["choices"][0]["message"]
            assert [made["function"]["name"] for made in message["tool_calls"]] == names
            assert message["content"] is None


def test_a_call_that_is_cut_off_has_ended_by_length() -> None:
    with says(LINES["one"]) as api:
        [choice] = api.chat(tools=TOOLS, max_tokens=60).json()["choices"]
        [made] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length" and made["function"]["arguments"].startswith('{"city": "')


@pytest.mark.parametrize(
    ("line", "fields", "reason"),
    [
        (PARIS, {"stop": "Paris"}, "stop"),
        (PARIS, {"stop": "\n</tool"}, "tool_calls"),
        (f"{PARIS}\n{ROME}", {"stop": "Rome"}, "stop"),
        (PARIS.replace('"Paris', "Paris"), {}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_broke_off_is_not_to_be_run(line: str, fields: dict[str, Any], reason: str, stream: bool) -> None:
    """Bug: where its arguments were no JSON, or a stop string had cut them, the answer ended as one of whole calls."""
    with says(line) as api:
        answer = api.chat(tools=TOOLS, stream=stream, **fields)
        [choice] = answer.events()[-1]["choices"] if stream else answer.json()["choices"]
        assert choice["finish_reason"] == reason


def test_what_is_no_call_is_text() -> None:
    """Bug kind: a call that does not parse was a 500."""
    with says(LINES["broken"]) as api:
        [choice] = api.chat(tools=TOOLS).json()["choices"]
        assert choice["message"]["content"] == LINES["broken"] and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}], ids=str)
def test_without_tools_nothing_is_a_call(fields: dict[str, Any]) -> None:
    with says(LINES["one"]) as api:
        [choice] = api.chat(**fields).json()["choices"]
        assert choice["message"]["content"] == LINES["one"] and choice["finish_reason"] == "stop"
        assert "tools: " not in prompt_of(api, **fields)


def test_each_choice_has_its_own_calls() -> None:
    def line(item: ScheduledRequest) -> list[int]:
        number = item.request_id.rpartition("-")[2]
        return [*tokens(call("weather", f'{{"city": "{number[:1]}"}}') if number == "1" else "none"), EOS]

    with Api(line, template=THINKING_WITH_TOOLS, max_model_len=512) as api:
        for choices in (whole(api.chat(tools=TOOLS, n=3)), join(api.chat(tools=TOOLS, n=3, stream=True))):
            assert [choices[index]["finish_reason"] for index in range(3)] == ["stop", "tool_calls", "stop"]
            assert choices[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "1"}'


def test_reasoning_and_its_count() -> None:
    thought = "<think>because</think>"
    with says(f"{thought}\n\nSo.") as api:
        answer = api.chat().json()
        [choice] = answer["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "So.",
            "refusal": None,
            "reasoning_content": "because",
            "reasoning": "because",
        }
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(tokens(thought))}
        hidden = api.chat(include_reasoning=False).json()
        assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "So.", "refusal": None}
        assert hidden["usage"]["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
        deltas = [event["choices"][0]["delta"] for event in api.chat(stream=True).events()]
        assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas if "reasoning" in delta)
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "because"


def test_reasoning_that_never_ends() -> None:
    with says("<think>on and on") as api:
        [choice] = api.chat(max_tokens=12).json()["choices"]
        assert choice["message"]["content"] == "" and choice["message"]["reasoning"] == "on an"
        assert choice["finish_reason"] == "length"


def test_effort_and_template_variables_reach_the_prompt() -> None:
    with says("So.") as api:
        assert prompt_of(api).endswith("assistant: ")
        closed = "<think>\n\n</think>\n\n"
        assert prompt_of(api, reasoning_effort="none").endswith(closed)
        assert prompt_of(api, chat_template_kwargs={"enable_thinking": False}).endswith(closed)
        assert prompt_of(api, chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")
        assert prompt_of(api, reasoning={"effort": "none"}).endswith(closed)
        assert prompt_of(api, reasoning={"effort": None}) == prompt_of(api, reasoning={}) == prompt_of(api)
        refused = api.chat(chat_template_kwargs={"messages": []})
        assert refused.status == 400 and refused.error["param"] == "chat_template_kwargs"


def test_reasoning_that_the_prompt_has_opened() -> None:
    with says("because</think>So.") as api:
        fields = {"chat_template_kwargs": {"enable_thinking": True}}
        for choices in (whole(api.chat(**fields)), join(api.chat(**fields, stream=True))):
            assert (choices[0]["reasoning"], choices[0]["content"]) == ("because", "So.")


def test_a_conversation_with_calls_and_results() -> None:
    history = [
        *HELLO["messages"],
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with says("So.") as api:
        prompt = prompt_of(api, messages=history, tools=TOOLS)
        assert prompt == (
            "tools: weather time \nuser: hi\nassistant: <think>hm</think>"
            '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\ntool: rain\nassistant: '
        )
        tokenized = api.post("/tokenize", {"messages": history, "tools": TOOLS}).json()["tokens"]
        assert TOKENIZER.decode(tokenized) == prompt


def test_the_answer_goes_on_where_the_last_message_ends() -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "It is "}]
    with says("sunny.") as api:
        prompt = prompt_of(api, messages=messages, continue_final_message=True)
        assert prompt == "user: hi\nassistant: It is "
        ids = api.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
        assert TOKENIZER.decode(ids) == prompt
        assert api.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]["content"] == (
            "sunny."
        )
        wrong = api.chat(continue_final_message=True)
        assert wrong.status == 400 and wrong.error["param"] == "continue_final_message"


def test_tool_choices_that_cannot_be() -> None:
    with says("So.") as api:
        unknown = api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})
        assert (
            unknown.status == 400 and unknown.error["param"] == "tool_choice" and "'nope'" in unknown.error["message"]
        )
        assert api.chat(tool_choice="required").error["param"] == "tool_choice"
        wrong = api.post(CHAT, {**HELLO, "tools": [tool("a"), {"type": "function"}]})
        assert wrong.error["param"] == "tools" and "tools[1]" in wrong.error["message"]


SCHEMA_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": []}, "properties must be an object of schemas, got []"),
    ({"properties": {"a": 5}}, "properties.a must be an object or a boolean, got 5"),
    ({"required": "a"}, 'required must be an array of strings, got "a"'),
    ({"$ref": "#/$defs/none"}, '$ref is "#/$defs/none", but there is nothing at this place'),
    ({"type": ["object", "null"]}, 'must have the type "object", for arguments are always one'),
    ({"properties": {"a": {"type": []}}}, "properties.a.type must be one of string"),
    ({"properties": {"a": {"multipleOf": 0}}}, "properties.a.multipleOf must be a number greater than 0, got 0"),
]
UNENFORCEABLE: list[tuple[dict[str, Any], str]] = [
    ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "use anyOf"),
    ({"properties": {"a": {"type": "string", "format": "x"}}}, "the format 'x' is not known; leave it out"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' is not supported; leave it out"),
]
INNER = ("structured_outputs", "coerce", "Lark", "llguidance", "tool_call>", "%json")


@pytest.mark.parametrize("choice", ["none", "auto", "required", "wrong"])
@pytest.mark.parametrize(("parameters", "words"), SCHEMA_FAULTS, ids=str)
def test_malformed_parameters_are_refused_whatever_the_choice(
    parameters: dict[str, Any], words: str, choice: str
) -> None:
    """Bug: they passed where no call was demanded, and were a fault of structured_outputs.grammar elsewhere."""
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "wrong"}}
    with says("So.") as api:
        answer = api.chat(tools=[*TOOLS, wrong], tool_choice=named if choice == "wrong" else choice)
        assert answer.brief() == (400, "invalid_request_error", "invalid_value")
        assert answer.error["param"] == "tools[2].function.parameters"
        message = answer.error["message"]
        assert message.startswith("tools[2].function.parameters of 'wrong' ") and words in message


@pytest.mark.parametrize(("parameters", "words"), UNENFORCEABLE, ids=str)
def test_what_a_grammar_cannot_keep_to_is_refused_only_where_there_is_one(
    parameters: dict[str, Any], words: str
) -> None:
    wrong: dict[str, Any] = {"name": "wrong", "parameters": parameters}
    with says("So.") as api:
        loose = [*TOOLS, {"type": "function", "function": wrong}]
        assert api.chat(tools=loose, tool_choice="auto").status == 200
        strict = [*TOOLS, {"type": "function", "function": {**wrong, "strict": True}}]
        for answer in (api.chat(tools=strict), api.chat(tools=loose, tool_choice="required")):
            assert answer.status == 400 and answer.error["param"] == "tools[2].function.parameters"
            message = answer.error["message"]
            assert message.startswith("tools[2].function.parameters of 'wrong' ") and words in message
            assert not any(word in message for word in INNER), message


@pytest.mark.parametrize("kind", ["schema", "json_schema"])
def test_a_fault_of_a_response_format_names_it(kind: str) -> None:
    """Bug: it was one of response_format.json, a field that nobody has."""
    schema = {"properties": {"a": {"type": "string", "format": "x"}}}
    name, fields = {
        "schema": ("response_format.schema", {"type": "json_object", "schema": schema}),
        "json_schema": (
            "response_format.json_schema.schema",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        ),
    }[kind]
    with says("So.") as api:
        for tools in (None, TOOLS):
            answer = api.chat(response_format=fields, tools=tools)
            assert answer.status == 400 and answer.error["param"] == "response_format"
            assert answer.error["message"].startswith(f"{name} cannot be used: the format 'x' is not known")


def test_structured_outputs_beside_demanded_calls() -> None:
    """Bug: they were ignored. A response_format is, as documented: clients send it with every request."""
    with says(LINES["one"]) as api:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = api.chat(tools=TOOLS, tool_choice=choice, structured_outputs={"choice": ["a"]})
            assert answer.status == 400 and answer.error["param"] == "structured_outputs"
            assert "tool_choice" in answer.error["message"]


def test_a_message_without_text_cannot_be_continued() -> None:
    """Bug: where calls become text, the text of a call was continued."""
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    knows_no_tools = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for template in (THINKING_WITH_TOOLS, knows_no_tools):
        with Api(lambda _: [EOS], template=template, max_model_len=1024) as api:
            for fields in ({"tool_calls": [made]}, {"content": None}, {"content": ""}):
                messages = [*HELLO["messages"], {"role": "assistant", **fields}]
                for path in (CHAT, "/tokenize"):
                    answer = api.post(path, {"messages": messages, "continue_final_message": True})
                    assert answer.status == 400 and answer.error["param"] == "continue_final_message", answer.body


def test_histories_that_could_not_have_been() -> None:
    messages = [*HELLO["messages"], {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    with says("So.") as api:
        for path in (CHAT, "/tokenize"):
            answer = api.post(path, {"messages": messages})
            assert answer.status == 400 and answer.error["param"] == "messages"
            assert answer.error["message"].startswith("messages[1].tool_call_id is '1', but ")


def test_tokenize_counts_what_a_chat_with_the_same_fields_would() -> None:
    """Bug: tool_choice and reasoning_effort were ignored."""
    asked: dict[str, Any] = {"messages": HELLO["messages"], "tools": TOOLS}
    with says("So.") as api:
        counts = set()
        for fields in (
            {},
            {"tool_choice": "none"},
            {"tool_choice": "auto"},
            {"reasoning_effort": "none"},
            {"reasoning_effort": "high", "tool_choice": "none"},
        ):
            count = api.post("/tokenize", asked | fields).json()["count"]
            assert count == api.post(CHAT, asked | fields).json()["usage"]["prompt_tokens"], fields
            counts.add(count)
        assert len(counts) > 2, "guard: the fields change the prompt"
        for fields in ({"tool_choice": "any"}, {"reasoning_effort": "huge"}):
            [name] = fields
            assert api.post("/tokenize", asked | fields).error["param"] == name


def test_a_text_has_no_fields_of_a_conversation() -> None:
    """Bug: tools beside a prompt were ignored."""
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "none",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "add_generation_prompt": True,
        "continue_final_message": True,
    }
    with says("So.") as api:
        for name, value in fields.items():
            answer = api.post("/tokenize", {"prompt": "a", name: value})
            assert answer.status == 400 and answer.error["param"] == name
            assert answer.error["message"].startswith(f"{name} goes with messages, not with prompt")
        nothing = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": False, "tool_choice": None}
        assert api.post("/tokenize", {"prompt": "a", **nothing}).status == 200
