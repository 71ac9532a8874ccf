"""The prompt set of all benchmarks: the same conversations in every run, short and long, behind one system prompt."""

from __future__ import annotations

SYSTEM = "You are a careful assistant. Answer in plain words, and say so when you do not know."

_TASKS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List five ways to save water at home, with one sentence each.",
    "What is the difference between a list and a tuple in Python?",
    "Describe a walk through an old harbour town in the early morning.",
    "Summarise the causes of the First World War.",
    "Give advice to somebody who starts to learn the violin at forty.",
    "Plan a three-day trip to the mountains for a family with small children.",
)
_MATERIAL = (
    "Take this into account: the reader has ten minutes, knows nothing of the subject, and wants one example that "
    "can be tried at once. "
)


def conversations(number: int) -> list[list[dict[str, str]]]:
    """`number` conversations of a system and a user message; every second one is long, each of another length."""
    return [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _user_text(index)}]
        for index in range(number)
    ]


def _user_text(index: int) -> str:
    task = f"Question {index + 1}. {_TASKS[index % len(_TASKS)]}"
    return task if index % 2 == 0 else f"{task} {_MATERIAL * (1 + index // 4)}"
