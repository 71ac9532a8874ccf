"""What a request may ask for beside its sampling: tools, the template's variables, its place in queue and cache.

Owns the checks that need no model. Whether the template and the vocabulary go along, the input processor finds out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miniserve.errors import InvalidParameterError, shown
from miniserve.text.parsers.base import Tool
from miniserve.text.tokenizer import require_encodable

ToolChoice = Literal["none", "auto", "required"]
TOOL_CHOICES = ("none", "auto", "required")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SALT_LENGTH = 256  # characters
PRIORITIES = range(-(2**31), 2**31)
MAX_TRUNCATED_PROMPT = 2**31 - 1  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt, and what its answer may be made of.

    Attributes:
        tools: what the model may call.
        tool_choice: "auto" leaves it to the model, "required" makes it call, with "none" it is told of no tools.
        tool_name: with "required", the one tool that it has to call, once; None for any of them.
        parallel_tool_calls: whether one answer may call more than once.
        add_generation_prompt: end the prompt with the header of the assistant's turn.
        continue_final_message: end the prompt inside the final message, which is the assistant's, for the model to go
            on with; then `add_generation_prompt` is False.
        template_kwargs: more variables for the template.
        reasoning_effort: how much to reason before the answer; "none" is not at all. None leaves it to the template.
        add_special_tokens: put BOS and the like around the rendered text. Templates write their own.

    Raises:
        InvalidParameterError: the options contradict each other; `param` names the request field.
    """

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    add_special_tokens: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.reasoning_effort is not None:
            _check_choice("reasoning_effort", self.reasoning_effort, REASONING_EFFORTS)
            self._check_effort()
        if self.tool_name is not None and self.tool_name not in {tool.name for tool in self.tools}:
            names = ", ".join(tool.name for tool in self.tools) or "none"
            raise InvalidParameterError(
                f"tool_choice names the function {shown(self.tool_name)}, which is not in tools: those are "
                f"{names[:200]}",
                param="tool_choice",
            )
        if self.tool_name is not None and self.tool_choice != "required":
            raise InvalidParameterError(
                f"tool_choice is {self.tool_choice}, but names a function: that one has to be called",
                param="tool_choice",
            )
        if self.tool_choice == "required" and not self.tools:
            raise InvalidParameterError("tool_choice is required, but there are no tools to call", param="tool_choice")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameterError(
                "continue_final_message and add_generation_prompt exclude each other: the prompt ends inside the "
                "final message, or behind it with the header of a new one",
                param="continue_final_message",
            )

    def _check_types(self) -> None:
        """What comes over HTTP has them already."""
        for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message", "add_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameterError(f"{name} must be true or false, got {shown(value)}", param=name)
        _check_choice("tool_choice", self.tool_choice, TOOL_CHOICES)
        if not isinstance(self.template_kwargs, Mapping):
            raise InvalidParameterError(
                f"chat_template_kwargs must be an object, got {shown(self.template_kwargs)}",
                param="chat_template_kwargs",
            )

    def _check_effort(self) -> None:
        """A variable of the template may not say the opposite."""
        for name, implied in self.effort_variables.items():
            if name not in self.template_kwargs:
                continue
            given = self.template_kwargs[name]
            # Some template may take a number of its own meaning; only its opposite contradicts true or false.
            opposed = given is None or given == (not implied) if isinstance(implied, bool) else given != implied
            if opposed:
                raise InvalidParameterError(
                    f"reasoning_effort is {self.reasoning_effort!r}, but chat_template_kwargs has {name} = "
                    f"{shown(given)}: they contradict each other; leave out one of them",
                    param="reasoning_effort",
                )

    @property
    def effort_variables(self) -> dict[str, Any]:
        """What templates of several families read of the effort. A family that has one ignores the others."""
        if self.reasoning_effort is None:
            return {}
        thinks = self.reasoning_effort != "none"
        return {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def demanded_tools(self) -> tuple[Tool, ...]:
        """The tools of which it has to call one; none where it may answer in words."""
        if self.tool_choice != "required":
            return ()
        return tuple(tool for tool in self.tools if self.tool_name in (None, tool.name))

    @property
    def max_calls(self) -> int | None:
        """Calls that one answer may make; None for any number."""
        return None if self.parallel_tool_calls and self.tool_name is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What is asked of the engine rather than of the model.

    Attributes:
        cache_salt: the prefix cache is shared only with requests of the same salt; None is a salt too.
        priority: lower comes first, where the server goes by priority.
        truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1 is as many as leave room for the
            answer, which is a quarter of the context where no limit of tokens is asked for. None refuses a prompt that
            is too long.

    Raises:
        InvalidParameterError: a value is out of range; `param` names the field.
    """

    cache_salt: str | None = None
    priority: int = 0
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            self._check_salt(self.cache_salt)
        if not _is_int(self.priority) or self.priority not in PRIORITIES:
            raise InvalidParameterError(
                f"priority must be an integer in [-2^31, 2^31), got {shown(self.priority)}", param="priority"
            )
        kept = self.truncate_prompt_tokens
        if kept is not None and not (_is_int(kept) and (kept == -1 or 1 <= kept <= MAX_TRUNCATED_PROMPT)):
            raise InvalidParameterError(
                f"truncate_prompt_tokens must be an integer in [1, {MAX_TRUNCATED_PROMPT}], or -1 for as many tokens "
                f"as fit; got {shown(kept)}",
                param="truncate_prompt_tokens",
            )

    def _check_salt(self, salt: str) -> None:
        if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_LENGTH:
            got = f"{len(salt)} characters" if isinstance(salt, str) else shown(salt)
            raise InvalidParameterError(
                f"cache_salt must be a string of 1 to {MAX_SALT_LENGTH} characters, got {got}", param="cache_salt"
            )
        require_encodable(salt, param="cache_salt")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidParameterError(f"{name} must be one of {', '.join(choices)}; got {shown(value)}", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
