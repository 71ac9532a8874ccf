"""The order of those who wait, against a list that is sorted again after every change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miniserve.core.request import Request
from miniserve.core.request_queue import RequestQueue
from miniserve.sampling_params import SamplingParams

PRIORITIES = (-5, 0, 0, 3)


def make_request(name: str, priority: int = 0) -> Request:
    return Request(name, [1], SamplingParams(), priority=priority)


def names(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_one_priority_is_a_deque() -> None:
    queue = RequestQueue()
    assert not queue
    for name in "abc":
        queue.append(make_request(name))
    queue.put_back([make_request("x"), make_request("y")])
    assert queue and names(queue) == ["x", "y", "a", "b", "c"]
    assert queue.first().request_id == "x" and queue.pop().request_id == "x"
    assert names(queue) == ["y", "a", "b", "c"]


def test_lower_priorities_come_first() -> None:
    queue = RequestQueue()
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        queue.append(make_request(name, priority))
    queue.put_back([make_request("e", 5), make_request("f", 0)])
    assert names(queue) == ["c", "f", "b", "d", "e", "a"]
    assert [queue.pop().request_id for _ in range(6)] == ["c", "f", "b", "d", "e", "a"]
    assert not queue


def test_successors_take_the_place_of_the_one_they_replace() -> None:
    queue = RequestQueue()
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        queue.append(request)
    assert queue.replace(requests[1], [make_request("x"), make_request("y")])
    assert names(queue) == ["a", "x", "y", "c"]
    assert queue.replace(requests[0]) and not queue.replace(requests[0])
    assert names(queue) == ["x", "y", "c"]
    assert not queue.replace(make_request("z", priority=9))


@given(
    st.lists(st.tuples(st.sampled_from(["append", "put_back", "pop", "replace"]), st.integers(0, 3), st.integers(0, 9)))
)
def test_any_changes(changes: list[tuple[str, int, int]]) -> None:
    queue, expected = RequestQueue(), list[Request]()
    for number, (change, which, index) in enumerate(changes):
        request = make_request(f"r{number}", PRIORITIES[which])
        if change == "append":
            queue.append(request)
            expected.append(request)
        elif change == "put_back":
            queue.put_back([request])
            expected.insert(0, request)
        elif expected and change == "pop":
            assert queue.first() is expected[0] and queue.pop() is expected.pop(0)
        elif expected:
            removed = expected.pop(index % len(expected))
            assert queue.replace(removed) and not queue.replace(removed)
        expected.sort(key=lambda request: request.priority)
        assert list(queue) == expected and bool(queue) == bool(expected)
