"""What the fields of a chat request, the model's template and the rendered prompt together say of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.options import ChatOptions
from miniserve.errors import ContextLengthError, InvalidParameterError
from miniserve.outputs import PLAIN_TEXT, OutputFormat, Thinking
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.parsers.base import TextDelta, Tool, ToolParser, read_tools
from miniserve.text.parsers.tool_format import NO_IDS
from miniserve.text.tokenizer import Tokenizer
from tests.chat_templates import THINKING_WITH_TOOLS

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPENING = PLAIN + "<think>\n"
MISTRAL = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}[THINK]"
USER = {"role": "user", "content": "Is there a <think> tag?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = read_tools([WEATHER, TIME])
STRICT = (Tool("weather", None, SCHEMA, strict=True),)
REGEX = StructuredOutput("regex", "a+")
JSON = StructuredOutput.json({"type": "object"}, "response_format")
THINK = Thinking("<think>", "</think>")
INSIDE = Thinking("<think>", "</think>", inside=True)


def make_tokenizer() -> Tokenizer:
    """Bytes, with tags of two families: those of one are special tokens, those of the other ordinary ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")])
    backend.add_special_tokens(["<eos>", "[TOOL_CALLS]", "[THINK]", "[/THINK]"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))  # type: ignore[no-untyped-call]


TOKENIZER = make_tokenizer()


class Recorder:
    """Compiles nothing: a grammar is what was asked for. What is called "broken" is refused."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutput] = []

    def compile(self, asked: StructuredOutput) -> Any:
        self.asked.append(asked)
        if "broken" in asked.source:
            raise InvalidParameterError(f"{asked.name}: it is broken", param=asked.param)
        return asked


def make_processor(template: str | None, grammars: Recorder | None = None) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        num_token_ids=TOKENIZER.num_token_ids,
        max_model_len=4096,
        kv_capacity_tokens=4096,
        eos_token_ids=frozenset(),
        chat_template=ChatTemplate(template, {}),
        grammars=grammars or Recorder(),
    )


def format_of(template: str, *messages: Any, structure: StructuredOutput | None = None, **options: Any) -> OutputFormat:
    processor = make_processor(template)
    sampling = SamplingParams(structured_outputs=structure)
    return processor.process_chat("r", messages or [USER], sampling, ChatOptions(**options)).output_format


def prompt_of(template: str, *messages: Any, **options: Any) -> str:
    return TOKENIZER.decode(make_processor(template).tokenize_chat(messages or [USER], ChatOptions(**options)))


def parser_of(
    processor: InputProcessor, chat: ChatOptions, structure: StructuredOutput | None = None
) -> ToolParser | None:
    sampling = SamplingParams(structured_outputs=structure)
    return processor.tool_parser(chat, processor.process_chat("r", [USER], sampling, chat))


# What was found


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (THINKING_WITH_TOOLS, "tools: hermes; reasoning: <think>"),
        (PLAIN, "tools: generic (the template knows none); reasoning: none"),
        (MISTRAL, "tools: mistral; reasoning: [THINK]"),
        (
            PLAIN + "{{ tools }}",
            "tools: generic (the template calls them in a syntax that is not known); reasoning: none",
        ),
        (None, "no chat template: completions only"),
    ],
)
def test_the_line_at_start(template: str | None, line: str) -> None:
    processor = make_processor(template)
    assert processor.formats.description == line
    assert template is None or f"tools: {processor.tool_format.name}" in line


def test_a_plain_request_has_a_plain_format() -> None:
    assert format_of(PLAIN) == PLAIN_TEXT
    assert (
        make_processor(THINKING_WITH_TOOLS).process_prompt("r", "<think>", SamplingParams()).output_format == PLAIN_TEXT
    )


def test_a_completion_with_a_structure() -> None:
    request = make_processor(PLAIN).process_prompt("r", "abc", SamplingParams(structured_outputs=REGEX))
    assert request.output_format == OutputFormat(grammar=REGEX)


# Reasoning


@pytest.mark.parametrize(
    ("options", "thinking"),
    [
        ({}, THINK),
        ({"template_kwargs": {"enable_thinking": False}}, None),
        ({"template_kwargs": {"enable_thinking": True}}, INSIDE),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, INSIDE),
        ({"reasoning_effort": "none", "template_kwargs": {"enable_thinking": False}}, None),
        ({"add_generation_prompt": False}, THINK),
    ],
)
def test_whether_reasoning_is_looked_for(options: dict[str, Any], thinking: Thinking | None) -> None:
    assert format_of(THINKING_WITH_TOOLS, **options).thinking == thinking


def test_a_template_that_opens_the_reasoning() -> None:
    assert format_of(OPENING).thinking == INSIDE
    assert format_of(OPENING, reasoning_effort="low").thinking == INSIDE
    with pytest.raises(InvalidParameterError, match="always reasons") as caught:
        format_of(OPENING, reasoning_effort="none")
    assert caught.value.param == "reasoning_effort"


def test_a_final_message_that_opens_the_reasoning() -> None:
    """Bug: the chat template was said to open it."""
    messages = [USER, {"role": "assistant", "content": "<think>So"}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(InvalidParameterError, match="'none', but the final message opens the reasoning") as caught:
        format_of(THINKING_WITH_TOOLS, *messages, reasoning_effort="none", **options)
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_what_templates_see_of_the_effort(effort: str) -> None:
    thinks = effort != "none"
    source = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
    assert prompt_of(source, reasoning_effort=effort) == f"{effort} {thinks} {thinks}"
    assert prompt_of(source, reasoning_effort=effort, template_kwargs={"thinking": 7}) == f"{effort} {thinks} 7"
    assert prompt_of("{{ reasoning_effort is defined }}") == "False"
    assert prompt_of(PLAIN, reasoning_effort=effort) == prompt_of(PLAIN), "nothing changes where none is read"


@pytest.mark.parametrize(
    ("content", "thinking"),
    [
        ("\n", THINK),
        ("Yes, th", None),
        ("<think>Hm", INSIDE),
        ("<think>", INSIDE),
        ("<think>Hm</think>", None),
        ("<think>Hm</think>Yes", None),
        ("<think>Hm</think>The tag is <think>", None),
        ('{"tag": "<think>', None),
        ("It is <think> and", None),
        ("<think>Hm</", replace(INSIDE, begun="</")),
        ("<thi", replace(THINK, begun="<thi")),
        ([{"type": "text", "text": "<think>Hm"}], INSIDE),
    ],
)
def test_reasoning_of_a_continued_message(content: Any, thinking: Thinking | None) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert format_of(THINKING_WITH_TOOLS, *messages, **options).thinking == thinking
    assert format_of(PLAIN, *messages, **options).thinking is None


# Tools


def test_tools_reach_a_template_that_knows_them() -> None:
    source = PLAIN + '{{ tools | tojson }}<tool_call> {"arguments": '
    text = prompt_of(source, tools=TOOLS)
    assert text == ChatTemplate(source, {}).render([USER], tools=[WEATHER, TIME]) and '"Of now"' in text
    assert "null" in prompt_of(source, tools=TOOLS, tool_choice="none")


def test_a_template_that_knows_no_tools_gets_text() -> None:
    call = {"id": "1", "function": {"name": "time", "arguments": '{"zone": "UT'}}
    answer = {"role": "tool", "tool_call_id": "1", "content": "12:00"}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    text = prompt_of(PLAIN, *history, tools=TOOLS)
    assert text.startswith("system: ") and '"Of now"' in text
    assert '"arguments": {"zone": "UT}\n</tool_call>' in text, "what the model wrote, though it is broken"
    assert "user: <tool_response>\n12:00\n</tool_response>" in text
    untold = prompt_of(PLAIN, *history)
    assert untold.startswith("user: ") and "12:00" in untold and "Of now" not in untold


def test_special_tokens_that_a_tool_spells_are_text() -> None:
    tool = Tool("f", "Ends with <eos>")
    for template in (PLAIN, THINKING_WITH_TOOLS + "{{ tools | tojson }}"):
        ids = make_processor(template).tokenize_chat([USER], ChatOptions(tools=(tool,)))
        assert "<eos>" in TOKENIZER.decode(ids) and TOKENIZER.eos_token_id not in ids


@pytest.mark.parametrize(
    ("chat", "structure", "shown"),
    [
        (ChatOptions(tools=TOOLS), JSON, ""),
        (ChatOptions(tools=TOOLS), REGEX, ""),
        (ChatOptions(tools=TOOLS), None, "<to"),
    ],
)
def test_the_beginning_of_a_call_beside_a_structure(
    chat: ChatOptions, structure: StructuredOutput | None, shown: str
) -> None:
    """Bug: where only a call begins so, it was shown as the answer when it was cut."""
    parser = parser_of(make_processor(THINKING_WITH_TOOLS), chat, structure)
    assert parser is not None
    deltas = parser.push("<to") + parser.flush(is_cut=True)
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == shown


def test_tags_that_are_special_tokens_are_shown() -> None:
    calls, start, end = (TOKENIZER.special_id(tag) for tag in ("[TOOL_CALLS]", "[THINK]", "[/THINK]"))
    assert format_of(MISTRAL, tools=TOOLS).shown_ids == {calls, start, end}
    assert format_of(MISTRAL).shown_ids == {start, end}
    assert format_of(THINKING_WITH_TOOLS, tools=TOOLS).shown_ids == frozenset(), "these are text anyway"


def test_parsers() -> None:
    processor = make_processor(THINKING_WITH_TOOLS)
    chat = ChatOptions(tools=TOOLS)
    first, second = parser_of(processor, chat), parser_of(processor, chat)
    assert first is not None and first is not second, "each choice has its own"
    assert parser_of(processor, ChatOptions()) is None
    assert parser_of(processor, ChatOptions(tools=TOOLS, tool_choice="none")) is None


# Grammars


def test_no_grammar_without_a_reason() -> None:
    assert format_of(THINKING_WITH_TOOLS, tools=TOOLS).grammar is None
    assert format_of(THINKING_WITH_TOOLS, tools=STRICT, tool_choice="none").grammar is None
    assert format_of(PLAIN, structure=REGEX).grammar == REGEX
    assert format_of(PLAIN, structure=REGEX, tools=STRICT, tool_choice="none").grammar == REGEX


@pytest.mark.parametrize(
    ("options", "structure", "tools", "expected"),
    [
        ({"tool_choice": "required"}, None, TOOLS, {"required": True}),
        ({"tool_choice": "required"}, JSON, TOOLS, {"required": True}),
        ({"tool_choice": "required", "tool_name": "time"}, None, TOOLS[1:], {"required": True, "max_calls": 1}),
        ({}, REGEX, TOOLS, {"answer": REGEX}),
        ({"parallel_tool_calls": False}, REGEX, TOOLS, {"answer": REGEX, "max_calls": 1}),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, THINKING_WITH_TOOLS, MISTRAL])
def test_grammars_of_calls(
    template: str,
    options: dict[str, Any],
    structure: StructuredOutput | None,
    tools: tuple[Tool, ...],
    expected: dict[str, Any],
) -> None:
    grammar = format_of(template, tools=TOOLS, structure=structure, **options).grammar
    calls = TOKENIZER.special_id("[TOOL_CALLS]")
    assert calls is not None
    special_ids = {"[TOOL_CALLS]": calls} if template == MISTRAL else NO_IDS
    source = make_processor(template).tool_format.grammar(tools, special_ids=special_ids, **expected)
    assert grammar == StructuredOutput("grammar", source)


def test_a_strict_tool_has_a_grammar_though_nothing_is_demanded() -> None:
    grammar = format_of(THINKING_WITH_TOOLS, tools=STRICT).grammar
    assert grammar.source == make_processor(THINKING_WITH_TOOLS).tool_format.grammar(STRICT)


def test_the_field_at_fault_is_named() -> None:
    """Bug kind: who sent a wrong regular expression beside tools was told that the tools are wrong."""
    broken = StructuredOutput("regex", "broken")
    free = Tool("wrong", None, {"properties": {"broken": {}}})
    tool = replace(free, strict=True)
    place = "tools[2].function.parameters"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"structure": broken}, "structured_outputs"),
        ({"structure": broken, "tools": TOOLS}, "structured_outputs"),
        ({"structure": broken, "tools": (tool,)}, "structured_outputs"),
        ({"structure": broken, "tools": (free,)}, "structured_outputs"),
        ({"structure": REGEX, "tools": (*TOOLS, tool)}, place),
        ({"structure": JSON, "tools": (*TOOLS, tool, *STRICT)}, place),
        ({"tools": (*TOOLS, tool), "tool_choice": "required"}, place),
        ({"tools": (*TOOLS, tool), "tool_choice": "required", "tool_name": "wrong"}, place),
        ({"tools": (free, free, tool, Tool("strict", strict=True))}, place),
        ({"tools": (*TOOLS, tool, *(Tool(f"f{i}") for i in range(20))), "tool_choice": "required"}, place),
    ]
    for options, param in cases:
        with pytest.raises(InvalidParameterError, match="it is broken") as caught:
            format_of(PLAIN, **options)
        assert caught.value.param == param, options
        assert param != place or str(caught.value) == f"{place} of 'wrong': it is broken", options


def test_what_is_too_much_only_together_is_the_fault_of_all_tools() -> None:
    tools = tuple(Tool(f"f{i}", None, {"properties": {"a": {"enum": ["x" * 30_000]}}}) for i in range(6))
    with pytest.raises(InvalidParameterError, match=r"^tools has 18\d{4} characters") as caught:
        format_of(THINKING_WITH_TOOLS, tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
    tools = tuple(replace(tool, strict=True) for tool in tools)
    long = StructuredOutput("regex", "a" * 120_000)
    with pytest.raises(InvalidParameterError, match=r"tools beside structured_outputs\.regex has ") as caught:
        format_of(THINKING_WITH_TOOLS, tools=tools[:1], structure=long)
    assert caught.value.param == "tools"


def test_only_strict_tools_are_held_to_their_schemas() -> None:
    """Bug: one strict tool made the schemas of all others part of the grammar, and one of those could refuse it."""
    wrong = Tool("wrong", None, {"properties": {"broken": {}}})
    assert format_of(THINKING_WITH_TOOLS, tools=(wrong, *STRICT)).grammar is not None
    assert format_of(THINKING_WITH_TOOLS, tools=(wrong,), structure=JSON).grammar is not None
    with pytest.raises(InvalidParameterError, match="it is broken"):
        format_of(THINKING_WITH_TOOLS, tools=(wrong, *STRICT), tool_choice="required")


def test_structured_outputs_and_demanded_calls_exclude_each_other() -> None:
    """Bug: the calls won without a word."""
    for options in ({}, {"tool_name": "time"}):
        with pytest.raises(InvalidParameterError, match="structured_outputs and tool_choice") as caught:
            format_of(PLAIN, structure=REGEX, tools=TOOLS, tool_choice="required", **options)
        assert caught.value.param == "structured_outputs"
    assert format_of(PLAIN, structure=REGEX, tools=TOOLS, tool_choice="none").grammar == REGEX


def test_nothing_is_compiled_for_a_request_that_is_refused_anyway() -> None:
    grammars = Recorder()
    processor = make_processor(PLAIN, grammars)
    sampling = SamplingParams(structured_outputs=REGEX, max_tokens=10_000)
    with pytest.raises(ContextLengthError):
        processor.process_prompt("r", "a", sampling)
    with pytest.raises(ContextLengthError):
        processor.process_chat("r", [USER], sampling)
    assert grammars.asked == []


def test_stop_strings_do_not_break_demanded_calls() -> None:
    """`stop: ["}"]` cut the arguments of a demanded call, and the answer still said that it called."""
    processor = make_processor(THINKING_WITH_TOOLS)
    sampling = SamplingParams(stop=("}",), stop_token_ids=(1,))
    demanded = processor.process_chat("r", [USER], sampling, ChatOptions(tools=TOOLS, tool_choice="required"))
    assert (demanded.sampling.stop, demanded.sampling.stop_token_ids) == ((), (1,))
    offered = processor.process_chat("r", [USER], sampling, ChatOptions(tools=TOOLS))
    assert (offered.sampling.stop, offered.sampling.stop_token_ids) == (("}",), (1,))
