"""llama.cpp's own benchmark in place of a load: the engine alone, without HTTP and without sampling, one stream."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from miniserve.benchmarks.peers.load import Figures, Workload
from miniserve.errors import InternalError

MAX_ERROR_CHARS = 200


def measure(command: Sequence[str], workload: Workload) -> Figures:
    """Run it with the workload's lengths.

    Raises:
        InternalError: it failed.
    """
    prompt, output = str(workload.prompt_tokens), str(workload.output_tokens)
    tests = ("-p", prompt, "-n", output, "-pg", f"{prompt},{output}", "-r", str(workload.turns))
    try:
        done = subprocess.run([*command, *tests], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise InternalError(f"llama-bench failed: {said[-MAX_ERROR_CHARS:]}") from error
    return read_output(done.stdout, workload)


def read_output(text: str, workload: Workload) -> Figures:
    """Its JSON: one test of the prompt, one of the output, one of both in a row.

    Raises:
        InternalError: it is something else.
    """
    lengths = (workload.prompt_tokens, workload.output_tokens)
    try:
        tests: list[dict[str, Any]] = json.loads(text)
        seconds = {(test["n_prompt"], test["n_gen"]): test["avg_ns"] / 1e9 for test in tests}
        both, prompt, output = seconds[lengths], seconds[lengths[0], 0], seconds[0, lengths[1]]
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError(f"llama-bench's output has another form: {text[:MAX_ERROR_CHARS]}") from error
    per_token = output / workload.output_tokens
    return Figures(
        seconds=both,
        output_tokens_per_second=workload.output_tokens / both,
        ttft=prompt,
        itl=per_token,
        tpot=per_token,
    )
