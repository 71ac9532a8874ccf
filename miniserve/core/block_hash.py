"""The name of a KV block's content: a chained cryptographic hash of every token up to the block's end.

Equal hashes mean equal KV, whoever sent the tokens, so a collision would serve one user the context of another:
hence BLAKE2b (RFC 7693) and not Python's `hash()`. Knows nothing of blocks, requests or the cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes


def hash_block(parent: bytes | None, token_ids: Sequence[int], salt: bytes) -> bytes:
    """Hash one whole block after the block named `parent` (None: the first block of a sequence).

    `salt` enters at the first block and reaches the others through their parents. Every part is of fixed width
    or carries its length, and the first block has a domain of its own: no two inputs give the same message.
    """
    if parent is None:
        state = blake2b(len(salt).to_bytes(8, "big") + salt, digest_size=DIGEST_SIZE, person=b"first block")
    else:
        state = blake2b(parent, digest_size=DIGEST_SIZE)
    state.update(array("q", token_ids))
    return state.digest()
