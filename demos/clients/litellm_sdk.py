"""LiteLLM as a client: completion and stream, with "openai/" before the model's name.

What to look at: LiteLLM rebuilds every object with its own classes, so what it prints is what it understood.

    uv run --isolated --no-project --with litellm demos/clients/litellm_sdk.py [base-url] [model]
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import litellm

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
ASK: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": "unused",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}


def main() -> None:
    """Ask both ways, and compare."""
    print(f"litellm {version('litellm')}, {BASE_URL}")
    answer = litellm.completion(**ASK)
    choice = answer.choices[0]
    text, finish = choice.message.content, choice.finish_reason
    print(f"  completion: {text!r}, usage {counts(answer.usage)}, finish {finish}")

    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    finishes = [choice.finish_reason for choice in choices if choice.finish_reason]
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    print(f"  stream: {''.join(pieces)!r}, pieces {len(pieces)}, usage {counts(usage)}, finish {finishes[-1]}")

    assert text and ("".join(pieces), finishes[-1]) == (text, finish), "the answers differ"
    assert counts(usage) == counts(answer.usage), "the usages differ"


def counts(usage: litellm.Usage) -> tuple[int, int, int]:
    """Prompt, output and all tokens."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


if __name__ == "__main__":
    main()
