"""How the requests of one step that follow a grammar get their tokens.

A mask of all that is allowed costs a hundred times more than to ask whether one token is. An accelerator gives the time
for it: masks are computed beside the model. On a CPU they would take it from the model, and most tokens that a model
likes best are allowed anyway: so it samples first, and only who got a token that is not allowed waits for a mask and
samples again. This is rejection sampling, and exact: whoever is greedy gets the same token, whoever draws gets each
with the same probability (with a seed the very same one, as the noise belongs to the tokens). Where top-k, top-p or
min-p choose among what is allowed, the mask comes first. Where a grammar leaves no choice for some tokens, all of them
are taken at once, and no mask is needed. A grammar that fails ends its own request, and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.structured.masks import GRAMMAR_FAILED, MaskQuery, MaskWorker, PendingMasks

logger = logging.getLogger(__name__)

Sample = Callable[[SchedulerOutput, Any, Mapping[str, Any]], RunnerOutput]


class ConstrainedSampling:
    """The sampling of one step: begun before the model runs.

    Args:
        sample: the runner's.
        masks: computes masks.
        queries: the requests that follow a grammar.
        errors: what those are told who do, and whose grammar cannot even be asked; by request.
    """

    def __init__(
        self, sample: Sample, masks: MaskWorker, queries: Sequence[MaskQuery], errors: Mapping[str, str]
    ) -> None:
        self._sample = sample
        self._worker = masks
        self._rows: dict[str, Any] = {}
        self._errors = dict(errors)
        self._forced = {query.request_id: tokens for query in queries if (tokens := self._forced_by(query))}
        choosing = [query for query in queries if query.request_id not in {**self._forced, **self._errors}]
        self._tried = {} if masks.ahead else {query.request_id: query for query in choosing if query.may_try}
        self._asked: Sequence[MaskQuery] = ()
        self._pending: PendingMasks | None = None
        self._start([query for query in choosing if query.request_id not in self._tried])

    def sample(self, step: SchedulerOutput, logits: Any) -> RunnerOutput:
        """The next tokens. Again after a failure, also with a part of the step: nothing is computed twice.

        Args:
            step: that of `queries`, or a part of it.
            logits: its logits, as the runner's sampling takes them.
        """
        self.wait()
        results = self._results(step, logits)
        refused = [item for item in step.scheduled if self._is_refused(item.request_id, results[item.request_id])]
        if refused:
            self._start([self._tried.pop(item.request_id) for item in refused])
            self.wait()
            results |= self._results(SchedulerOutput(tuple(refused)), logits)
        return RunnerOutput(tuple(self._kept(item, results[item.request_id]) for item in step.scheduled))

    def wait(self) -> None:
        """For the masks that are on their way: until then nothing else may touch the matchers."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            masks = pending.result()
        except Exception:
            self._fail_asked()
            return
        self._rows = {**self._rows, **masks.rows}  # the runner may keep the one it got
        self._errors |= masks.errors

    def _start(self, queries: Sequence[MaskQuery]) -> None:
        self._asked = queries
        try:
            self._pending = self._worker.start(queries)
        except Exception:
            self._fail_asked()

    def _fail_asked(self) -> None:
        """Their matchers may be in use by a thread, for ever: nobody touches them again."""
        logger.exception("the masks of %d requests failed, and they end", len(self._asked))
        self._errors |= dict.fromkeys((query.request_id for query in self._asked), GRAMMAR_FAILED)

    def _forced_by(self, query: MaskQuery) -> tuple[int, ...]:
        try:
            return query.forced()
        except Exception:
            logger.exception("the grammar of request %s failed, and it ends", query.request_id)
            self._errors[query.request_id] = GRAMMAR_FAILED
            return ()

    def _results(self, step: SchedulerOutput, logits: Any) -> dict[str, RunnerResult]:
        results = self._sample(step, logits, self._rows).results
        return {item.request_id: result for item, result in zip(step.scheduled, results, strict=True)}

    def _is_refused(self, request_id: str, result: RunnerResult) -> bool:
        """Whether it was sampled without its mask, and needs it."""
        query = self._tried.get(request_id)
        return query is not None and bool(result.token_ids) and not query.allows(result.token_ids[0])

    def _kept(self, item: ScheduledRequest, result: RunnerResult) -> RunnerResult:
        """Who has no mask may not go on with what was sampled without one; who has no choice needs no sample."""
        if item.request_id in self._errors:
            return RunnerResult(error=self._errors[item.request_id])
        forced = self._forced.get(item.request_id, ())
        return replace(result, token_ids=forced) if forced and result.error is None else result
