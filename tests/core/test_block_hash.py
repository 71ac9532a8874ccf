from __future__ import annotations

import os
import subprocess
import sys

import pytest

from miniserve.core.block_hash import DIGEST_SIZE, hash_block


def test_equal_input_gives_equal_digest() -> None:
    digest = hash_block(None, [1, 2, 3, 4], b"")
    assert digest == hash_block(None, (1, 2, 3, 4), b"")
    assert len(digest) == DIGEST_SIZE == 16


def test_every_part_matters() -> None:
    root = hash_block(None, [1, 2], b"")
    digests = [
        root,
        hash_block(None, [2, 1], b""),
        hash_block(None, [1, 3], b""),
        hash_block(None, [1, 2], b"tenant"),
        hash_block(root, [1, 2], b""),
        hash_block(hash_block(None, [1, 2], b"tenant"), [1, 2], b"tenant"),
        hash_block(hash_block(None, [1, 3], b""), [1, 2], b""),
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("left", "right"),
    [([1, 23], [12, 3]), ([1], [1, 0]), ([256], [0, 1]), ([2**32 + 7], [7, 1]), ([2**32 + 7], [7])],
)
def test_token_ids_have_a_fixed_width(left: list[int], right: list[int]) -> None:
    """Ids written one after another without a width or a separator make different sequences look the same."""
    assert hash_block(None, left, b"") != hash_block(None, right, b"")


def test_salt_cannot_pass_for_tokens_nor_a_parent_for_a_salt() -> None:
    """A client that chooses its salt must not be able to spell another client's tokens or block hash in it."""
    token = (5).to_bytes(8, sys.byteorder)
    assert hash_block(None, [5, 6], b"s") != hash_block(None, [6], b"s" + token)
    parent = hash_block(None, [1], b"")
    assert hash_block(parent, [5], b"") != hash_block(None, [5], parent)


def test_digest_does_not_depend_on_the_process() -> None:
    """CVE-2025-25183: names made by Python's hash() can be made to collide, and other users' KV was served."""
    code = "from miniserve.core.block_hash import hash_block; print(hash_block(None, [1, 2], b'x').hex())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {hash_block(None, [1, 2], b"x").hex()}


@pytest.mark.parametrize("module", ["scheduler", "kv_cache_manager", "schedule", "request"])
def test_core_needs_the_standard_library_only(module: str) -> None:
    code = f"import miniserve.core.{module}, sys; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
