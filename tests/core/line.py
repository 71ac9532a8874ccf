"""In which order requests are served: a model of the scheduler's two lists, and what has to hold of them."""

from __future__ import annotations

from collections.abc import Sequence

from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import SchedulerOutput
from miniserve.core.scheduler import Scheduler


class Line:
    """Everybody who is alive.

    Attributes:
        live: the requests that run or queue, those of one priority in the order that the scheduler promises.
        forks: those that wait for their parent.
    """

    def __init__(self) -> None:
        self.live: list[Request] = []
        self.forks: dict[Request, list[Request]] = {}

    @property
    def waiting_forks(self) -> list[Request]:
        return [fork for forks in self.forks.values() for fork in forks]

    def pick(self, index: int) -> Request:
        """Any request that has not ended."""
        candidates = [*self.live, *self.waiting_forks]
        return candidates[index % len(candidates)]

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Behind all of its priority."""
        self.live.append(request)
        if forks:
            self.forks[request] = list(forks)

    def take_out(self, request: Request) -> None:
        """It is to end between two steps: its status still says where it is."""
        if request not in self.live:
            assert request.parent is not None
            self.forks[request.parent].remove(request)
            return
        place = self.live.index(request)
        self.live.remove(request)
        if request.status is RequestStatus.RUNNING:
            self.release([request])
        else:
            self.live[place:place] = self.forks.pop(request, [])

    def release(self, parents: Sequence[Request]) -> None:
        """Their forks wait for them no longer: they go before those of their priority that wait."""
        released = [fork for parent in parents for fork in self.forks.pop(parent, [])]
        for request in released:
            behind = [
                other
                for other in self.live
                if other.priority == request.priority
                and other.status is RequestStatus.WAITING
                and other not in released
            ]
            place = self.live.index(behind[0]) if behind else len(self.live)
            self.live.insert(place, request)

    def check_step(self, step: SchedulerOutput, running: Sequence[str]) -> None:
        """A step is in order. To be called while `live` is as it was before; `running`: who ran then."""
        order = [request.request_id for request in by_priority(self.live)]
        ids = [item.request_id for item in step.scheduled]
        first = running[0] if running else order[0]
        is_equal = len({request.priority for request in self.live}) == 1
        assert ids[0] == first and (first == order[0] or not is_equal), (
            "the first goes on in every step, so that nobody starves"
        )
        goes_on, admitted = [[one for one in ids if (one in running) is ran] for ran in (True, False)]
        assert goes_on == list(running[: len(goes_on)]) and ids == [*goes_on, *admitted]
        assert admitted == [request_id for request_id in order if request_id not in running][: len(admitted)]
        assert all(item.num_new_tokens > 0 for item in step.scheduled)
        if step.preempted_ids:
            assert not admitted and not set(ids) & set(step.preempted_ids)
            assert list(step.preempted_ids) == running[: -len(step.preempted_ids) - 1 : -1], "the last go first"

    def check(self, scheduler: Scheduler) -> None:
        """Running and then waiting requests are those alive in their order, each with blocks for what it computed."""
        running, waiting = scheduler._running, list(scheduler._waiting)
        assert running == by_priority(running) and waiting == by_priority(waiting)
        assert by_priority([*running, *waiting]) == by_priority(self.live)
        assert len(running) == scheduler.num_running <= scheduler.max_num_seqs
        for request in running:
            assert request.status is RequestStatus.RUNNING
            assert 0 < request.num_computed_tokens < request.num_tokens
            assert len(request.block_ids) == -(-request.num_computed_tokens // scheduler.kv.block_size)
        for request in [*waiting, *self.waiting_forks]:
            assert request.status is RequestStatus.WAITING
            assert request.num_computed_tokens == 0 and request.block_ids == []
        assert scheduler.num_waiting == len(self.live) + len(self.waiting_forks) - len(running)
        assert scheduler.has_work == bool(self.live)  # a fork never waits for nobody
        assert scheduler.num_preemptions >= sum(request.num_preemptions for request in self.live)


def by_priority(requests: Sequence[Request]) -> list[Request]:
    """Within a priority, the order stays."""
    return sorted(requests, key=lambda request: request.priority)
