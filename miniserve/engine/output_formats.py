"""What the answer to a request is made of: reasoning, calls, a structure. Settled before the request starts.

Owns how the fields of a request come together to one `OutputFormat`, and the syntax in which this model reasons and
calls, found in its chat template. Does not render or tokenise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from miniserve.engine.options import ChatOptions
from miniserve.errors import InvalidParameterError, shown
from miniserve.outputs import PLAIN_TEXT, OutputFormat, Thinking
from miniserve.sampling_params import StructuredOutput
from miniserve.structured.compiler import GrammarError
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.messages import Message
from miniserve.text.parsers.base import Tool
from miniserve.text.parsers.formats import find_format
from miniserve.text.parsers.tool_format import ToolFormat
from miniserve.text.reasoning import answer_in, find_thinking, thinking_behind
from miniserve.text.tokenizer import Tokenizer

_MAX_SEARCH_SECONDS = 2.0  # for the tool that is at fault, of many


class Compiler(Protocol):
    """Makes grammars: `structured.GrammarCompiler`, or a fake in tests."""

    def compile(self, asked: StructuredOutput) -> Any:
        """The grammar; raises `InvalidParameterError`, which calls it by its `name`, if there can be none."""


class OutputFormats:
    """Holds what the model's template says of its answers.

    Args:
        template: the model's.
        tokenizer: the model's.
        grammars: compiles what structured answers have to look like.

    Attributes:
        tool_format: how the model calls tools, and is told of them.
        thinking: how it marks its reasoning; None if the template knows of none.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, grammars: Compiler) -> None:
        self.tool_format: ToolFormat = find_format(template.source)
        self.thinking = find_thinking(template.source)
        self._template = template
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._special_ids = self._ids_of(self.tool_format.shown_tokens)
        tags = () if self.thinking is None else (self.thinking.start, self.thinking.end)
        self._tag_ids = frozenset(self._ids_of(tags).values())

    @property
    def description(self) -> str:
        """The line for the start."""
        if self._template.source is None:
            return "no chat template: completions only"
        told = ""
        if not self.tool_format.told_by_template:
            known = "tools" in self._template.variables
            told = f" (the template {'calls them in a syntax that is not known' if known else 'knows none'})"
        return f"tools: {self.tool_format.name}{told}; reasoning: {self.thinking.start if self.thinking else 'none'}"

    def of_prompt(self, structure: StructuredOutput | None) -> OutputFormat:
        """The format of what goes on with a plain text: all of it is answer.

        Raises:
            InvalidParameterError: `structure` cannot be compiled.
        """
        return PLAIN_TEXT if structure is None else OutputFormat(grammar=self._grammars.compile(structure))

    def of_chat(
        self, prompt: str, messages: Sequence[Message], chat: ChatOptions, structure: StructuredOutput | None
    ) -> OutputFormat:
        """The format of an answer to a conversation.

        Args:
            prompt: the rendered text.
            messages: with text as content.
            chat: where tools are demanded, calls are all that comes, whatever a response_format says.
            structure: of an answer in words.

        Raises:
            InvalidParameterError: the structure or the tools cannot be compiled, they contradict each other, or no
                reasoning is wanted of a model that always reasons.
        """
        if chat.demanded_tools and structure is not None and structure.param == "structured_outputs":
            raise InvalidParameterError(
                "structured_outputs and tool_choice contradict each other: an answer that has to call tools is made of "
                "calls only; leave out one of them",
                param="structured_outputs",
            )
        thinking = self._thinking(prompt, messages, chat)
        if structure is not None and (begun := self._begun_answer(thinking, messages, chat)):
            # Calls would come in place of the structure, not in its middle.
            return OutputFormat(grammar=self._rest(structure, begun))
        shown_ids = self._tag_ids if thinking is not None else frozenset()
        if chat.offered_tools:
            shown_ids = shown_ids.union(self._special_ids.values())
        return OutputFormat(thinking, shown_ids, self._grammar(chat, structure))

    def _begun_answer(self, thinking: Thinking | None, messages: Sequence[Message], chat: ChatOptions) -> str:
        """What the final message has of the answer in words; none where reasoning has yet to come, or to end."""
        if not chat.continue_final_message or chat.demanded_tools or thinking is not None:
            return ""
        return answer_in(messages[-1]["content"], self.thinking)

    def _rest(self, structure: StructuredOutput, begun: str) -> Any:
        """The grammar of what follows `begun`, so that both together keep to `structure`."""
        try:
            return self._grammars.compile(structure).after(begun)
        except GrammarError as error:
            raise InvalidParameterError(
                f"continue_final_message: the final message, {shown(begun)}, does not begin an answer that keeps to "
                f"{structure.name}; correct its text, or leave one of the two fields out",
                param="continue_final_message",
            ) from error

    def _thinking(self, prompt: str, messages: Sequence[Message], chat: ChatOptions) -> Thinking | None:
        """None where the prompt has closed the reasoning, or the answer has begun already."""
        if self.thinking is None or prompt.rstrip().endswith(self.thinking.end):
            return None
        final = messages[-1]["content"] if chat.continue_final_message else ""
        thinking = thinking_behind(final, self.thinking)
        is_open = thinking is not None and thinking.inside
        if is_open or (not final.strip() and prompt.rstrip().endswith(self.thinking.start)):
            if chat.reasoning_effort == "none":
                why = "the final message opens the reasoning, which goes on"
                if not is_open:
                    why = "this model always reasons: its chat template opens the reasoning"
                raise InvalidParameterError(
                    f"reasoning_effort is 'none', but {why}; leave reasoning_effort out, or take another "
                    + ("message" if is_open else "model"),
                    param="reasoning_effort",
                )
            return thinking if is_open else replace(self.thinking, inside=True)
        return thinking

    def _grammar(self, chat: ChatOptions, structure: StructuredOutput | None) -> Any:
        tools = chat.demanded_tools or chat.offered_tools
        required = bool(chat.demanded_tools)
        if not tools or not (required or structure is not None or any(tool.strict for tool in tools)):
            return None if structure is None else self._grammars.compile(structure)
        answer = None if required else structure
        try:
            return self._grammar_of_calls(tools, chat, answer=answer, required=required)
        except InvalidParameterError as error:
            if answer is not None:
                self._grammars.compile(answer)  # raises if the fault is there
            elif len(tools) == 1:
                raise
            raise self._fault_of_one(tools, chat) or error from None

    def _grammar_of_calls(
        self, tools: Sequence[Tool], chat: ChatOptions, *, answer: StructuredOutput | None, required: bool
    ) -> Any:
        if answer is not None:
            param, name = "tools", f"tools beside {answer.name}"
        elif len(tools) > 1:
            param = name = "tools"
        else:
            param = f"tools[{chat.tools.index(tools[0])}].function.parameters"
            name = f"{param} of {tools[0].name!r}"
        try:
            source = self.tool_format.grammar(
                tools, max_calls=chat.max_calls, answer=answer, required=required, special_ids=self._special_ids
            )
            return self._grammars.compile(StructuredOutput("grammar", source, name))
        except InvalidParameterError as error:
            error.param = param
            raise

    def _fault_of_one(self, tools: Sequence[Tool], chat: ChatOptions) -> InvalidParameterError | None:
        """The error of the tool at fault, found by halves; None where only all together are too much, or in doubt."""
        deadline = time.monotonic() + _MAX_SEARCH_SECONDS
        while len(tools) > 1:
            half = tools[: len(tools) // 2]
            tools = half if self._fault(half, chat) is not None else tools[len(half) :]
            if time.monotonic() > deadline:
                return None
        return self._fault(tools, chat)

    def _fault(self, tools: Sequence[Tool], chat: ChatOptions) -> InvalidParameterError | None:
        try:
            self._grammar_of_calls(tools, chat, answer=None, required=bool(chat.demanded_tools))
        except InvalidParameterError as error:
            return error
        return None

    def _ids_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Those that are special tokens; other texts are shown anyway."""
        ids = ((text, self._tokenizer.special_id(text)) for text in texts)
        return {text: token_id for text, token_id in ids if token_id is not None}
