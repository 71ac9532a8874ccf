"""miniserve: an LLM inference server to read, to watch and to trust.

`from miniserve import LLM, SamplingParams` is the offline twin of the server. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from miniserve.engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from miniserve.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'miniserve' has no attribute {name!r}")
