"""What the tokens of one request say: reasoning, answer, stop strings; and whether the answer keeps to its grammar.

The order of things: token -> text -> reasoning or answer -> stop strings, which only the answer has. A grammar sees the
tokens of the answer; while the request reasons it is free. Does not know times, counts of prompts, or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniserve.outputs import OutputFormat, Thinking
from miniserve.sampling_params import SamplingParams
from miniserve.structured.compiler import Matcher
from miniserve.structured.masks import MaskQuery
from miniserve.text.detokenizer import IncrementalDetokenizer
from miniserve.text.reasoning import Phase, ReasoningSplitter
from miniserve.text.stop import StopMatcher
from miniserve.text.tokenizer import Tokenizer

_MAX_BREAKS = 2  # line breaks between reasoning and answer


class OutputText:
    """Follows one request from its first output token to its last.

    Under a grammar, reasoning that the prompt has not opened begins with the very first token, which has to be the
    start tag; where the tag is several tokens there is none. Behind the reasoning, two line breaks may come before the
    answer, of which the grammar knows nothing: most models were trained to write them.

    Attributes:
        num_reasoning_tokens: how many of the tokens so far belong to the reasoning, its tags included.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, output_format: OutputFormat) -> None:
        thinking, grammar = output_format.thinking, output_format.grammar
        self._matcher: Matcher | None = None if grammar is None else grammar.start()
        self._start_tag_ids = _start_tag_ids(tokenizer, thinking)
        self._break_ids = {} if self._matcher is None or thinking is None else _break_ids(self._matcher)
        self._num_breaks = 0  # line breaks between reasoning and answer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, shown_ids=output_format.shown_ids
        )
        self._splitter = ReasoningSplitter(thinking)
        self._stop_matcher = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output)
        self._is_plain = grammar is None and thinking is None
        self._num_tokens = 0  # up to the end of the reasoning
        self.num_reasoning_tokens = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._splitter.phase is Phase.REASONING

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._matcher is not None and self._splitter.phase is Phase.CONTENT and self._matcher.complete

    def mask_query(self, request_id: str) -> MaskQuery | None:
        """What the next token may be; None if it is free."""
        if self._matcher is None or self.is_reasoning:
            return None
        also_allowed = self._start_tag_ids if self._splitter.phase is Phase.START else self._breaks_allowed()
        return MaskQuery(request_id, self._matcher, also_allowed)

    def push(self, token_ids: Sequence[int], *, may_stop: bool, is_last: bool) -> tuple[str, str, str | None]:
        """Add tokens; returns reasoning and answer that may be shown now, and the stop string that ended the answer.

        Once they are the last, or the grammar is complete, nothing is held back.

        Raises:
            GrammarError: the answer has left its grammar.
        """
        reasoning, content = self._split(token_ids)
        is_last = is_last or self.is_complete
        if is_last:
            for more, rest in (self._splitter.push(self._detokenizer.flush()), self._splitter.flush()):
                reasoning, content = reasoning + more, content + rest
        text, stop = self._stop_matcher.push(content, may_stop=may_stop)
        if is_last and stop is None:
            text += self._stop_matcher.flush()
        return reasoning, text, stop

    def _split(self, token_ids: Sequence[int]) -> tuple[str, str]:
        if self._is_plain:
            return "", self._detokenizer.push(token_ids)
        reasoning = content = ""
        for token_id in token_ids:
            more, rest = self._take(token_id)
            reasoning, content = reasoning + more, content + rest
        return reasoning, content

    def _take(self, token_id: int) -> tuple[str, str]:
        if self._matcher is not None and self._splitter.phase is Phase.START and token_id not in self._start_tag_ids:
            self._splitter = ReasoningSplitter(None)  # the matcher sees this token: it has to be answer
        before = self._splitter.phase
        is_break = token_id in self._breaks_allowed()
        reasoning, content = self._splitter.push(self._detokenizer.push((token_id,)))
        if before is not Phase.CONTENT:
            self._num_tokens += 1
            if self._splitter.has_reasoning:  # now also those that began to spell the start tag
                self.num_reasoning_tokens = self._num_tokens
        if is_break:
            self._num_breaks += self._break_ids[token_id]
        elif self._matcher is not None and before is Phase.CONTENT:
            self._break_ids = {}
            self._matcher.accept((token_id,))
        elif self._matcher is not None and content:  # it came with the token that ended the reasoning
            self._matcher.accept_text(content)
        return reasoning, content

    def _breaks_allowed(self) -> tuple[int, ...]:
        """The tokens of line breaks that may come now although they are no part of the answer."""
        if not self._splitter.awaits_answer:
            return ()
        return tuple(i for i, number in self._break_ids.items() if self._num_breaks + number <= _MAX_BREAKS)


def _break_ids(matcher: Matcher) -> dict[int, int]:
    """How many line breaks each token of nothing else is, up to `_MAX_BREAKS`."""
    ids = {number: matcher.token_of("\n" * number) for number in range(1, _MAX_BREAKS + 1)}
    return {token_id: number for number, token_id in ids.items() if token_id is not None}


def _start_tag_ids(tokenizer: Tokenizer, thinking: Thinking | None) -> tuple[int, ...]:
    """The one token that spells the start tag; none if it takes several."""
    token_id = None if thinking is None else tokenizer.added_id(thinking.start)
    return () if token_id is None else (token_id,)
