"""The KV blocks of the pool: who is free, how often the others are held, and which content can be found again.

Owns reference counts, the free list and the map from content hash to block. Knows nothing of requests, of tokens,
or of the memory behind a block: a block is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miniserve.errors import ConfigError


@dataclass(slots=True)
class _Block:
    """`prev` and `next` are block ids in the free list, and mean nothing while the block is held.

    `suspect`: its memory may hold NaN, which reaches even those who read it with weight 0.
    """

    ref_count: int = 0
    hash: bytes | None = None
    suspect: bool = False
    prev: int = 0
    next: int = 0


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block as an observer sees it. `free_position` 0 is the next to be taken; None: the block is held."""

    block_id: int
    ref_count: int
    hash: bytes | None
    free_position: int | None


class BlockPool:
    """Blocks 1 to `num_blocks` - 1: those with nothing to find are handed out first, then the least recently used.

    A free block keeps its content and its hash until it is taken for new use, so that a later request with the
    same prefix may still touch it. A block that nobody can find goes to the head of the list when it is freed: taking
    it costs no cached content, and its memory is warm. The free list is a circular doubly linked list through the
    blocks themselves, so that any block leaves it in O(1). Block 0 is never handed out (the runner writes padding
    there); it serves as the list's sentinel: `next` is the first to be taken, `prev` the last.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"the KV cache needs at least 2 blocks (block 0 is for padding), got {num_blocks}")
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._block_of_hash: dict[bytes, int] = {}
        self._num_free = 0
        self._to_clear: list[int] = []
        for block_id in range(1, num_blocks):
            self._insert_free(block_id, before=0)

    @property
    def capacity(self) -> int:
        """How many blocks can be held at once."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with or without content that can be found again."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.capacity - self._num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Take the blocks at the head of the free list for new content; whatever they held can be found no more."""
        assert num_blocks <= self._num_free, "the caller checks num_free"
        return [self._take_next() for _ in range(num_blocks)]

    def touch(self, block_id: int) -> None:
        """Hold a block for the content it has, free or not: a prefix cache hit."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            self._unlink_free(block_id)
        block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of the blocks of one sequence, given in token order.

        The last one enters the free list first and is evicted first: a block is of no use without those before it.
        Blocks without content that can be found again are the next to be taken, in token order.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._insert_free(block_id, before=0 if self._is_findable(block_id) else self._blocks[0].next)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._block_of_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Name the content of a held block, whose KV is computed in full.

        Two requests may compute the same content side by side: both blocks bear the hash, the first stays the one
        that `lookup` finds.
        """
        block = self._blocks[block_id]
        assert block.ref_count > 0 and block.hash is None, f"block {block_id} is free or registered"
        block.hash = block_hash
        self._block_of_hash.setdefault(block_hash, block_id)

    def suspect(self, block_ids: Sequence[int]) -> None:
        """Have the memory of these blocks cleared before its next use: nobody knows whether it holds numbers."""
        for block_id in block_ids:
            self._blocks[block_id].suspect = True

    def take_blocks_to_clear(self) -> tuple[int, ...]:
        """The suspect blocks among those that were allocated since the last call."""
        block_ids = tuple(self._to_clear)
        self._to_clear.clear()
        return block_ids

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let nobody find the content of these blocks again: it may be wrong. Who holds them goes on."""
        for block_id in block_ids:
            block_hash = self._blocks[block_id].hash
            if block_hash is not None and self._is_findable(block_id):
                del self._block_of_hash[block_hash]

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds the block."""
        return self._blocks[block_id].ref_count == 0

    def is_registered(self, block_id: int) -> bool:
        """Whether the block's content has a name."""
        return self._blocks[block_id].hash is not None

    def free_block_ids(self) -> list[int]:
        """The free list, the next to be taken first. Walks the whole list."""
        block_ids = []
        block_id = self._blocks[0].next
        while block_id != 0:
            block_ids.append(block_id)
            block_id = self._blocks[block_id].next
        return block_ids

    def snapshot(self) -> list[BlockState]:
        """All blocks but block 0, by id: for drawings and for checks."""
        position = {block_id: index for index, block_id in enumerate(self.free_block_ids())}
        return [
            BlockState(block_id, block.ref_count, block.hash, position.get(block_id))
            for block_id, block in enumerate(self._blocks)
            if block_id != 0
        ]

    def _take_next(self) -> int:
        block_id = self._blocks[0].next
        self._unlink_free(block_id)
        block = self._blocks[block_id]
        block.ref_count = 1
        # A hash that outlived its content would serve wrong KV.
        if self._is_findable(block_id):
            assert block.hash is not None
            del self._block_of_hash[block.hash]
        block.hash = None
        if block.suspect:
            block.suspect = False
            self._to_clear.append(block_id)
        return block_id

    def _is_findable(self, block_id: int) -> bool:
        """Whether `lookup` can return the block: it has a hash, and no twin with the same content stands for it."""
        block_hash = self._blocks[block_id].hash
        return block_hash is not None and self._block_of_hash.get(block_hash) == block_id

    def _insert_free(self, block_id: int, *, before: int) -> None:
        previous = self._blocks[before].prev
        self._blocks[block_id].prev, self._blocks[block_id].next = previous, before
        self._blocks[previous].next = block_id
        self._blocks[before].prev = block_id
        self._num_free += 1

    def _unlink_free(self, block_id: int) -> None:
        block = self._blocks[block_id]
        self._blocks[block.prev].next = block.next
        self._blocks[block.next].prev = block.prev
        self._num_free -= 1
