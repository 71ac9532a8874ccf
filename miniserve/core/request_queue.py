"""Those who wait, in the order in which they are admitted: by priority, and within one in the order they came.

Does not know why a request waits: the scheduler says at which end it belongs.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from miniserve.core.request import Request


class RequestQueue:
    """A deque for each priority that somebody waits with; lower priorities are served first.

    Where all requests have one priority, this is a deque.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[Request]] = {}  # without empty ones
        self._priorities: list[int] = []  # ascending

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Request]:
        return (request for priority in self._priorities for request in self._queues[priority])

    def append(self, request: Request) -> None:
        """Behind all of its priority."""
        self._queue(request.priority).append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Before all others of their priority, in the order given."""
        for request in reversed([*requests]):
            self._queue(request.priority).appendleft(request)

    def first(self) -> Request:
        """The next to be admitted."""
        return self._queues[self._priorities[0]][0]

    def pop(self) -> Request:
        """Take the first one out."""
        priority = self._priorities[0]
        request = self._queues[priority].popleft()
        self._drop_empty(priority)
        return request

    def replace(self, request: Request, successors: Sequence[Request] = ()) -> bool:
        """Take `request` out, wherever it is, and put `successors`, of its priority, into its place.

        Returns:
            Whether it was there.
        """
        queue = self._queues.get(request.priority, deque())
        if request not in queue:
            return False
        place = queue.index(request)
        del queue[place]
        for successor in reversed(successors):
            queue.insert(place, successor)
        self._drop_empty(request.priority)
        return True

    def _queue(self, priority: int) -> deque[Request]:
        if priority not in self._queues:
            self._queues[priority] = deque()
            insort(self._priorities, priority)
        return self._queues[priority]

    def _drop_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]
            self._priorities.remove(priority)
