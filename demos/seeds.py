"""Seeds: sampling throws dice, and a seed makes the dice fall in the same way again.

What to look at: the two answers with seed 1 are the same, word by word, at temperature 1. Those with another seed, or
with none, go their own ways.

    uv run main.py serve --model smollm2
    uv run demos/seeds.py [base-url] [prompt]
"""

from __future__ import annotations

import os
import sys

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "Invent a name for a small sailing boat, and say why."
SEEDS = (1, 1, 2, None, None)
MAX_TOKENS = 32


def main() -> None:
    """The same question, with the dice of each seed."""
    console = Console(highlight=False)
    client = openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = client.models.list().data[0].id

    def ask(seed: int | None) -> str:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=MAX_TOKENS,
            temperature=1,
            seed=seed,
        )
        return answer.choices[0].message.content or ""

    ask(None)  # so that all find the prompt in the prefix cache: in bf16, computing it anew may round differently
    answers = [ask(seed) for seed in SEEDS]
    table = Table("seed", "answer", "same as the first", show_lines=True)
    for seed, answer in zip(SEEDS, answers, strict=True):
        table.add_row("none" if seed is None else str(seed), Text(answer), "yes" if answer == answers[0] else "no")
    console.print(table)
    if answers[0] != answers[1]:
        sys.exit("one seed gave two answers: is the server busy with other requests, in bf16?")
    console.print("One seed, one answer.")


if __name__ == "__main__":
    run(main, __doc__, BASE_URL)
