"""One compiler of the embedded model's vocabulary for all tests here: it takes a moment to build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miniserve.structured.compiler import GrammarCompiler
from miniserve.text.tokenizer import Tokenizer
from tests.structured.grammars import END_IDS, Model
from tests.support import embedded_gguf


@pytest.fixture(scope="session")
def model() -> Iterator[Model]:
    tokenizer = Tokenizer.from_gguf(embedded_gguf())
    compiler = GrammarCompiler(tokenizer, num_token_ids=tokenizer.num_token_ids, eos_token_ids=END_IDS)
    yield Model(tokenizer, compiler)
    compiler.close()
