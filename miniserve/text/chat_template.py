"""Chat messages to the prompt text the model was trained on. Owns the Jinja environment and its rules.

Templates come with checkpoints and are written for transformers: the environment offers what they find
there, in a sandbox, because a template is code of strangers. Does not know tokens: the caller tokenises the rendered
text without adding special tokens, for templates write their own. What users spell like one is told apart in pieces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miniserve.errors import CheckpointError, InvalidParameterError, shown
from miniserve.text.messages import Message, check_continuable, normalise_messages, not_continuable
from miniserve.text.spelling import Piece, SpellingMarks
from miniserve.text.tokenizer import require_encodable

MAX_KWARGS_SIZE = 2**16  # values, and characters of strings
MAX_KWARGS_DEPTH = 16
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "documents"})
# What the same argument means where these templates come from: options of rendering, not variables.
_FOREIGN_OPTIONS = frozenset(
    {"chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict"}
    | {"return_tensors", "tokenize", "tokenizer_kwargs", "truncation"}
)
_SPECIAL_TOKENS = frozenset(
    {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}
    | {"additional_special_tokens"}
)
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # in no text, by Unicode's own rule
_ARGUMENTS_AS_TEXT = re.compile(r"\barguments\s+is\s+string\b")


class ChatTemplate:
    """A model's chat template, compiled.

    Args:
        source: Jinja source; None where the model has no chat template: then every `render` is refused.
        special_tokens: what the template sees as bos_token, eos_token and so on.

    Attributes:
        source: as given.
        variables: names that it reads.

    Raises:
        CheckpointError: `source` is not valid Jinja.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _compile(environment, source) if source is not None else None
        self._reserved = _OWN_VARIABLES | _FOREIGN_OPTIONS | _SPECIAL_TOKENS | {*special_tokens, *environment.globals}
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source or "")))
        self._takes_broken_calls = _ARGUMENTS_AS_TEXT.search(source or "") is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`; arguments and errors as those of `render_pieces`."""
        pieces = self.render_pieces(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return "".join(piece.text for piece in pieces)

    def render_pieces(
        self,
        messages: Sequence[Message],
        *,
        special_spellings: re.Pattern[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """The prompt text for `messages`, in pieces where they spell special tokens, in one piece otherwise.

        Args:
            messages: as in OpenAI's API; content is a string, null or a list of text parts.
            special_spellings: `Tokenizer.special_spellings`; what it finds in `messages` and `tools` comes back as
                literal pieces. None finds nothing.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end with the text of the final message, which is the assistant's.
            tools: function descriptions, for templates that know them.
            template_kwargs: more variables (`enable_thinking`, ...); those that the template does not read are ignored.

        Raises:
            InvalidParameterError: there is no template, a message is malformed, or the template refuses them.
        """
        if self._template is None:
            raise InvalidParameterError(
                "this model has no chat template; use completions (on the command line, omit --chat)",
                param="messages",
            )
        normalised = normalise_messages(messages, keep_broken_calls=self._takes_broken_calls)
        end = _mark_end(normalised) if continue_final_message else None
        users = {"messages": normalised, "tools": list(tools) if tools else None}
        others = {"documents": None} | self._special_tokens | self._read_variables(template_kwargs or {})
        marks = SpellingMarks(special_spellings, users, others, self.source)
        marked = marks.put(users)
        prompt = self._render(others | marked | {"add_generation_prompt": add_generation_prompt})
        if end is not None:
            prompt = _cut(prompt, end, marked["messages"][-1]["content"])
        require_encodable(prompt, param="messages")
        return marks.take(prompt)

    def _read_variables(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that the template reads."""
        if taken := self._reserved & template_kwargs.keys():
            raise InvalidParameterError(
                f"chat_template_kwargs must not set {', '.join(sorted(taken))}: the server does, some of them by "
                "request fields of these names",
                param="chat_template_kwargs",
            )
        _check_json(template_kwargs)
        return {name: value for name, value in template_kwargs.items() if name in self.variables}

    def _render(self, variables: Mapping[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render(variables)
        except Exception as error:  # whatever foreign code raises on these messages, its own words help most
            raise InvalidParameterError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error


def _check_json(template_kwargs: Mapping[str, Any]) -> None:
    """Only plain data gets into a template, and not too much of it. Not recursive: it may be nested deeply."""
    values: list[tuple[Any, int]] = [(template_kwargs, 0)]
    size = 0
    while values:
        value, depth = values.pop()
        children: list[Any] = []
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            children = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            children = list(value)
        elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
            raise InvalidParameterError(
                f"chat_template_kwargs must hold JSON values, got {shown(value)}", param="chat_template_kwargs"
            )
        size += len(children)
        if depth > MAX_KWARGS_DEPTH or size > MAX_KWARGS_SIZE:
            raise InvalidParameterError(
                f"chat_template_kwargs is too large: at most {MAX_KWARGS_SIZE} values and characters, nested at most "
                f"{MAX_KWARGS_DEPTH} deep, are allowed",
                param="chat_template_kwargs",
            )
        values += [(child, depth + 1) for child in children]


# Ending inside the final message: a mark behind its text shows where that is in the prompt


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put a mark behind the text of the final message; returns the mark."""
    check_continuable(messages)
    used = {char for message in messages for char in message["content"]}
    mark = next((char for char in _NONCHARACTERS if char not in used), None)
    if mark is None:
        raise not_continuable("the messages have all of the characters U+FDD0 to U+FDEF; leave one of them out")
    messages[-1]["content"] += mark  # so it ends with something that no template trims
    return mark


def _cut(prompt: str, mark: str, content: str) -> str:
    """`prompt` up to the mark, which `content`, the text of the final message, ends with."""
    before, _, after = prompt.partition(mark)
    # Templates may set reasoning and answer apart with white space; any other change would be no continuation.
    if len(before) == len(prompt) or mark in after or not _squeezed(before + mark).endswith(_squeezed(content)):
        raise not_continuable("the model's chat template does not print its text as it is")
    return before


def _squeezed(text: str) -> str:
    return "".join(text.split())


# The environment that templates are written for


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(
            f"the model's chat template is not valid Jinja: {error}; fetch the tokenizer files again"
        ) from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only prints what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which the model would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
