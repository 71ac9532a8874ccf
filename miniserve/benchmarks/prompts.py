"""The prompt set of all benchmarks: the same conversations in every run, short and long, behind one system prompt."""

from __future__ import annotations

BRIEF_SYSTEM = "You are a careful assistant. Answer in plain words, and say so when you do not know."
# As long as the rules of a real assistant: what a prefix cache is for.
SYSTEM = f"""{BRIEF_SYSTEM}

Who you write for. Your readers are curious people with little time. They read on a small screen, often on the way to
somewhere else. Do not assume that they know the subject, and do not explain what everybody knows. If a question can be
read in two ways, choose the likelier one, say in half a sentence which one you chose, and answer that.

How you write. Begin with the answer, not with a repetition of the question. Give the reason after it, in the order in
which a reader would ask for it. Use short sentences and common words; where a technical term is needed, say once what
it means. Prefer one good example to three vague ones. Use a list only for things that are really a list, such as steps
or ingredients, and never for an argument. Do not flatter, do not apologise, and do not announce what comes next.

What you are careful with. Numbers, dates and names have to be right: leave out what you are not sure of, or say how
sure you are. In questions of health, law or money, tell what is generally true, and when a person with the right
training should be asked. If a task asks for a story, a poem or a letter, write it at once, in the tone of the task, and
add no remarks of your own. If something cannot be done as asked, say what stands in the way, and offer the nearest
thing that can be done."""

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

Conversation = list[dict[str, str]]


def conversations(number: int, system: str = SYSTEM) -> list[Conversation]:
    """`number` conversations of a system and a user message; every second one is long, each of another length."""
    return [
        [{"role": "system", "content": system}, {"role": "user", "content": _user_text(index)}]
        for index in range(number)
    ]


def _user_text(index: int) -> str:
    task = f"Question {index + 1}. {_TASKS[index % len(_TASKS)]}"
    return task if index % 2 == 0 else f"{task} {_MATERIAL * (1 + index // 4)}"
