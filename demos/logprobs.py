"""Logprobs: how sure the model was of each token, and what it would have said instead.

What to look at: red words. There the model had several ways to go on; the table shows the closest decisions.

    uv run main.py serve --model smollm2
    uv run demos/logprobs.py [base-url] [prompt]
"""

from __future__ import annotations

import math
import os
import sys

import openai
from openai.types.chat import ChatCompletionTokenLogprob
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France, and what is it known for?"
LEVELS = ((0.9, "green"), (0.5, "yellow"), (0.0, "red"))  # from this probability on
NUM_ALTERNATIVES, NUM_SHOWN = 3, 5


def main() -> None:
    """The answer in colours, then where it hung by a thread."""
    console = Console(highlight=False)
    client = openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=60,
        temperature=0,
        logprobs=True,
        top_logprobs=NUM_ALTERNATIVES,
    )
    logprobs = answer.choices[0].logprobs
    entries = (logprobs.content if logprobs else None) or sys.exit("the server sent no logprobs")
    console.print(Text.assemble(*((entry.token, colour(entry.logprob)) for entry in entries)), "")
    legend = Text.assemble(*((f"probability from {lowest:.0%}  ", style) for lowest, style in LEVELS))
    console.print(legend, "")
    console.print(closest(entries))
    mean = sum(entry.logprob for entry in entries) / len(entries)
    console.print(f"{len(entries)} tokens; perplexity {math.exp(-mean):.2f}: as if each had been one of so many")


def colour(logprob: float) -> str:
    """The style of a token that had this logprob."""
    return next(style for lowest, style in LEVELS if math.exp(logprob) >= lowest)


def closest(entries: list[ChatCompletionTokenLogprob]) -> Table:
    """The tokens that the model was least sure of, and its other ideas."""
    table = Table("token", "probability", "most probable ones", title="The closest decisions", title_justify="left")
    for entry in sorted(entries, key=lambda entry: entry.logprob)[:NUM_SHOWN]:
        ideas = ", ".join(f"{idea.token!r} {math.exp(idea.logprob):.0%}" for idea in entry.top_logprobs)
        table.add_row(Text(repr(entry.token)), f"{math.exp(entry.logprob):.0%}", Text(ideas))
    return table


if __name__ == "__main__":
    run(main, __doc__, BASE_URL)
