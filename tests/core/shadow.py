"""What would lie in each slot of the KV cache: for runners of tests that compute by a script.

The cache is a dict from slot to the tokens whose KV lies there. It refuses to attend to anything but a request's own
prefix, so a stale, unwritten or foreign block shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miniserve.core.block_hash import hash_block
from miniserve.core.schedule import ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import Scheduler

Content = tuple[bytes, tuple[int, ...]]  # salt, and the tokens up to and including the one in the slot
BROKEN: Content = (b"broken", ())


class ShadowCache:
    """Keeps what a real runner would have written into each slot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.kv.block_size
        self.slots: dict[tuple[int, int], Content] = {}

    def compute(self, step: SchedulerOutput, salts: Mapping[str, bytes], failing: frozenset[str] = frozenset()) -> None:
        """Read and write as a step would; what the `failing` requests write is useless."""
        cleared = set(step.blocks_to_clear)
        self.slots = {slot: content for slot, content in self.slots.items() if slot[0] not in cleared}
        for item in step.scheduled:  # all reads before any write: a hit was there before the step
            self._check_read(item, salts[item.request_id])
        for item in step.scheduled:
            self._write(item, salts[item.request_id], broken=item.request_id in failing)

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Let their memory hold nothing but what must not be read."""
        self.slots |= {(block_id, offset): BROKEN for block_id in block_ids for offset in range(self.block_size)}

    def _slot(self, item: ScheduledRequest, position: int) -> tuple[int, int]:
        block_id = item.block_ids[position // self.block_size]
        assert block_id != 0
        return block_id, position % self.block_size

    def _check_read(self, item: ScheduledRequest, salt: bytes) -> None:
        for position in range(item.start):
            content = self.slots.get(self._slot(item, position))
            assert content == (salt, tuple(item.token_ids[: position + 1])), f"{item.request_id} read {content}"

    def _write(self, item: ScheduledRequest, salt: bytes, broken: bool) -> None:
        states = self.scheduler.kv.pool.snapshot()
        for position in range(item.start, item.end):
            slot = self._slot(item, position)
            state = states[slot[0] - 1]
            assert state.ref_count <= 1 and state.hash is None, f"wrote into a shared or registered block: {state}"
            self.slots[slot] = BROKEN if broken else (salt, tuple(item.token_ids[: position + 1]))
        for block_id in item.block_ids:  # the slots after the last token are read as well, if with weight 0
            contents = [self.slots.get((block_id, offset)) for offset in range(self.block_size)]
            assert broken or BROKEN not in contents, f"{item.request_id} has what a failed request left behind"


def check_blocks(scheduler: Scheduler, cache: ShadowCache) -> None:
    """Each block is free or held the right number of times, and holds what its hash says."""
    pool = scheduler.kv.pool
    held = [block_id for request in scheduler._running for block_id in request.block_ids]
    for state in pool.snapshot():
        assert state.ref_count == held.count(state.block_id)
        assert (state.free_position is None) == (state.ref_count > 0)
        if state.hash is not None:
            assert state.hash == _hash_of_content(cache, state.block_id)
    for block_hash, block_id in pool._block_of_hash.items():
        assert pool._blocks[block_id].hash == block_hash
    forward = pool.free_block_ids()
    backward, block_id = [], pool._blocks[0].prev
    while block_id != 0:
        backward.append(block_id)
        block_id = pool._blocks[block_id].prev
    assert forward == backward[::-1] and len(forward) == pool.num_free == len(set(forward))


def _hash_of_content(cache: ShadowCache, block_id: int) -> bytes:
    size = cache.block_size
    salt, token_ids = cache.slots[block_id, size - 1]
    assert len(token_ids) % size == 0
    for offset in range(size):
        end = len(token_ids) - size + offset + 1
        assert cache.slots[block_id, offset] == (salt, token_ids[:end])
    block_hash = None
    for start in range(0, len(token_ids), size):
        block_hash = hash_block(block_hash, token_ids[start : start + size], salt)
    assert block_hash is not None
    return block_hash
