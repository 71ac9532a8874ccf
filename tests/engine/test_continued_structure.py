"""A final message that goes on under a structure: its text and what follows it are one answer. With real grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from miniserve.engine.answer import join_deltas
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.options import ChatOptions
from miniserve.errors import InvalidParameterError
from miniserve.outputs import EngineOutput
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.structured.compiler import GrammarCompiler
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.parsers.base import Tool
from tests.engine.scripted import EOS, TOKENIZER, make_engine, tokens

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
OPTIONS: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
USER = {"role": "user", "content": "go"}
CHOICE = StructuredOutput.choice(["yes", "yesterday", "né"])
MAX_MODEL_LEN = 1000


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(
        TOKENIZER, num_token_ids=TOKENIZER.num_token_ids, eos_token_ids=frozenset({EOS}), max_tokens=MAX_MODEL_LEN
    )
    yield compiler
    compiler.close()


def make_processor(grammars: GrammarCompiler, *, thinks: bool = False) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        num_token_ids=TOKENIZER.num_token_ids,
        max_model_len=MAX_MODEL_LEN,
        kv_capacity_tokens=1000,
        eos_token_ids=frozenset({EOS}),
        chat_template=ChatTemplate(TEMPLATE + ("{# <think> #}" if thinks else ""), {}),
        grammars=grammars,
    )


def going_on(
    grammars: GrammarCompiler,
    beginning: str,
    line: str,
    structure: StructuredOutput = CHOICE,
    *,
    thinks: bool = False,
    max_tokens: int = 30,
    **options: Any,
) -> EngineOutput:
    """What is added to `beginning` by a model that would write `line`."""
    processor = make_processor(grammars, thinks=thinks)
    messages = [USER, {"role": "assistant", "content": beginning}]
    sampling = SamplingParams(structured_outputs=structure, max_tokens=max_tokens)
    request = processor.process_chat("a", messages, sampling, ChatOptions(**{**OPTIONS, **options}))
    engine = make_engine({"a": [*tokens(line), EOS]}, max_model_len=MAX_MODEL_LEN, num_blocks=250)
    engine.add(request)
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    whole = outputs[0]
    for output in outputs[1:]:
        whole = whole.merge(output)
    return whole


@pytest.mark.parametrize(
    ("beginning", "line", "added"),
    [("ye", "sterday", "sterday"), ("yes", "", ""), ("n", "o", "é"), ("yesterday", "!", "")],
)
def test_both_together_are_the_answer(grammars: GrammarCompiler, beginning: str, line: str, added: str) -> None:
    """Bug: the grammar began anew behind the text that was given, so that no whole answer kept to it."""
    output = going_on(grammars, beginning, line)
    assert (output.text, output.finish_reason) == (added, "stop")


def test_json_goes_on_anywhere(grammars: GrammarCompiler) -> None:
    schema = StructuredOutput.json({"type": "object", "properties": {"a": {"enum": ["bé", 7]}}, "required": ["a"]})
    assert going_on(grammars, '{"a": "b', 'é"}', schema).text == 'é"}'
    assert going_on(grammars, "{", '"a": 7}', schema).text == '"a": 7}'


@pytest.mark.parametrize("beginning", ["no", "yess", " yes", "yes<eos>"])
def test_a_beginning_that_breaks_the_structure_is_refused(grammars: GrammarCompiler, beginning: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        going_on(grammars, beginning, "")
    assert caught.value.param == "continue_final_message"
    assert beginning in str(caught.value) and "structured_outputs.choice" in str(caught.value)
    named = replace(CHOICE, sent_as="response_format")
    with pytest.raises(InvalidParameterError, match=r"continue_final_message: .* response_format"):
        going_on(grammars, beginning, "", named)


@pytest.mark.parametrize(
    ("beginning", "line", "reasoning", "added"),
    [
        ("<think>hm</think>\n\nye", "s", "", "s"),
        ("<think>hm</think>", "yes", "", "yes"),
        ("<think>h", "m</think>yes", "m", "yes"),
        ("ye", "s", "", "s"),
    ],
)
def test_reasoning_is_no_part_of_it(
    grammars: GrammarCompiler, beginning: str, line: str, reasoning: str, added: str
) -> None:
    output = going_on(grammars, beginning, line, thinks=True)
    assert (output.reasoning, output.text) == (reasoning, added)


@pytest.mark.parametrize(
    ("beginning", "line", "reasoning", "text"),
    [
        ("<thi", "nk>hm</think>yes", "hm", "yes"),
        ("<think>hm</", "think>\n\nyes", "", "yes"),
        ("<think>hm<", "b</think>yes", "b", "yes"),
    ],
)
def test_half_a_tag_goes_on(grammars: GrammarCompiler, beginning: str, line: str, reasoning: str, text: str) -> None:
    """Bug: the other half was text, and with it the whole answer."""
    output = going_on(grammars, beginning, line, thinks=True)
    assert (output.reasoning, output.text) == (reasoning, text)


def test_a_tag_in_the_answer_opens_nothing(grammars: GrammarCompiler) -> None:
    """Bug: the rest of the answer was reasoning, and kept to no structure."""
    output = going_on(grammars, "a <think>", "no", StructuredOutput.choice(["a <think> b"]), thinks=True)
    assert (output.reasoning, output.text) == ("", " b")


def test_text_before_calls_that_are_demanded_is_free(grammars: GrammarCompiler) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}'
    asked = replace(CHOICE, sent_as="response_format")
    output = going_on(grammars, "Well: ", call, asked, tools=(Tool("f"),), tool_choice="required", max_tokens=45)
    assert output.text.startswith(call)


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("beginning", "structure"),
    [
        ('{"a": "', StructuredOutput.json({"type": "object", "properties": {"a": {"type": "string"}}})),
        ("a ", StructuredOutput("regex", "a (.|\\n)*")),
        ("<tool_c", StructuredOutput("regex", "(.|\\n)*")),
    ],
    ids=["in a string", "in a pattern", "in a tag"],
)
def test_a_structure_that_has_begun_has_no_calls(
    grammars: GrammarCompiler, beginning: str, structure: StructuredOutput
) -> None:
    """Bug: what looked like a call was taken out of the middle of a JSON string."""
    chat = ChatOptions(**OPTIONS, tools=(Tool("f"),))
    sampling = SamplingParams(structured_outputs=structure)
    messages = [USER, {"role": "assistant", "content": beginning}]
    processor = make_processor(grammars)
    request = processor.process_chat("a", messages, sampling, chat)
    assert processor.tool_parser(chat, request) is None
    line = json.dumps(CALL)[1:-1] + '"}' if beginning.startswith("{") else CALL
    assert going_on(grammars, beginning, line, structure, tools=chat.tools, max_tokens=80).text == line


def test_a_call_that_has_begun_is_no_structure(grammars: GrammarCompiler) -> None:
    """Bug: it went on, and its second half was the answer."""
    with pytest.raises(InvalidParameterError, match="does not begin an answer that keeps to") as caught:
        going_on(grammars, "<tool_c", "", tools=(Tool("f"),))
    assert caught.value.param == "continue_final_message"


def test_behind_reasoning_calls_and_the_structure_begin_alike(grammars: GrammarCompiler) -> None:
    """Bug: half a call was shown as the answer there."""
    chat = ChatOptions(**OPTIONS, tools=(Tool("f"),))
    processor = make_processor(grammars, thinks=True)
    messages = [USER, {"role": "assistant", "content": "<think>hm</think>"}]
    request = processor.process_chat("a", messages, SamplingParams(structured_outputs=CHOICE), chat)
    for line, text, num_calls in ((CALL, "", 1), ("yes", "yes", 0)):
        parser = processor.tool_parser(chat, request)
        assert parser is not None
        answer = join_deltas(parser.push(line) + parser.flush())
        assert (answer.text, len(answer.tool_calls)) == (text, num_calls)


def test_an_answer_that_is_longer_than_the_context_is_refused(grammars: GrammarCompiler) -> None:
    """Bug: the model wrote until it had no tokens left."""
    with pytest.raises(InvalidParameterError, match=f"tokens at least, and the context holds {MAX_MODEL_LEN}"):
        going_on(grammars, '"', "", StructuredOutput.json({"type": "string", "minLength": 100_000}))
