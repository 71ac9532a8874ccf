"""LangChain's ChatOpenAI: invoke and stream.

What to look at: LangChain fills `usage_metadata` and the finish reason from the same fields, streamed or not.

    uv run --isolated --no-project --with langchain-openai demos/clients/langchain_sdk.py [base-url] [model]
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
QUESTION = "What is the capital of France?"


def main() -> None:
    """Ask both ways, and compare."""
    print(f"langchain-openai {version('langchain-openai')}, {BASE_URL}")
    chat = ChatOpenAI(base_url=BASE_URL, api_key="unused", model=MODEL, temperature=0, max_tokens=32, stream_usage=True)

    answer = chat.invoke(QUESTION)
    finish = answer.response_metadata["finish_reason"]
    print(f"  invoke: {answer.content!r}, usage {counts(answer.usage_metadata)}, finish {finish}")

    whole = AIMessageChunk("")
    pieces = 0
    for chunk in chat.stream(QUESTION):
        whole += chunk
        pieces += bool(chunk.content)
    streamed_finish = whole.response_metadata["finish_reason"]
    print(
        f"  stream: {whole.content!r}, pieces {pieces}, usage {counts(whole.usage_metadata)}, finish {streamed_finish}"
    )

    assert answer.content and (whole.content, streamed_finish) == (answer.content, finish), "the answers differ"
    assert counts(whole.usage_metadata) == counts(answer.usage_metadata), "the usages differ"


def counts(usage: dict[str, int]) -> tuple[int, int, int]:
    """Prompt, output and all tokens, as LangChain names them."""
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]


if __name__ == "__main__":
    main()
