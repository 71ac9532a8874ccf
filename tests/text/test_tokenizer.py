"""The tokenizer against transformers' own, and what it refuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from miniserve.text.tokenizer import Tokenizer
from tests.text.conftest import ANY_TEXT

SHARED_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces, a\ttab\r\nand\n\n\nlines ",
    "Привет, мир! Їжак і ґанок",
    "日本語のテキスト、한국어, 中文",
    "emoji 😀🎉 flags 🇺🇦🇯🇵 keycap 1️⃣",
    "family 👩‍👩‍👧‍👦 and skin 👍🏽",
    "combining e\u0301 n\u0303 ก็ ZWJ क्‍ष",
    "rare 𠀀 𝔘𝔫𝔦 \x00\x7f\x85\xa0\xad\ufeff",
    "a literal \ufffd in the text",
    "<0x41> is not a byte",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip_as_transformers(byte_level: Any, text: str) -> None:
    ids = byte_level.ours.encode(text, add_special_tokens=False)
    assert ids == byte_level.reference.encode(text, add_special_tokens=False)
    assert byte_level.ours.decode(ids) == text
    assert byte_level.reference.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_round_trip_keeps_the_leading_space(byte_fallback: Any, text: str) -> None:
    """The reference strips the space before the first word; in the middle of an answer that space is text."""
    ids = byte_fallback.ours.encode(text, add_special_tokens=False)
    assert ids == byte_fallback.reference.encode(text, add_special_tokens=False)
    assert byte_fallback.ours.decode(ids) == (" " + text if text else "")
    assert byte_fallback.reference.decode(ids, clean_up_tokenization_spaces=False) == text


@SHARED_FIXTURES
@given(text=ANY_TEXT)
def test_any_text_round_trips(byte_level: Any, byte_fallback: Any, text: str) -> None:
    ids = byte_level.ours.encode(text, add_special_tokens=False)
    assert byte_level.ours.decode(ids, skip_special_tokens=False) == text
    ids = byte_fallback.ours.encode(text, add_special_tokens=False)
    expected = " " + text.replace("▁", " ") if text else ""
    assert byte_fallback.ours.decode(ids, skip_special_tokens=False) == expected


@SHARED_FIXTURES
@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_any_ids_decode_as_transformers(byte_level: Any, ids: list[int], skip: bool) -> None:
    """Broken UTF-8 included: each maximal broken piece is one U+FFFD, in both."""
    reference = byte_level.reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert byte_level.ours.decode(ids, skip_special_tokens=skip) == reference


def test_every_token_decodes_as_transformers(byte_level: Any) -> None:
    backend = byte_level.reference.backend_tokenizer
    wrong = [
        token_id
        for token_id in range(byte_level.ours.vocab_size)
        if byte_level.ours.decode([token_id], skip_special_tokens=False)
        != backend.decode([token_id], skip_special_tokens=False)
    ]
    assert wrong == []


def test_token_bytes_are_text_not_byte_letters(byte_level: Any) -> None:
    """Bug: logprobs showed the tokens of non-English text in the byte alphabet ("ä½ł" for "你")."""
    ids = byte_level.ours.encode("你好", add_special_tokens=False)
    assert b"".join(byte_level.ours.token_bytes(token_id) for token_id in ids) == "你好".encode()
    assert byte_level.ours.token_bytes(byte_level.ours.encode(" is", add_special_tokens=False)[0]) == b" is"


def test_special_tokens(byte_level: Any) -> None:
    ours = byte_level.ours
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, 49152)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    assert ours.token_bytes(2) == b"<|im_end|>"
    assert ours.is_special(2) and not ours.is_special(100)
    assert ours.encode("hi<|im_end|>", add_special_tokens=False)[-1] == 2
    assert ours.decode([2]) == ""
    assert ours.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_id_outside_the_vocabulary_is_no_text(pair: Any) -> None:
    """Models pad their vocabulary: a random one samples such ids."""
    outside = [pair.ours.vocab_size, 10**9, 2**40, -1]
    assert pair.ours.decode(outside) == ""
    assert [pair.ours.token_bytes(token_id) for token_id in outside] == [b""] * 4
    assert not any(pair.ours.is_special(token_id) for token_id in outside)


def test_bos_is_added_only_on_request(byte_fallback: Any) -> None:
    assert byte_fallback.ours.encode("the", add_special_tokens=True)[0] == byte_fallback.ours.bos_token_id
    assert byte_fallback.ours.bos_token_id not in byte_fallback.ours.encode("the", add_special_tokens=False)


@pytest.mark.parametrize(("token", "expected"), [("<think>", "<think>"), ("lit▁eral", "lit▁eral"), ("▁▁", "  ")])
def test_added_tokens_are_literal_unless_the_vocabulary_spells_them(
    byte_fallback: Any, token: str, expected: str
) -> None:
    token_id = byte_fallback.reference.convert_tokens_to_ids(token)
    assert byte_fallback.ours.decode([token_id]) == expected


def test_byte_level_added_token_is_literal() -> None:
    """Bug: an added "é" was read in the byte alphabet, where é stands for the byte E9, and became U+FFFD."""
    backend = byte_alphabet_backend()
    backend.add_tokens([AddedToken("café é", normalized=False)])
    tokenizer = wrap(backend)
    assert tokenizer.decode(tokenizer.encode("café é", add_special_tokens=False)) == "café é"


@pytest.mark.parametrize("text", ["emoji \ud83d", "\udcf0", "a\ud83d\ud83d"])
def test_half_a_surrogate_pair_is_refused(byte_level: Any, text: str) -> None:
    """Bug: a prompt with half a surrogate pair leaked the tokenizer library's TypeError as a 500."""
    with pytest.raises(InvalidParameterError, match="surrogate") as caught:
        byte_level.ours.encode(text, add_special_tokens=True)
    assert caught.value.param == "prompt"


def test_truncation_of_the_file_does_not_cut_prompts() -> None:
    """Bug: a tokenizer.json saved after training with max_length truncated every prompt without a word."""
    backend = byte_alphabet_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    tokenizer = wrap(backend)
    assert tokenizer.decode(tokenizer.encode("longer than four", add_special_tokens=True)) == "longer than four"


@pytest.mark.parametrize(("decoder", "name"), [(decoders.WordPiece(), "WordPiece"), (None, "missing")])
def test_unknown_decoder_is_refused_by_name(decoder: Any, name: str) -> None:
    backend = byte_alphabet_backend()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=name):
        wrap(backend)


def test_metaspace_decoder() -> None:
    backend = Backend(models.BPE(vocab={"▁a": 0, "b": 1, "<0x41>": 2}, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = wrap(backend)
    # No ByteFallback in the decoder: "<0x41>" is what it looks like.
    assert tokenizer.decode([0, 1, 2]) == " ab<0x41>"


# Literal text, and tokens by their name


def test_literal_text_has_no_special_token(pair: Any) -> None:
    """Whatever it spells; and it says exactly that."""
    special = max(pair.ours.special_tokens.values(), key=len)
    for text in ("the literal", f"a{special}b", special, " ", "\n\n", "é😀"):
        token_ids = pair.ours.encode_literal(text)
        assert not any(pair.ours.is_special(token_id) for token_id in token_ids)
        assert pair.ours.decode_bytes(token_ids, skip_special_tokens=False).decode() == text
    assert pair.ours.encode_literal("") == []


def test_literal_text_is_in_the_middle_of_a_text(byte_fallback: Any) -> None:
    """No BOS, no space in front, and the tokens that the model would expect there."""
    assert byte_fallback.ours.encode_literal("the") != byte_fallback.ours.encode_literal(" the")
    assert len(byte_fallback.ours.encode_literal(" the")) == 1
    assert byte_fallback.ours.encode_literal("<think>") != [byte_fallback.ours.added_id("<think>")]


def test_added_tokens_by_their_spelling(pair: Any) -> None:
    backend = pair.reference.backend_tokenizer
    for token_id, token in backend.get_added_tokens_decoder().items():
        assert pair.ours.added_id(token.content) == token_id
        assert pair.ours.special_id(token.content) == (token_id if token.special else None)
    for text in ("", "the", "e", "<think", "<think> "):
        assert pair.ours.added_id(text) is None


# Loading


@pytest.mark.parametrize("data", [b"<think>\n", b"\xb7\n", "\u25c1think".encode(), b"", b"<|im_start|>"])
def test_the_tokens_that_begin_a_text(pair: Any, data: bytes) -> None:
    tokenizer = pair.ours
    shown = {tokenizer.token_bytes(i) for i in range(tokenizer.num_token_ids) if not tokenizer.is_special(i)} - {b""}
    found = [tokenizer.token_bytes(token_id) for token_id in tokenizer.beginnings_of(data)]
    assert sorted(found) == sorted(part for part in shown if data.startswith(part))


def test_folder_loads_without_network(byte_fallback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_fallback.reference.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    calls: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: calls.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: calls.append(args))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert calls == []
    assert tokenizer.chat_template == "{{ bos_token }}"
    assert (tokenizer.special_tokens["bos_token"], tokenizer.eos_token_id) == ("<s>", 2)
    ids = tokenizer.encode("the тест", add_special_tokens=True)
    assert ids == byte_fallback.ours.encode("the тест", add_special_tokens=True)


def test_default_of_several_chat_templates(byte_fallback: Any, tmp_path: Path) -> None:
    byte_fallback.reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).chat_template == "D"


def test_gguf_ignores_the_files_beside_it(embedded_gguf: Path, byte_fallback: Any, tmp_path: Path) -> None:
    """Bug: another model's tokenizer.json in the same download folder was used for the GGUF."""
    byte_fallback.reference.save_pretrained(tmp_path)
    (tmp_path / "model.gguf").symlink_to(embedded_gguf)
    tokenizer = Tokenizer.from_gguf(tmp_path / "model.gguf")
    assert tokenizer.vocab_size == 49152
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*--tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        Tokenizer.from_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 1}', "[]"])
def test_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_damaged_gguf_is_named(tmp_path: Path, embedded_gguf: Path) -> None:
    for name, data in {
        "empty": b"",
        "text": b"no gguf",
        "cut": embedded_gguf.open("rb").read(100_000),
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{name}\.gguf cannot be read"):
            Tokenizer.from_gguf(path)


def test_import_is_cheap() -> None:
    code = (
        "import sys, miniserve.text.detokenizer, miniserve.text.stop, miniserve.text.chat_template\n"
        "print(*({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]


def byte_alphabet_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
