"""Qwen3's own tokenizer and chat template with scripted output: reasoning and calls, whatever tokens they come in."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from miniserve.engine.answer import Answer, deltas_of, join_deltas
from miniserve.engine.input_processor import InputProcessor
from miniserve.engine.options import ChatOptions
from miniserve.outputs import EngineOutput, FinishReason, ToolCall
from miniserve.sampling_params import SamplingParams
from miniserve.text.parsers.base import Tool
from miniserve.text.tokenizer import Tokenizer
from tests.engine.scripted import make_engine
from tests.text.qwen3 import qwen3_folder

MAX_MODEL_LEN = 4096
TOOLS = (
    Tool("get_weather", "The weather in a city.", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("add", None, {"type": "object", "properties": {"terms": {"type": "array"}}}),
)
MESSAGES = [{"role": "user", "content": "What is the weather in Paris, and 1 + 2?"}]
REASONING = 'The user wants {"two"} things.\nI call both <tools>.'
FIRST = '{"city": "Par}is \\"é\\"", "at": {"day": [1, {}]}}'
SECOND = '{"terms": [1, 2]}'
CALLS = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {FIRST}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "add", "arguments": {SECOND}}}\n</tool_call>'
)
SAID = f"<think>\n{REASONING}\n</think>\n\nLet me look.\n{CALLS}"
EXPECTED = Answer(REASONING, "Let me look.", (ToolCall("get_weather", FIRST), ToolCall("add", SECOND)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(qwen3_folder())


def make_processor(tokenizer: Tokenizer) -> InputProcessor:
    assert tokenizer.eos_token_id is not None
    return InputProcessor(
        tokenizer,
        num_token_ids=tokenizer.num_token_ids,
        max_model_len=MAX_MODEL_LEN,
        kv_capacity_tokens=10 * MAX_MODEL_LEN,
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
    )


def run(tokenizer: Tokenizer, lines: Sequence[Sequence[int]], chat: ChatOptions) -> list[list[EngineOutput]]:
    """The outputs of each line, which is what the model says to the conversation."""
    processor = make_processor(tokenizer)
    script = {str(number): line for number, line in enumerate(lines)}
    engine = make_engine(
        script,
        num_blocks=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=20_000,
        max_model_len=MAX_MODEL_LEN,
        tokenizer=tokenizer,
    )
    for request_id in script:
        engine.add(processor.process_chat(request_id, MESSAGES, SamplingParams(max_tokens=400), chat))
    outputs: dict[str, list[EngineOutput]] = {request_id: [] for request_id in script}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return list(outputs.values())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def splits(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The model's own tokens, one a byte, and those of every cut in two; each with the end token."""
    whole = encode(tokenizer, text)
    assert tokenizer.eos_token_id is not None
    characters = [token_id for char in text for token_id in encode(tokenizer, char)]
    cut = [encode(tokenizer, text[:place]) + encode(tokenizer, text[place:]) for place in range(1, len(text))]
    return [[*line, tokenizer.eos_token_id] for line in (whole, characters, *cut)]


def test_every_split_into_tokens(tokenizer: Tokenizer) -> None:
    chat = ChatOptions(tools=TOOLS)
    processor = make_processor(tokenizer)
    request = processor.process_chat("r", MESSAGES, SamplingParams(), chat)
    for outputs in run(tokenizer, splits(tokenizer, SAID), chat):
        parser = processor.tool_parser(chat, request)
        streamed = join_deltas(delta for output in outputs for delta in deltas_of(output, parser))
        whole = outputs[0]
        for output in outputs[1:]:
            whole = whole.merge(output)
        plain = join_deltas(deltas_of(whole, processor.tool_parser(chat, request)))
        assert streamed == plain == EXPECTED
        assert whole.finish_reason is FinishReason.STOP
        assert 0 < whole.usage.reasoning_tokens < whole.usage.completion_tokens
    assert json.loads(FIRST)["city"] == 'Par}is "é"'


def test_without_thinking_the_prompt_closes_the_reasoning(tokenizer: Tokenizer) -> None:
    chat = ChatOptions(tools=TOOLS, template_kwargs={"enable_thinking": False})
    processor = make_processor(tokenizer)
    request = processor.process_chat("r", MESSAGES, SamplingParams(), chat)
    for outputs in run(tokenizer, splits(tokenizer, f"Let me look.\n{CALLS}")[:40], chat):
        parser = processor.tool_parser(chat, request)
        answer = join_deltas(delta for output in outputs for delta in deltas_of(output, parser))
        assert answer == Answer("", EXPECTED.text, EXPECTED.tool_calls)
        assert outputs[-1].usage.reasoning_tokens == 0


def test_cut_in_the_reasoning(tokenizer: Tokenizer) -> None:
    """No end tag within the limit: all of it is reasoning."""
    line = encode(tokenizer, "<think>\n" + "so, " * 300)
    [outputs] = run(tokenizer, [line], ChatOptions(tools=TOOLS))
    answer = join_deltas(delta for output in outputs for delta in deltas_of(output, None))
    assert answer.text == "" and answer.reasoning.startswith("so, so,")
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].usage.reasoning_tokens == 400
