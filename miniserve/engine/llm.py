"""The offline twin of the server: the same engine, driven by a loop in the caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from miniserve.config import EngineConfig
from miniserve.core.request import Request
from miniserve.engine.answer import deltas_of, join_deltas
from miniserve.engine.build import EngineParts, LoadProgress, build_engine
from miniserve.engine.input_processor import Prompt
from miniserve.engine.openai_fields import parse_response_format, parse_tool_choice, parse_tools
from miniserve.engine.options import ChatOptions
from miniserve.errors import InternalError, InvalidParameterError, shown
from miniserve.outputs import EngineOutput, FinishReason, RequestOutput
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.text.messages import Message
from miniserve.text.parsers.base import ToolParser

PLAIN_CHAT = ChatOptions()


class LLM:
    """Load a model once, then generate.

        llm = LLM("smollm2")
        [output] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=32))

    Args:
        model: as `--model`: HF id, checkpoint folder, .gguf file, or "smollm2".
        progress: told about each loaded tensor.
        options: any field of `EngineConfig`.

    Raises:
        StartupError: an option is wrong, or the model cannot be loaded.
    """

    def __init__(self, model: str, *, progress: LoadProgress | None = None, **options: Any) -> None:
        self._parts = build_engine(EngineConfig(model=model, **options), progress=progress)
        self._ids = count()
        self._inboxes: dict[str, deque[EngineOutput]] = {}  # where the outputs of each request in flight go

    @classmethod
    def from_parts(cls, parts: EngineParts) -> LLM:
        """An LLM around an engine that is built already."""
        llm = cls.__new__(cls)
        llm._parts = parts
        llm._ids = count()
        llm._inboxes = {}
        return llm

    @property
    def parts(self) -> EngineParts:
        """The engine behind it, and what was settled when it was built."""
        return self._parts

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The sampling that the model's generation config recommends, with `overrides`."""
        return SamplingParams(**{**self._parts.sampling_defaults, **overrides})

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), all in one batch; outputs in the order of the prompts.

        Args:
            prompts: one prompt or many.
            sampling: for all of them, or one each; None is `default_sampling_params()`.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing was generated.
        """
        return self.run(self.prompt_requests(prompts, sampling))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation (a list of messages), rendered by the model's chat template.

        What comes after `sampling` is as in the HTTP API, and the same for all conversations.

        Raises:
            RequestError: as `generate`, or the template refuses the messages.
        """
        choice, name = parse_tool_choice(tool_choice)
        options = ChatOptions(
            tools=parse_tools(tools),
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=parallel_tool_calls,
            add_generation_prompt=continue_final_message is not True,
            continue_final_message=continue_final_message,
            template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            reasoning_effort=reasoning_effort,
        )
        requests = self.chat_requests(conversations, sampling, options, parse_response_format(response_format))
        return self.run(requests, options)

    def prompt_requests(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """Checked requests for `stream`, one a prompt."""
        batch: Sequence[Any] = [prompts] if _is_one_prompt(prompts) else prompts
        processor = self._parts.input_processor
        pairs = zip(batch, self._sampling_of_each(sampling, len(batch)), strict=True)
        return [processor.process_prompt(self._next_id(), prompt, params) for prompt, params in pairs]

    def chat_requests(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        chat: ChatOptions = PLAIN_CHAT,
        answer_format: StructuredOutput | None = None,
    ) -> list[Request]:
        """Checked requests for `stream`, one a conversation. `answer_format`: where the sampling has none."""
        if isinstance(conversations, (str, bytes)) or not isinstance(conversations, Sequence):
            raise InvalidParameterError(
                "messages must be an array of messages, each with role and content", param="messages"
            )
        is_one = any(isinstance(part, Mapping) for part in conversations)
        batch: Sequence[Any] = [conversations] if is_one else conversations
        processor = self._parts.input_processor
        each = self._sampling_of_each(sampling, len(batch))
        if answer_format is not None:
            if any(params.structured_outputs is not None for params in each):
                raise InvalidParameterError(
                    "response_format and structured_outputs both say what the answer looks like; send one of them",
                    param="structured_outputs",
                )
            each = [replace(params, structured_outputs=answer_format) for params in each]
        pairs = zip(batch, each, strict=True)
        return [processor.process_chat(self._next_id(), messages, params, chat) for messages, params in pairs]

    def stream(self, requests: Sequence[Request]) -> Generator[EngineOutput, None, None]:
        """Run the requests as one batch; yields outputs as they come. Closing the iterator aborts the rest.

        Several streams may be open: each step serves the requests of all, and each stream yields its own.

        Raises:
            RequestError: a request can never run.
            InternalError: the engine failed on a request; the rest is aborted.
        """
        engine = self._parts.engine
        inbox: deque[EngineOutput] = deque()
        num_unfinished = len(requests)
        try:
            for request in requests:
                engine.add(request)
                self._inboxes[request.request_id] = inbox
            while num_unfinished > 0:
                if not inbox and not engine.has_work:
                    return  # the rest was aborted from outside
                if not inbox:
                    self._step()
                    continue
                output = inbox.popleft()
                if output.finish_reason is FinishReason.ERROR:
                    raise InternalError(f"request {output.request_id}: {output.error}")
                num_unfinished -= output.finish_reason is not None
                yield output
        finally:
            for request in requests:
                engine.abort(request.request_id)
                self._inboxes.pop(request.request_id, None)

    def _step(self) -> None:
        for output in self._parts.engine.step():
            self._inboxes[output.request_id].append(output)

    def run(self, requests: Sequence[Request], chat: ChatOptions | None = None) -> list[RequestOutput]:
        """Run the requests as one batch to their end; outputs in their order. Raises as `stream`.

        Args:
            chat: what they were made with, if they are conversations: tool calls are looked for then.
        """
        parts: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        for output in self.stream(requests):
            parts[output.request_id].append(output)
        return [
            _request_output(
                request, parts[request.request_id], None if chat is None else self.tool_parser(chat, request)
            )
            for request in requests
        ]

    def tool_parser(self, chat: ChatOptions, request: Request) -> ToolParser | None:
        """What finds the tool calls in the answer to one conversation; None where there are none to find."""
        return self._parts.input_processor.tool_parser(chat, request)

    def _sampling_of_each(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = self.default_sampling_params()
        if isinstance(sampling, SamplingParams):
            return [sampling] * number
        is_list = isinstance(sampling, Sequence) and not isinstance(sampling, str)
        if not is_list or not all(isinstance(params, SamplingParams) for params in sampling):
            raise InvalidParameterError(
                "sampling must be SamplingParams, one for all prompts or one each", param="sampling"
            )
        if len(sampling) != number:
            raise InvalidParameterError(
                f"{number} prompts and {len(sampling)} sampling parameters: give one for all, or one each",
                param="sampling",
            )
        return list(sampling)

    def _next_id(self) -> str:
        return f"offline-{next(self._ids)}"


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidParameterError(f"prompts must be text or lists, got {shown(prompts)}", param="prompt")
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _request_output(request: Request, parts: Sequence[EngineOutput], parser: ToolParser | None) -> RequestOutput:
    first, last = parts[0], parts[-1]
    assert last.finish_reason is not None and last.timing is not None
    answer = join_deltas(delta for part in parts for delta in deltas_of(part, parser))
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.token_ids[: request.num_prompt_tokens]),
        token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
        text=answer.text,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        timing=last.timing,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
    )
