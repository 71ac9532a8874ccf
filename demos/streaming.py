"""A stream: the answer arrives piece by piece while the model still works on the rest.

What to look at: the text grows in alternating colours, one colour a piece, and the first piece came long before the
last. A plain answer would have shown nothing until then.

    uv run main.py serve --model smollm2
    uv run demos/streaming.py [base-url] [prompt]
"""

from __future__ import annotations

import os
import sys
from itertools import cycle, pairwise
from statistics import median
from time import perf_counter

import openai
from rich.console import Console
from rich.text import Text

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "Tell me in three sentences how rain forms."
MAX_TOKENS = 80


def main() -> None:
    """Ask, and print each piece when it comes."""
    console = Console(highlight=False)
    client = openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = client.models.list().data[0].id
    colours = cycle(("cyan", "yellow"))
    arrivals: list[float] = []
    num_tokens = 0
    start = perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:  # the last chunk: it counts, and has no choices
            num_tokens = chunk.usage.completion_tokens
        elif piece := chunk.choices[0].delta.content:
            arrivals.append(perf_counter() - start)
            console.print(Text(piece, style=next(colours)), end="", soft_wrap=True)
    console.print("\n")
    report(console, arrivals, num_tokens)


def report(console: Console, arrivals: list[float], num_tokens: int) -> None:
    """What a reader of the stream gained."""
    if not arrivals:
        sys.exit("the model had nothing to say; try another prompt")
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    console.print(f"{num_tokens} tokens in {len(arrivals)} pieces")
    console.print(f"first piece after {arrivals[0]:.3f} s: the time to first token")
    if gaps:
        console.print(f"then one each {median(gaps) * 1e3:.1f} ms: the inter-token latency")
    console.print(f"last piece after {arrivals[-1]:.3f} s: so long a plain answer would have kept you waiting")


if __name__ == "__main__":
    run(main, __doc__, BASE_URL)
