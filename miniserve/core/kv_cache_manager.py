"""Which KV blocks a request holds: gives them, finds those already computed, takes them back.

Owns the translation from tokens to blocks, and writes `block_ids` and `block_hashes` of a `Request`. Does not know
why a request needs room (the scheduler decides) or where a block lies in memory (the runner knows).
"""

from __future__ import annotations

from collections.abc import Sequence

from miniserve.core.block_hash import hash_block
from miniserve.core.block_pool import BlockPool
from miniserve.core.request import Request
from miniserve.errors import ConfigError


class KVCacheManager:
    """The paged KV cache: `num_blocks` blocks (block 0 included) of `block_size` tokens.

    Attributes:
        num_prefix_query_tokens: tokens of the prompts that asked the prefix cache, each at its first admission
            only: a request that waits, resumes after a preemption, or is a fork does not ask for the statistics.
        num_prefix_hit_tokens: how many of those the prefix cache had.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        return self.pool.capacity * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]. Cached blocks that nobody holds count as free."""
        return self.pool.num_used / self.pool.capacity

    def find_cached_prefix(self, request: Request) -> list[int]:
        """The longest run of computed blocks that the request's tokens start with, in token order.

        Whole blocks only, and at least one token is left to compute: its logits give the next token. Changes
        nothing in the pool: the blocks are the caller's only once `allocate` has taken them.
        """
        if not request.reads_prefix_cache:
            return []
        if not self.prefix_caching:
            return self._blocks_of_parent(request)
        block_ids = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self.pool.lookup(self._block_hash(request, index))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def allocate(self, request: Request, num_new_tokens: int, cached_blocks: Sequence[int] = ()) -> bool:
        """Make room for the request's next `num_new_tokens`, after what it has computed and `cached_blocks`.

        All or nothing: returns False, and changes nothing, when the free blocks do not suffice. `cached_blocks`
        come from `find_cached_prefix`, for a request that holds no blocks yet.
        """
        assert not (cached_blocks and request.block_ids), "a prefix is taken before anything else"
        num_tokens = request.num_computed_tokens + len(cached_blocks) * self.block_size + num_new_tokens
        num_held = len(request.block_ids) + len(cached_blocks)
        num_missing = max(0, -(-num_tokens // self.block_size) - num_held)
        # A hit on a free block takes it off the free list, where it cannot serve as room as well.
        num_free_hits = sum(self.pool.is_free(block_id) for block_id in cached_blocks)
        if num_missing > self.pool.num_free - num_free_hits:
            return False
        if not request.block_ids:
            self._count_query(request, len(cached_blocks))
        for block_id in cached_blocks:  # first, lest the hits be evicted to make the room
            self.pool.touch(block_id)
        request.block_ids += [*cached_blocks, *self.pool.allocate(num_missing)]
        return True

    def cache_computed_blocks(self, request: Request) -> None:
        """Let later requests find the whole blocks whose KV is computed. Call it after the step, not before."""
        if not self.prefix_caching:
            return
        for index in reversed(range(request.num_computed_tokens // self.block_size)):
            block_id = request.block_ids[index]
            if self.pool.is_registered(block_id):
                break  # and so is every block before it
            self.pool.register(block_id, self._block_hash(request, index))

    def forget(self, request: Request) -> None:
        """Let nobody find or read the KV of a request that went wrong."""
        self.pool.forget(request.block_ids)
        self.pool.suspect(request.block_ids)

    def free(self, request: Request) -> None:
        """Take back all blocks of the request. What they hold can be found until they are used again."""
        if request.num_output_tokens == 0:  # no token came out of this KV that would show it to be sound
            self.pool.suspect(request.block_ids)
        self.pool.free(request.block_ids)
        request.block_ids = []  # a new list: the old one may be part of a step that is on its way

    def _blocks_of_parent(self, request: Request) -> list[int]:
        """What a fork shares without a prefix cache: the computed whole blocks of the prompt that its parent holds."""
        parent = request.parent
        if parent is None:
            return []
        num_tokens = min(request.num_prompt_tokens, request.num_tokens - 1, parent.num_computed_tokens)
        return parent.block_ids[: num_tokens // self.block_size]

    def _block_hash(self, request: Request, index: int) -> bytes:
        """The hash of a whole block of the request, computed once: tokens are never changed."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            token_ids = request.token_ids[start : start + self.block_size]
            hashes.append(hash_block(hashes[-1] if hashes else None, token_ids, request.cache_salt))
        return hashes[index]

    def _count_query(self, request: Request, num_cached_blocks: int) -> None:
        is_first = request.num_preemptions == 0 and not request.is_fork
        if self.prefix_caching and is_first and request.reads_prefix_cache:
            self.num_prefix_query_tokens += request.num_prompt_tokens
            self.num_prefix_hit_tokens += num_cached_blocks * self.block_size
