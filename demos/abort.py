"""Abort: who hangs up stops the work, and nobody pays for words that nobody reads.

What to look at: each answer could have a thousand tokens. The client of the stream leaves after ten pieces, that of the
plain request after a second, and soon after each the server runs nothing, holds no KV block, and has made few tokens.
Let nobody else use the server meanwhile.

    uv run main.py serve --model smollm2
    uv run demos/abort.py [base-url] [prompt]
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import Any

import httpx

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"
MAX_TOKENS, NUM_PIECES, PATIENCE, DEADLINE = 1000, 10, 1.0, 30.0  # the last two in seconds
REQUEST = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True}


def main() -> None:
    """Leave a stream, then a plain request."""
    with httpx.Client(timeout=60) as client:
        for name, leave in (("a stream", leave_stream), ("a plain request", leave_plain)):
            before = stats(client)
            leave(client)
            print(f"{name}: the client is gone, the server has made {made(client, before)} of {MAX_TOKENS} tokens")
            now = wait_until_idle(client)
            print(f"  running {now['running']}, KV blocks used {now['kv_blocks_used']}", end=", ")
            print(f"{made(client, before)} tokens in all; finished: {now['requests_finished']}")
    print("The work ended with the connection.")


def leave_stream(client: httpx.Client) -> None:
    """Read some pieces, and close the connection."""
    with client.stream("POST", f"{BASE_URL}/completions", json={**REQUEST, "stream": True}) as response:
        response.raise_for_status()
        for _ in islice((line for line in response.iter_lines() if line), NUM_PIECES):
            pass


def leave_plain(client: httpx.Client) -> None:
    """Give up waiting for the answer."""
    try:
        client.post(f"{BASE_URL}/completions", json=REQUEST, timeout=PATIENCE).raise_for_status()
    except httpx.ReadTimeout:
        return
    sys.exit(f"the server had all {MAX_TOKENS} tokens within {PATIENCE:g} s: it is too fast for this demo")


def wait_until_idle(client: httpx.Client) -> dict[str, Any]:
    """The statistics once nothing runs."""
    give_up = time.monotonic() + DEADLINE
    while (now := stats(client))["running"] or now["waiting"]:
        if time.monotonic() > give_up:
            sys.exit(f"{now['running']} requests still run after {DEADLINE:g} s: does somebody else use the server?")
    return now


def made(client: httpx.Client, before: dict[str, Any]) -> int:
    """Tokens generated since."""
    return int(stats(client)["generation_tokens_total"] - before["generation_tokens_total"])


def stats(client: httpx.Client) -> dict[str, Any]:
    """The server at a glance."""
    return dict(client.get(f"{BASE_URL.removesuffix('/v1')}/stats").raise_for_status().json())


if __name__ == "__main__":
    run(main, __doc__, BASE_URL)
