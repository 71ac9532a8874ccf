"""A step on Apple's GPUs uses no operator that torch does not have there. Checked without one, in torch's own list.

The operators of a step are noted down on the CPU, with PyTorch's kernels: what MPS runs is the same code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen  # type: ignore[import-untyped]
import yaml  # type: ignore[import-untyped]
from torch.utils._python_dispatch import TorchDispatchMode

from miniserve import LLM, SamplingParams
from tests.support import FAMILIES, random_prompt, tiny_model

# What torch's list says of MPS, or of every device.
_EVERYWHERE = (
    "MPS",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
# The CPU's own way to attend, which MPS does not take: there it is `_scaled_dot_product_attention_math_for_mps`.
_ONLY_ON_CPUS = {"_scaled_dot_product_flash_attention_for_cpu"}
SAMPLING = [
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {65: 2.0}},
]


def operators_on_mps() -> set[str]:
    """The names of torch's operators that it has on MPS."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    functions = {entry["func"].partition("(")[0]: entry for entry in yaml.safe_load(path.read_text())}

    def is_there(name: str) -> bool:
        entry = functions[name]
        if "structured_delegate" in entry:
            return is_there(entry["structured_delegate"])
        keys = ",".join(entry.get("dispatch", {"CompositeImplicitAutograd": ""})).replace(" ", "").split(",")
        return any(key in _EVERYWHERE for key in keys)

    return {name for name in functions if is_there(name)}


class Notes(TorchDispatchMode):
    """Notes the operators that are called, and floats that are too long for MPS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.add(func.name().removeprefix("aten::"))
        result = func(*args, **(kwargs or {}))
        self.dtypes.update(value.dtype for value in (*args, result) if isinstance(value, torch.Tensor))
        return result


def test_the_list_knows_what_is_missing() -> None:
    """Guard: an operator that MPS does not have."""
    there = operators_on_mps()
    assert "mm" in there and "index_copy_" in there
    assert "mode" not in there and "embedding_renorm_" not in there


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_operators_of_a_step(family: str, backend: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, family)
    llm = LLM(
        str(tmp_path), dtype="fp16", device="cpu", threads=1, kernels="torch", attention_backend=backend, block_size=16
    )
    requests = llm.prompt_requests(
        [random_prompt(5 + 9 * index, index) for index in range(4)],
        [SamplingParams(max_tokens=4, ignore_eos=True, **options) for options in SAMPLING],  # type: ignore[arg-type]
    )
    with Notes() as notes:
        llm.run(requests)
    assert len(notes.operators) > 20
    missing = notes.operators - operators_on_mps() - _ONLY_ON_CPUS
    assert not missing
    assert torch.float64 not in notes.dtypes
