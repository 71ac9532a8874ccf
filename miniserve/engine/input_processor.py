"""From what a user sends (text, messages or token ids) to a `Request`: render, tokenise, check.

Everything that can be wrong with one request is found here, before it meets the scheduler. Called from any thread: it
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

from miniserve.core.request import Request
from miniserve.engine.options import ChatOptions, RequestOptions
from miniserve.engine.output_formats import Compiler, OutputFormats
from miniserve.errors import ContextLengthError, InvalidParameterError, shown
from miniserve.outputs import OutputFormat, Thinking
from miniserve.sampling_params import SamplingParams
from miniserve.structured.compiler import GrammarCompiler
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.messages import Message, check_continuable, check_history, normalise_messages
from miniserve.text.parsers.base import CallsOnly, CallsOrAnswer, ToolParser
from miniserve.text.parsers.tool_format import ToolFormat
from miniserve.text.spelling import Piece
from miniserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# A text that is cut to fit, or only tokenised, may be longer than what fits, but it should not take more than seconds.
MAX_CUT_TEXT_LENGTH = 2**21  # characters
PLAIN_CHAT = ChatOptions()
PLAIN_REQUEST = RequestOptions()


class InputProcessor:
    """Holds what is the same for all requests of an engine.

    Args:
        tokenizer: the model's.
        num_token_ids: ids from 0 that the model and the tokenizer both know.
        max_model_len: tokens of the longest sequence, prompt and output together.
        kv_capacity_tokens: tokens that the KV cache holds.
        eos_token_ids: the union of what the model's config, its generation config and the tokenizer name.
        chat_template: in place of the tokenizer's own.
        grammars: compiles what structured answers look like; None is a compiler for this tokenizer.
        priorities: whether the scheduler goes by them, so that a request may have one other than 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_token_ids: int,
        max_model_len: int,
        kv_capacity_tokens: int,
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None = None,
        grammars: Compiler | None = None,
        priorities: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.num_token_ids = num_token_ids
        self.max_model_len = max_model_len
        self.kv_capacity_tokens = kv_capacity_tokens
        self.eos_token_ids = eos_token_ids
        self.priorities = priorities
        self.formats = OutputFormats(
            self.chat_template,
            tokenizer,
            grammars
            or GrammarCompiler(
                tokenizer, num_token_ids=num_token_ids, eos_token_ids=eos_token_ids, max_tokens=max_model_len
            ),
        )

    @property
    def tool_format(self) -> ToolFormat:
        """How the model calls tools."""
        return self.formats.tool_format

    @property
    def thinking(self) -> Thinking | None:
        """How the model marks its reasoning; None if it has none."""
        return self.formats.thinking

    def process_prompt(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        add_special_tokens: bool = True,
        options: RequestOptions = PLAIN_REQUEST,
    ) -> Request:
        """A request from text, or from token ids, which are taken as they are. The answer is text, and no more.

        Raises:
            InvalidParameterError, ContextLengthError: the request is wrong; see the message.
        """
        if isinstance(prompt, str):
            self._check_text_length([prompt], options, param="prompt")
        token_ids = self._tokenised(prompt, add_special_tokens=add_special_tokens)
        token_ids = self._fitting(token_ids, sampling, options, param="prompt")
        output_format = self.formats.of_prompt(sampling.structured_outputs)
        return self._request(request_id, token_ids, sampling, options, output_format)

    def process_chat(
        self,
        request_id: str,
        messages: Sequence[Message],
        sampling: SamplingParams,
        chat: ChatOptions = PLAIN_CHAT,
        options: RequestOptions = PLAIN_REQUEST,
    ) -> Request:
        """A request from a conversation. The template writes BOS and the like, so the tokenizer adds none.

        Raises:
            InvalidParameterError, ContextLengthError: as above, or there is no template, or it refuses.
        """
        messages = _checked(messages, chat)
        if chat.demanded_tools:  # all of the answer is calls: a stop string would only break their JSON
            sampling = replace(sampling, stop=())
        pieces = self._render(messages, chat)
        self._check_text_length([piece.text for piece in pieces], options, param="messages")
        token_ids = self.tokenizer.encode_pieces(pieces, add_special_tokens=chat.add_special_tokens)
        token_ids = self._fitting(token_ids, sampling, options, param="messages")
        prompt = "".join(piece.text for piece in pieces)
        output_format = self.formats.of_chat(prompt, messages, chat, sampling.structured_outputs)
        return self._request(request_id, token_ids, sampling, options, output_format)

    def tool_parser(self, chat: ChatOptions, request: Request) -> ToolParser | None:
        """What finds the calls in one answer to a request that was made with `chat`; None where there can be none."""
        tools, structure = chat.offered_tools, request.sampling.structured_outputs
        if not tools:
            return None
        if structure is not None and chat.continue_final_message and request.output_format.grammar.has_begun:
            return None  # the answer is the rest of a structure
        parser = self.tool_format.parser(tools, max_calls=chat.max_calls)
        if chat.demanded_tools:
            return CallsOnly(parser)
        if structure is None:
            return parser
        return CallsOrAnswer(parser, self.tool_format.opening)

    def choices(self, request: Request, n: int) -> list[Request]:
        """`request` and n - 1 forks of it, which share its prompt and differ in their seeds.

        Prompt logprobs, which are the same for all, are the first one's.
        """
        return [request, *(self._fork(request, index) for index in range(1, n))]

    def tokenize_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt, checked against the vocabulary, whether it fits the context or not.

        Raises:
            InvalidParameterError: it is of a wrong type, has an unknown id, or is not valid Unicode.
            ContextLengthError: it is a text that would take too long.
        """
        if isinstance(prompt, str):
            _check_tokenised_length(len(prompt), param="prompt")
        return self._tokenised(prompt, add_special_tokens=add_special_tokens)

    def _tokenised(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, (bytes, bytearray)):
            raise InvalidParameterError(
                f"a prompt must be text or an array of token ids, got {shown(prompt)}", param="prompt"
            )
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        token_ids: list[int] = list(prompt)
        self._check_token_ids(token_ids, param="prompt")
        return token_ids

    def tokenize_chat(self, messages: Sequence[Message], chat: ChatOptions = PLAIN_CHAT) -> list[int]:
        """The token ids of a rendered conversation. Special tokens that a message spells out are text in it.

        Raises:
            InvalidParameterError: there is no template, it refuses, or the messages are malformed.
            ContextLengthError: the conversation is a text that would take too long.
        """
        pieces = self._render(_checked(messages, chat), chat)
        _check_tokenised_length(sum(len(piece.text) for piece in pieces), param="messages")
        return self.tokenizer.encode_pieces(pieces, add_special_tokens=chat.add_special_tokens)

    def _render(self, messages: Sequence[Message], chat: ChatOptions) -> list[Piece]:
        _check_switches(chat.template_kwargs)
        tools = chat.offered_tools
        if not self.tool_format.told_by_template:
            messages, tools = self.tool_format.with_tools(messages, tools), ()
        return self.chat_template.render_pieces(
            messages,
            special_spellings=self.tokenizer.special_spellings,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=[tool.to_openai() for tool in tools],
            template_kwargs={**chat.effort_variables, **chat.template_kwargs},
        )

    def _fitting(
        self, token_ids: list[int], sampling: SamplingParams, options: RequestOptions, *, param: str
    ) -> list[int]:
        """The prompt, cut if that is wanted. Everything that can be checked in no time is."""
        if not token_ids:
            raise InvalidParameterError("the prompt is empty: it has no tokens", param=param)
        if options.priority and not self.priorities:
            raise InvalidParameterError(
                f"priority is {options.priority}, but this server goes by arrival only: start it with "
                "--scheduling-policy priority, or leave priority out",
                param="priority",
            )
        token_ids = self._cut(token_ids, sampling.max_tokens, options.truncate_prompt_tokens)
        self._check_length(len(token_ids), sampling.max_tokens, param=param)
        self._check_min_tokens(len(token_ids), sampling.min_tokens)
        self._check_token_ids(sampling.stop_token_ids, param="stop_token_ids")
        self._check_token_ids(sampling.logit_bias, param="logit_bias")
        return token_ids

    def _request(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        options: RequestOptions,
        output_format: OutputFormat,
    ) -> Request:
        return Request(
            request_id,
            token_ids,
            self._with_special_stops(sampling),
            self.eos_token_ids,
            cache_salt=(options.cache_salt or "").encode(),
            priority=options.priority,
            output_format=output_format,
        )

    def _cut(self, token_ids: list[int], max_tokens: int | None, kept: int | None) -> list[int]:
        """The last `kept` tokens, or with -1 as many as leave room for the answer."""
        if kept == -1 and max_tokens is None:  # nobody says how long it may be: a quarter of all there is
            most = min(self.max_model_len, self.kv_capacity_tokens)
            kept = most - max(1, most // 4)
        elif kept == -1:
            kept = min(self.max_model_len - _room_for_output(max_tokens), self.kv_capacity_tokens - 1)
        # What leaves no room for a prompt at all is refused as if nothing was to be cut.
        return token_ids if kept is None or kept < 1 else token_ids[-kept:]

    def _with_special_stops(self, sampling: SamplingParams) -> SamplingParams:
        """Special tokens leave no text: a stop string that spells one has to match by its id."""
        ids = [token_id for stop in sampling.stop if (token_id := self.tokenizer.special_id(stop)) is not None]
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ids)) if ids else sampling

    def _fork(self, request: Request, index: int) -> Request:
        sampling = replace(request.sampling, prompt_logprobs=None)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=_as_int64(sampling.seed + index))
        return Request(
            f"{request.request_id}-{index}",
            list(request.token_ids),
            sampling,
            request.eos_token_ids,
            cache_salt=request.cache_salt,
            priority=request.priority,
            output_format=request.output_format,
            parent=request,
        )

    def _check_text_length(self, texts: Sequence[str], options: RequestOptions, *, param: str) -> None:
        """Refuse what can never fit before it is tokenised: a body of megabytes would take a core for half a minute."""
        length = sum(map(len, texts))
        num_tokens = self.tokenizer.min_num_tokens(length)
        if options.truncate_prompt_tokens is not None:
            _check_tokenised_length(length, param=param)
        elif num_tokens > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has more than {num_tokens} tokens; the context holds {self.max_model_len}, prompt and "
                "output together: shorten the prompt",
                param=param,
            )

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None, *, param: str) -> None:
        wanted = _room_for_output(max_tokens)
        if num_prompt_tokens + wanted > self.max_model_len:
            asked = f" and {max_tokens} more are asked for" if max_tokens else " and needs room for one more"
            room = self.max_model_len - num_prompt_tokens
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens{asked}, {num_prompt_tokens + wanted} in all; the context "
                f"holds {self.max_model_len}: "
                + ("shorten the prompt" if room < 1 else f"ask for at most {room}, or shorten the prompt"),
                param=param if room < 1 else "max_tokens",
            )
        if num_prompt_tokens + 1 > self.kv_capacity_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and needs room for one more; the KV cache of this server "
                f"holds {self.kv_capacity_tokens}: shorten the prompt",
                param=param,
            )

    def _check_min_tokens(self, num_prompt_tokens: int, min_tokens: int) -> None:
        room = self.max_model_len - num_prompt_tokens
        if min_tokens > room:
            raise InvalidParameterError(
                f"min_tokens is {min_tokens}, but after a prompt of {num_prompt_tokens} tokens the context of "
                f"{self.max_model_len} has room for {room}: lower min_tokens, or shorten the prompt",
                param="min_tokens",
            )

    def _check_token_ids(self, token_ids: Iterable[int], *, param: str) -> None:
        for token_id in token_ids:
            valid = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not valid or not 0 <= token_id < self.num_token_ids:
                raise InvalidParameterError(
                    f"{param} has the token id {shown(token_id)}; the vocabulary goes from 0 to "
                    f"{self.num_token_ids - 1}",
                    param=param,
                )


def _checked(messages: Sequence[Message], chat: ChatOptions) -> list[dict[str, Any]]:
    """The messages, normalised. What is wrong with them is found before any become the text of a tool format."""
    check_history(messages)
    normalised = normalise_messages(messages, keep_broken_calls=True)
    if chat.continue_final_message:
        check_continuable(normalised)
    return normalised


def _check_switches(template_kwargs: Mapping[str, Any]) -> None:
    """In a template, the text "false" is as good as true. Some template may take a number for `thinking`."""
    for name, kinds in (("enable_thinking", (bool, NoneType)), ("thinking", (bool, NoneType, int, float))):
        if not isinstance(value := template_kwargs.get(name), kinds):
            raise InvalidParameterError(
                f"chat_template_kwargs.{name} must be true or false, got {shown(value)}",
                param="chat_template_kwargs",
            )


def _check_tokenised_length(length: int, *, param: str) -> None:
    if length > MAX_CUT_TEXT_LENGTH:
        raise ContextLengthError(
            f"the prompt has {length} characters; at most {MAX_CUT_TEXT_LENGTH} are tokenised to be cut or to be "
            "shown: shorten the prompt",
            param=param,
        )


def _room_for_output(max_tokens: int | None) -> int:
    """Computing a prompt yields one token, wanted or not."""
    return 1 if max_tokens is None else max(1, max_tokens)


def _as_int64(number: int) -> int:
    """Seeds wrap around like 64-bit integers."""
    return (number + 2**63) % 2**64 - 2**63
