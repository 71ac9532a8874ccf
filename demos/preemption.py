"""Preemption: when the KV pool is full, the newest request gives its blocks back and is computed again later.

What to look at: four requests run, the pool fills, "running" falls and "waiting" rises, and still each answer is as it
was alone. It needs a pool too small for four answers, and fp32, in which an answer does not depend on its neighbours:

    uv run main.py serve --model smollm2 --num-kv-blocks 16 --dtype float32
    uv run demos/preemption.py [base-url] [prompt]
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "Tell me a story about"
ANIMALS, MAX_TOKENS, BLOCK_SIZE = ("a fox", "an owl", "a whale", "a snail"), 64, 16
START = "uv run main.py serve --model smollm2 --num-kv-blocks 16 --dtype float32"


def main() -> None:
    """The four requests one after the other, then at once."""
    client = openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = client.models.list().data[0].id

    def ask(animal: str) -> str:
        long = {"ignore_eos": True}  # a field of miniserve and vLLM: the answer is as long as asked
        answer = client.completions.create(
            model=model, prompt=f"{PROMPT} {animal}", max_tokens=MAX_TOKENS, temperature=0, extra_body=long
        )
        return answer.choices[0].text

    need = sum(-(-(len(f"{PROMPT} {animal}".encode()) + 1 + MAX_TOKENS) // BLOCK_SIZE) for animal in ANIMALS)
    if (total := stats()["kv_blocks_total"]) >= need:  # a token but the first has at least a byte: no more is ever used
        sys.exit(f"the pool has {total} KV blocks, and all answers fit; this demo needs a small one and fp32: {START}")
    print("one after the other ...")
    alone = [ask(animal) for animal in ANIMALS]
    print("all at once:")
    before = stats()["preemptions"]
    with ThreadPoolExecutor(len(ANIMALS)) as threads:
        answers = [threads.submit(ask, animal) for animal in ANIMALS]
        watch(answers, before)
    together = [answer.result() for answer in answers]
    for animal, one, other in zip(ANIMALS, alone, together, strict=True):
        print(f"{animal}: {'the same answer' if one == other else 'ANOTHER answer'}")
    number = stats()["preemptions"] - before
    if not number or alone != together:
        sys.exit(f"preemptions: {number}; this demo needs a small pool and fp32: {START}")
    print(f"Preemptions: {number}; the answers do not tell.")


def watch(answers: list[Future[str]], before: int) -> None:
    """A line whenever requests come, go or give way, until all are answered."""
    last: tuple[int, ...] = ()
    while not all(answer.done() for answer in answers):
        now = stats()
        state = (now["running"], now["waiting"], now["preemptions"] - before)
        if state != last:
            blocks = f"{now['kv_blocks_used']:2} of {now['kv_blocks_total']} blocks used"
            print(f"  running {state[0]}, waiting {state[1]}, {blocks}, preemptions {state[2]}")
        last = state
        time.sleep(0.02)


def stats() -> dict[str, Any]:
    """The server at a glance."""
    return dict(httpx.get(f"{BASE_URL.removesuffix('/v1')}/stats").raise_for_status().json())


if __name__ == "__main__":
    run(main, __doc__, BASE_URL, START)
