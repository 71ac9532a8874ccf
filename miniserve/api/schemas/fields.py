"""Which fields are refused by name and which are ignored: the tables, and the check.

A field that would change the answer and is not implemented is refused, unless its value asks for nothing: null, or one
of the harmless values in the table. A field that cannot change the answer is ignored, as is any that nobody knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from miniserve.errors import UnsupportedParameterError


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, unless it is null or has one of the `harmless` values.

    Attributes:
        name: as it is sent.
        harmless: values that ask for nothing.
        endpoint: the one that has such a field; empty if none has.
        instead: what does what is meant.
    """

    name: str
    harmless: tuple[Any, ...] = ()
    endpoint: str = ""
    instead: str = ""

    def allows(self, value: Any) -> bool:
        """Whether the value asks for nothing. JSON's true is not 1."""
        same_kind = (item for item in self.harmless if isinstance(item, bool) == isinstance(value, bool))
        return value is None or value in same_kind


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_OFF = (False,)
_EMPTY_LIST: tuple[Any, ...] = ([],)
_EMPTY_OBJECT: tuple[Any, ...] = ({},)

# Other servers' words for whether, and how much, to reason.
_REASONING = tuple(
    Refused(name, instead="reasoning_effort")
    for name in (
        *("thinking", "enable_thinking", "reasoning_budget"),
        *("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"),
    )
)
_ANY_TEXT = (
    Refused("separate_reasoning", (True,)),
    Refused("stream_reasoning", (True,)),
    *(Refused(f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar", "json_object")),
    Refused("guided_decoding_backend"),
    Refused("guided_whitespace_pattern"),
    *(Refused(name) for name in ("json_schema", "regex", "ebnf", "grammar")),
    Refused("return_tokens_as_token_ids", _OFF),
    Refused("use_beam_search", _OFF),
    Refused("length_penalty", (1,)),
    Refused("bad_words", _EMPTY_LIST),
    Refused("allowed_token_ids"),
    Refused("logits_processors", _EMPTY_LIST),
    Refused("spaces_between_special_tokens", (True,)),
    Refused("typical_p", (1,)),
    Refused("kv_transfer_params"),
)
_CHAT_PROMPT = (
    Refused("chat_template"),
    Refused("documents", _EMPTY_LIST),
    Refused("mm_processor_kwargs", _EMPTY_OBJECT),
)
CHAT_REFUSED = (
    *_CHAT_PROMPT,
    Refused("prompt", endpoint=_COMPLETIONS),
    Refused("suffix", ("",)),
    Refused("best_of", (1,), _COMPLETIONS),
    Refused("functions", _EMPTY_LIST),
    Refused("function_call", ("none", "auto")),
    Refused("audio"),
    Refused("modalities", (["text"],)),
    Refused("prediction"),
    Refused("web_search_options"),
    Refused("echo", _OFF),
    *_REASONING,
    *_ANY_TEXT,
)
COMPLETIONS_REFUSED = (
    Refused("suffix", ("",)),
    Refused("prompt_embeds"),
    Refused("messages", endpoint=_CHAT),
    Refused("tools", _EMPTY_LIST, _CHAT),
    Refused("tool_choice", ("none", "auto"), _CHAT),
    Refused("functions", _EMPTY_LIST),
    Refused("function_call", ("none", "auto")),
    Refused("reasoning_effort", endpoint=_CHAT),
    Refused("reasoning", _EMPTY_OBJECT, _CHAT),
    Refused("include_reasoning", (True,), _CHAT),
    Refused("chat_template_kwargs", _EMPTY_OBJECT, _CHAT),
    Refused("continue_final_message", _OFF, _CHAT),
    Refused("add_generation_prompt", _OFF, _CHAT),
    Refused("max_completion_tokens", endpoint=_CHAT),
    Refused("top_logprobs", (0,), _CHAT),
    *(replace(rule, instead="") for rule in _REASONING),
    *_ANY_TEXT,
)
TOKENIZE_REFUSED = (
    *_CHAT_PROMPT,
    Refused("functions", _EMPTY_LIST),
    Refused("truncate_prompt_tokens"),
    *_REASONING,
)
DETOKENIZE_REFUSED: tuple[Refused, ...] = ()

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
)


def check_refused(fields: Mapping[str, Any], refused: tuple[Refused, ...]) -> None:
    """Refuse what `fields` asks for and nobody would do.

    Raises:
        UnsupportedParameterError: names the field.
    """
    for rule in refused:
        if rule.name in fields and not rule.allows(fields[rule.name]):
            what = f"a field of {rule.endpoint} only" if rule.endpoint else "not implemented"
            raise UnsupportedParameterError(f"{rule.name} is {what}; leave it out" + _allowed(rule), param=rule.name)


def _allowed(rule: Refused) -> str:
    remedies = [harmless_text(value) for value in rule.harmless[:2]] + ([rule.instead] if rule.instead else [])
    return "".join(f", or send {remedy}" for remedy in remedies)


def harmless_text(value: Any) -> str:
    """A harmless value as JSON."""
    return json.dumps(value)
