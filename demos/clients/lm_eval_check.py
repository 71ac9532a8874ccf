"""lm-evaluation-harness against a running server, and against transformers on the same weights, compared.

What to look at: the largest difference of two loglikelihoods. The server has to compute in fp32 as transformers does
here: start it with `--dtype float32`. Nothing is downloaded: the documents lie beside this file, the weights are the
server's GGUF file.

    uv run main.py serve --model smollm2 --dtype float32
    uv run --with "lm-eval[api]" demos/clients/lm_eval_check.py [base-url] [model] [file.gguf]
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before the libraries are imported

import lm_eval
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoTokenizer

from miniserve.models.checkpoint import locate_tokenizer

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
WEIGHTS = Path(sys.argv[3]) if len(sys.argv) > 3 else locate_tokenizer(MODEL)
TOLERANCE = 1e-3
TASK = {
    "task": "documents",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path(__file__).with_name("lm_eval_documents.jsonl"))}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def main() -> None:
    """Evaluate both, and compare every loglikelihood."""
    print(f"lm-eval {version('lm-eval')}, {BASE_URL}, {WEIGHTS.name}")
    with tempfile.TemporaryDirectory() as tokenizer:
        AutoTokenizer.from_pretrained(str(WEIGHTS.parent), gguf_file=WEIGHTS.name).save_pretrained(tokenizer)
        theirs = loglikelihoods(
            HFLM(str(WEIGHTS.parent), gguf_file=WEIGHTS.name, tokenizer=tokenizer, dtype="float32", device="cpu")
        )
        url = f"{BASE_URL}/completions"
        ours = loglikelihoods(
            LocalCompletionsAPI(
                model=MODEL, base_url=url, tokenizer=tokenizer, tokenizer_backend="huggingface", batch_size=4
            )
        )
    for (choice, expected, _), (_, got, _) in zip(theirs, ours, strict=True):
        print(f"  {choice!r:40} hf {expected:10.5f}  server {got:10.5f}")
    largest = max(abs(expected - got) for (_, expected, _), (_, got, _) in zip(theirs, ours, strict=True))
    print(f"  {len(ours)} loglikelihoods, largest difference {largest:.1e}")
    same_greedy = [greedy for _, _, greedy in theirs] == [greedy for _, _, greedy in ours]
    assert same_greedy, "which choices are greedy differs"
    assert largest <= TOLERANCE, f"the loglikelihoods differ by more than {TOLERANCE}"


def loglikelihoods(model: LM) -> list[tuple[str, float, bool]]:
    """(choice, its loglikelihood, whether greedy decoding gives it) of every choice of every document."""
    results = lm_eval.simple_evaluate(model, tasks=[TASK], bootstrap_iters=0)
    samples = sorted(results["samples"]["documents"], key=lambda sample: sample["doc_id"])
    return [
        (choice, float(loglikelihood), greedy)
        for sample in samples
        for choice, [(loglikelihood, greedy)] in zip(sample["doc"]["choices"], sample["resps"], strict=True)
    ]


if __name__ == "__main__":
    main()
