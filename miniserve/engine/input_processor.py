"""From what a user sends (text, messages or token ids) to a `Request`: render, tokenise, check.

Everything that can be wrong with one request is found here, before it meets the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miniserve.core.request import Request
from miniserve.errors import ContextLengthError, InvalidParameterError
from miniserve.sampling_params import SamplingParams
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class InputProcessor:
    """Holds what is the same for all requests of an engine.

    `num_token_ids`: ids from 0 that the model and the tokenizer both know. `eos_token_ids`: the union of what the
    model's config, its generation config and the tokenizer name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_token_ids: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.num_token_ids = num_token_ids
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids

    def process_prompt(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> Request:
        """A request from text, or from token ids, which are taken as they are.

        Raises:
            InvalidParameterError, ContextLengthError: the request is wrong; see the message.
        """
        if not isinstance(prompt, (str, Sequence)):
            raise InvalidParameterError(
                f"a prompt must be text or a list of token ids, got {type(prompt).__name__}", param="prompt"
            )
        if isinstance(prompt, str):
            return self._request(request_id, self.tokenizer.encode(prompt, add_special_tokens=True), sampling)
        token_ids = list(prompt)
        self._check_token_ids(token_ids, param="prompt")
        return self._request(request_id, token_ids, sampling)

    def process_chat(self, request_id: str, messages: Sequence[Message], sampling: SamplingParams) -> Request:
        """A request from a conversation. The template writes BOS and the like, so the tokenizer adds none.

        Raises:
            InvalidParameterError, ContextLengthError: as above, or there is no template, or it refuses.
        """
        text = self.chat_template.render(messages, add_generation_prompt=True)
        return self._request(request_id, self.tokenizer.encode(text, add_special_tokens=False), sampling)

    def _request(self, request_id: str, token_ids: list[int], sampling: SamplingParams) -> Request:
        if not token_ids:
            raise InvalidParameterError("the prompt is empty: it has no tokens", param="prompt")
        self._check_length(len(token_ids), sampling.max_tokens)
        self._check_token_ids(sampling.stop_token_ids, param="stop_token_ids")
        return Request(request_id, token_ids, sampling, self.eos_token_ids)

    def _check_length(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        num_tokens = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
        if num_tokens <= self.max_model_len:
            return
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; the context holds {self.max_model_len}, prompt and "
                "output together: shorten the prompt, or raise --max-model-len",
                param="prompt",
            )
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {max_tokens} more, "
            f"{num_tokens} in all; the context holds {self.max_model_len}: ask for at most "
            f"{self.max_model_len - num_prompt_tokens}",
            param="max_tokens",
        )

    def _check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        for token_id in token_ids:
            valid = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not valid or not 0 <= token_id < self.num_token_ids:
                raise InvalidParameterError(
                    f"{param} has the token id {token_id!r}; the vocabulary goes from 0 to {self.num_token_ids - 1}",
                    param=param,
                )
