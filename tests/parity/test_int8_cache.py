"""With a KV cache of int8 the embedded SmolLM2 says nearly what it says with one of bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miniserve import LLM
from miniserve.attention.batch import AttnMetadata
from miniserve.attention.native import NativeBackend
from miniserve.runner.kv_cache import allocate_kv_cache
from miniserve.runner.model_runner import ModelRunner

TEXT = """The ferry to the island leaves at seven in the morning, and nobody on board expects to be back
before dark. There are bakers with trays of bread, two teachers, a vet who keeps a goat in the back
of her van, and once a month the man who reads the water meters. The crossing takes forty minutes
when the sea is calm. In winter it can take twice as long, and then the captain, who has done this
for thirty-one years, sings to himself so that the passengers know he is not worried.

On the island there is one road. It begins at the harbour, passes the school, the church and the
shop, and ends at the lighthouse, 4.2 kilometres away. def distance(a, b): return abs(a - b) is
written in chalk on the wall of the school, because the older children are learning to program: 1,
1, 2, 3, 5, 8, 13, 21, 34 and so on. Q: What do you call a number that can only be divided by one
and by itself? A: A prime number. The vet says that goats do not care about such things.

When the last ferry has gone, the island is quiet. The shop closes at six, the lamp of the
lighthouse begins to turn, and from the kitchen windows comes the smell of fish soup with potatoes,
leeks and a little saffron."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="bf16", device="cpu", max_model_len=512, kernels="native")


def logits(llm: LLM, cache_dtype: torch.dtype, *, chunk: int) -> Tensor:
    """fp32 [num_tokens, vocab_size] of TEXT, of which `chunk` tokens are computed a step."""
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    config = runner.model.config
    backend = NativeBackend(torch.bfloat16, runner.backend.kernels, cache_dtype)
    token_ids = torch.tensor(llm.parts.input_processor.tokenizer.encode(TEXT, add_special_tokens=True))
    num_blocks = -(-len(token_ids) // 32)
    caches = allocate_kv_cache(config, backend, num_blocks=num_blocks, block_size=32, device=torch.device("cpu"))
    rows = []
    for start in range(0, len(token_ids), chunk):
        positions = torch.arange(len(token_ids))[start : start + chunk]
        end = start + len(positions)
        metadata = AttnMetadata(
            slot_mapping=positions,
            query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.arange(num_blocks)[None],
            query_lens_host=(len(positions),),
            seq_lens_host=(end,),
            block_size=32,
        )
        rows.append(runner.model(token_ids[positions], positions, backend.plan(metadata), caches))
    return runner.model.logits(torch.cat(rows))


@torch.inference_mode()
def test_divergence(llm: LLM) -> None:
    """0.0010 nats on average when this was written, 97 % of the likeliest tokens the same. Chunks change nothing."""
    plain, int8 = (logits(llm, dtype, chunk=512).log_softmax(dim=-1) for dtype in (torch.bfloat16, torch.int8))
    divergence = (plain.exp() * (plain - int8)).sum(dim=-1)
    assert divergence.mean() < 0.002
    assert (plain.argmax(dim=-1) == int8.argmax(dim=-1)).float().mean() > 0.95
    assert torch.equal(logits(llm, torch.int8, chunk=50).log_softmax(dim=-1), int8)
