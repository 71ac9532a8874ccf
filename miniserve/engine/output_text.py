"""What the tokens of one request say: reasoning, answer, stop strings; and whether the answer keeps to its grammar.

The order of things: token -> text -> reasoning or answer -> stop strings, which only the answer has. A grammar sees the
tokens of the answer; while the request reasons it is free. Does not know times, counts of prompts, or the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniserve.engine.start_tag import StartTag
from miniserve.outputs import OutputFormat
from miniserve.sampling_params import SamplingParams
from miniserve.structured.compiler import Grammar, Matcher
from miniserve.structured.masks import MaskQuery
from miniserve.text.detokenizer import IncrementalDetokenizer
from miniserve.text.reasoning import Phase, ReasoningSplitter
from miniserve.text.stop import StopMatcher
from miniserve.text.tokenizer import Tokenizer

_MAX_BREAKS = 2  # line breaks between reasoning and answer


class OutputText:
    """Follows one request from its first output token to its last.

    What is reasoning does not depend on a grammar. Until it is known, the first tokens may be the answer, which the
    matcher follows as long as it can, or spell the start tag, of which the grammar knows nothing. A matcher that has
    followed what turns out to be the tag begins anew behind the reasoning. There, two line breaks may come before the
    answer, which the grammar does not see either: most models were trained to write them.

    Attributes:
        num_reasoning_tokens: how many of the tokens so far belong to the reasoning, its tags included.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, output_format: OutputFormat) -> None:
        thinking = output_format.thinking
        self._grammar: Grammar | None = output_format.grammar
        self._matcher: Matcher | None = None if self._grammar is None else self._grammar.start()
        self._tokenizer = tokenizer
        self._start_tag: StartTag | None = None
        self._has_left = False  # what has begun is no answer: the start tag has to follow
        if self._matcher is not None and thinking is not None and not thinking.inside:
            self._start_tag = StartTag(tokenizer, thinking.start, thinking.begun)
            self._has_left = bool(thinking.begun)
        self._has_ended = False  # by an end token, in which case no start tag follows
        self._break_ids = {} if self._matcher is None or thinking is None else _break_ids(self._matcher)
        self._num_breaks = 0  # line breaks between reasoning and answer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, shown_ids=output_format.shown_ids
        )
        self._splitter = ReasoningSplitter(thinking)
        self._stop_matcher = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output)
        # Tokens that come together are not looked at one by one.
        self._takes_forced = sampling.logprobs is None and not sampling.stop and sampling.min_tokens == 0
        # A draw from all tokens is, if allowed, a draw from those allowed; but filters look at all that may be drawn.
        self._may_try = not sampling.filters
        self._is_plain = self._grammar is None and thinking is None
        self._num_tokens = 0  # up to the end of the reasoning
        self.num_reasoning_tokens = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._splitter.phase is Phase.REASONING

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more, and what came is no beginning of a start tag."""
        is_answer = (self._splitter.phase is Phase.CONTENT and not self._has_left) or self._has_ended
        return self._matcher is not None and is_answer and self._matcher.complete

    def mask_query(self, request_id: str) -> MaskQuery | None:
        """What the next token may be; None if it is free."""
        if self._matcher is None or self.is_reasoning:
            return None
        if self._splitter.phase is Phase.START and self._start_tag is not None:
            return MaskQuery(
                request_id,
                self._matcher,
                self._start_tag.next_ids,
                only_those=self._has_left,
                may_try=self._may_try,
            )
        breaks = self._breaks_allowed()
        wants_forced = self._takes_forced and self._splitter.phase is Phase.CONTENT and not breaks
        return MaskQuery(request_id, self._matcher, breaks, wants_forced=wants_forced, may_try=self._may_try)

    def push(
        self, token_ids: Sequence[int], *, may_stop: bool, is_last: bool, is_cut: bool = False
    ) -> tuple[str, str, str | None]:
        """Add tokens; returns reasoning and answer that may be shown now, and the stop string that ended the answer.

        Once they are the last, or the grammar is complete, nothing is held back. `is_cut`: the last because there may
        be no more of them: then the beginning of a tag that ends them is none of the text.

        Raises:
            GrammarError: the answer has left its grammar.
        """
        reasoning, content = self._split(token_ids)
        is_last = is_last or self.is_complete
        if is_last:
            more, rest = self._flush(is_cut=is_cut)
            reasoning, content = reasoning + more, content + rest
        text, stop = self._stop_matcher.push(content, may_stop=may_stop)
        if is_last and stop is None:
            text += self._stop_matcher.flush()
        return reasoning, text, stop

    @property
    def _is_whole_answer(self) -> bool:
        """Whether the grammar takes what came as an answer that may end here, though it may begin a start tag."""
        return self._matcher is not None and not self.is_reasoning and not self._has_left and self._matcher.complete

    def _split(self, token_ids: Sequence[int]) -> tuple[str, str]:
        if self._is_plain:
            return "", self._detokenizer.push(token_ids)
        reasoning = content = ""
        for token_id in token_ids:
            more, rest = self._take(token_id)
            reasoning, content = reasoning + more, content + rest
        return reasoning, content

    def _flush(self, *, is_cut: bool) -> tuple[str, str]:
        is_cut = is_cut and not self._is_whole_answer
        may_be_tag = self._splitter.phase is not Phase.CONTENT
        half = "" if is_cut and may_be_tag else self._detokenizer.flush()  # of a character
        ends = (self._splitter.push(half), self._splitter.flush(is_cut=is_cut))
        reasoning, content = ("".join(parts) for parts in zip(*ends, strict=True))
        return reasoning, "" if self._has_left else content

    def _take(self, token_id: int) -> tuple[str, str]:
        before = self._splitter.phase
        is_break = token_id in self._breaks_allowed()
        text = self._detokenizer.push((token_id,))
        reasoning, content = self._splitter.push(text)
        if before is not Phase.CONTENT:
            self._num_tokens += 1
            if self._splitter.has_reasoning:  # now also those that began to spell the start tag
                self.num_reasoning_tokens = self._num_tokens
        if is_break:
            self._num_breaks += self._break_ids[token_id]
        elif before is Phase.START:
            self._follow_start(token_id, text, content)
        elif self._matcher is not None and before is Phase.CONTENT:
            self._break_ids = {}
            self._matcher.accept((token_id,))
        elif self._matcher is not None and content:  # it came with the token that ended the reasoning
            self._matcher.accept_text(content)
        return reasoning, content

    def _follow_start(self, token_id: int, text: str, content: str) -> None:
        """Let the matcher follow a token that came while it was open whether reasoning comes first."""
        if self._grammar is None or self._matcher is None or self._start_tag is None:
            return
        if self._splitter.phase is Phase.START:
            self._start_tag.push(token_id)
            is_answer = not self._has_left and self._matcher.try_accept(token_id)
            self._has_ended = not text and self._tokenizer.is_special(token_id) and self._matcher.complete
            self._has_left = not is_answer and not self._has_ended
        elif self._splitter.has_reasoning or self._has_left:
            self._has_left = False
            self._matcher = self._grammar.start()
            if content:
                self._matcher.accept_text(content)
        else:
            self._matcher.accept((token_id,))

    def _breaks_allowed(self) -> tuple[int, ...]:
        """The tokens of line breaks that may come now although they are no part of the answer."""
        if not self._splitter.awaits_answer:
            return ()
        return tuple(i for i, number in self._break_ids.items() if self._num_breaks + number <= _MAX_BREAKS)


def _break_ids(matcher: Matcher) -> dict[int, int]:
    """How many line breaks each token of nothing else is, up to `_MAX_BREAKS`."""
    ids = {number: matcher.token_of("\n" * number) for number in range(1, _MAX_BREAKS + 1)}
    return {token_id: number for number, token_id in ids.items() if token_id is not None}
