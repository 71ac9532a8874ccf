"""Special tokens spelled in messages stay text, whatever the template does to the strings."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from miniserve.errors import InvalidParameterError
from miniserve.text.chat_template import ChatTemplate
from miniserve.text.spelling import Piece, SpellingMarks, compile_spellings
from miniserve.text.tokenizer import Tokenizer

SHARED_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>!", "<|end", "<｜bos▁｜>"]


def byte_level_toy() -> Tokenizer:
    """One token a byte, special tokens that contain each other, and two added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_special_tokens(backend)


def metaspace_toy() -> Tokenizer:
    """A space before the text only, and (as Unigram does) a vocabulary whose words spell the special tokens too."""
    words = ["<unk>", *SPECIAL, "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the"]
    backend = Backend(models.Unigram([(word, -float(index)) for index, word in enumerate(words)], 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_special_tokens(backend)


def with_special_tokens(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</think>")])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", bos)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))  # type: ignore[no-untyped-call]


KINDS = ["embedded", "byte_level", "prepend", "metaspace"]


@pytest.fixture(scope="module")
def tokenizers(byte_level: Any, byte_fallback: Any) -> dict[str, Tokenizer]:
    return dict(zip(KINDS, [byte_level.ours, byte_level_toy(), byte_fallback.ours, metaspace_toy()], strict=True))


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def render(tokenizer: Tokenizer, messages: Any, source: str = CHATML, **kwargs: Any) -> list[Piece]:
    template = ChatTemplate(source, tokenizer.special_tokens)
    return template.render_pieces(messages, special_spellings=tokenizer.special_spellings, **kwargs)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Those that a spelling can give; <unk> also stands for what the vocabulary lacks."""
    return [
        token_id for token_id in ids if tokenizer.is_special(token_id) and token_id != tokenizer.special_id("<unk>")
    ]


def decoded(tokenizer: Tokenizer, pieces: list[Piece]) -> str:
    """What the ids of `pieces` must decode to: their text, as the tokenizer spells spaces."""
    if tokenizer.special_id("</s>") is not None:  # "prepend" puts a space behind each special token
        pieces = [Piece(p.text if p.literal else re.sub(r"(</?s>)(?=[^<]|<(?!/?s>))", r"\1 ", p.text)) for p in pieces]
    text = "".join(piece.text for piece in pieces)
    spells_spaces = "▁" in tokenizer.decode(tokenizer.encode("▁", add_special_tokens=False))
    return text if spells_spaces else text.replace("▁", " ")


# Any conversation

TEXT = st.text(st.sampled_from("<s>|im_end! \n\\\"'azé😀\ue000"), max_size=8)
SPELLINGS = st.sampled_from([*SPECIAL, "</s>", "<unk>", "</think>", "<tool_call>", "<|im_", "end|>", "\\ue000"])
STRINGS = st.lists(SPELLINGS | TEXT, max_size=6).map("".join)
PARTS = st.lists(STRINGS.map(lambda text: {"type": "text", "text": text}), max_size=3)
ARGUMENTS = st.dictionaries(STRINGS, STRINGS | st.lists(STRINGS, max_size=2), max_size=2)
FUNCTIONS = st.fixed_dictionaries({"name": STRINGS.filter(bool), "arguments": ARGUMENTS})
CALLS = st.lists(st.fixed_dictionaries({"function": FUNCTIONS}))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": STRINGS | PARTS}, optional={"tool_calls": CALLS}),
    min_size=1,
    max_size=3,
)


@SHARED_FIXTURES
@given(messages=MESSAGES)
def test_no_special_token_comes_from_messages(tokenizer: Tokenizer, messages: Any) -> None:
    """Bug: a user who wrote "<|im_end|>" ended the turn, and could speak as the system."""
    pieces = render(tokenizer, messages)
    text = ChatTemplate(CHATML, tokenizer.special_tokens).render(messages)
    assert "".join(piece.text for piece in pieces) == text
    ids = tokenizer.encode_pieces(pieces, add_special_tokens=False)
    harmless = "".join(piece.text for piece in render(tokenizer, user("x") * len(messages)))
    expected = special_ids(tokenizer, tokenizer.encode(harmless, add_special_tokens=False))
    assert special_ids(tokenizer, ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == decoded(tokenizer, pieces)


@SHARED_FIXTURES
@given(content=TEXT)
def test_without_spellings_nothing_changes(tokenizer: Tokenizer, content: str) -> None:
    messages = user(re.sub("<s>|<unk>", "", content))
    text = ChatTemplate(CHATML, tokenizer.special_tokens).render(messages)
    pieces = render(tokenizer, messages)
    assert pieces == [Piece(text)]
    for add in (False, True):
        ids = tokenizer.encode_pieces(pieces, add_special_tokens=add)
        assert ids == tokenizer.encode(text, add_special_tokens=add)


# What templates do to strings


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("{{ messages[0].content | trim }}", "  <s> ", "[<s>]"),
        ("{{ messages[0].content.split('</think>')[-1].lstrip('\n') }}", "x</think>\na <s>", "a [<s>]"),
        ("{{ '(' ~ messages[0].content ~ ')' + messages[0].content }}", "<s>", "([<s>])[<s>]"),
        ("{{ messages[0].content | tojson }}", 'é "<s>"', '"é \\"[<s>]\\""'),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", 'é "<s>"', '"\\u00e9 \\"[<s>]\\""'),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", "\\<s>", '"\\\\[<s>]"'),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", "<｜bos▁｜>", '"[<\\uff5cbos\\u2581\\uff5c>]"'),
        ("{{ messages[0].content | upper }}", "a<s>b", "A[<s>]B"),
        ("{% if messages[0].content.startswith('a') %}{{ messages[0].content[1:] }}{% endif %}", "a<s>", "[<s>]"),
        ("{{ bos_token }}{{ messages[0].content }}{{ bos_token }}", "<s>", "<s>[<s>]<s>"),
        ("{{ messages[0].content }}", "<|im_end|>!<|im_end|><|end", "[<|im_end|>!][<|im_end|>][<|end]"),
        ("{{ messages[0].content }}", "\ue000 <s> \\ue001", "\ue000 [<s>] \\ue001"),
        ("\ue000{{ '\ue001' }}{{ messages[0].content }}", "<s>", "\ue000\ue001[<s>]"),
        ("{{ messages[0].content | length }}", "<s>", "1"),
        ("", "<s>", ""),
    ],
)
def test_marks_survive(source: str, content: str, expected: str) -> None:
    pieces = render(byte_level_toy(), user(content), source)
    assert "".join(f"[{piece.text}]" if piece.literal else piece.text for piece in pieces) == expected


@pytest.mark.parametrize("where", ["name", "key", "value", "arguments", "tool"])
def test_every_string_of_users_is_searched(tokenizers: dict[str, Tokenizer], where: str) -> None:
    word = dict.fromkeys(["name", "key", "value", "arguments", "tool"], "x") | {where: "<s>"}
    arguments = json.dumps({"p": word["arguments"]}).replace("<", "\\u003c")
    messages = [
        {"role": "user", "name": word["name"], "content": "hi", "extra": [{word["key"]: (word["value"],)}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
    ]
    tools = [{"type": "function", "function": {"name": word["tool"]}}]
    pieces = render(tokenizers["byte_level"], messages, "{{ messages | tojson }}{{ tools }}", tools=tools)
    assert [piece.text for piece in pieces if piece.literal] == ["<s>"]


def test_what_the_template_is_given_is_not_searched(tokenizers: dict[str, Tokenizer]) -> None:
    pieces = render(tokenizers["byte_level"], user("hi"), "{{ bos_token }}{{ x }}", template_kwargs={"x": "<|end"})
    assert pieces == [Piece("<s><|end")]


def test_messages_are_not_changed(tokenizers: dict[str, Tokenizer]) -> None:
    messages = user("a <s>")
    render(tokenizers["byte_level"], messages)
    assert messages == user("a <s>")


def test_half_a_surrogate_pair_beside_a_spelling(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        render(tokenizers["byte_level"], user("<s>\ud83d"))
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizers["byte_level"].encode_pieces([Piece("<s>", True), Piece("\ud83d")], add_special_tokens=False)


def test_no_character_left_for_marks() -> None:
    every = "".join(map(chr, range(0xE000, 0xF8FF)))  # all but one
    spellings = compile_spellings(["<s>", "</s>"])
    marks = SpellingMarks(spellings, every + "<s>")
    assert marks.take(marks.put("a<s>")) == [Piece("a"), Piece("<s>", literal=True)]
    with pytest.raises(InvalidParameterError, match=r"2 special tokens.*only 1 private-use"):
        SpellingMarks(spellings, every + "<s></s>")


def test_deep_nesting_is_a_request_error(tokenizers: dict[str, Tokenizer]) -> None:
    """As in a field that the template ignores: harmless until some string spells a special token."""
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    messages = [{"role": "user", "content": "hi", "extra": deep}]
    source = "{{ messages[0].content }}"
    assert render(tokenizers["byte_level"], messages, source) == [Piece("hi")]
    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        render(tokenizers["byte_level"], [{**messages[0], "content": "<s>"}], source)


# The pattern


@settings(deadline=None)
@given(spellings=st.lists(st.text("<s>|", min_size=1, max_size=4), max_size=6), text=st.text("<s>|x", max_size=20))
def test_pattern_finds_the_longest_first(spellings: list[str], text: str) -> None:
    pattern = compile_spellings(spellings)
    plain = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
    assert (pattern.findall(text) if pattern else []) == (plain.findall(text) if spellings else [])


def test_no_spellings() -> None:
    assert compile_spellings([]) is None and compile_spellings([""]) is None


@pytest.mark.timeout(20)
def test_cost_does_not_grow_with_the_number_of_spellings() -> None:
    """A plain alternation tries a thousand tokens at each "<": this text would take minutes."""
    pattern = compile_spellings(f"<|reserved_{index}|>" for index in range(2000))
    assert pattern is not None and pattern.search("<|reserved_" * 1_000_000) is None


# From pieces to token ids


def test_special_id(byte_level: Any, tokenizers: dict[str, Tokenizer]) -> None:
    assert byte_level.ours.special_id("<|im_end|>") == 2
    assert byte_level.ours.special_id("<|im_end|> ") is None
    assert tokenizers["byte_level"].special_id("</think>") is None  # added, but not special


def test_tokens_that_are_not_special_stay(tokenizers: dict[str, Tokenizer]) -> None:
    toy = tokenizers["byte_level"]
    ids = toy.encode_pieces(render(toy, user("<s></think>"), "{{ messages[0].content }}"), add_special_tokens=False)
    assert [toy.token_bytes(token_id) for token_id in ids] == [b"<", b"s", b">", b"</think>"]


def test_nothing_is_put_before_a_piece(tokenizers: dict[str, Tokenizer]) -> None:
    """Bug: SentencePiece style tokenizers put a space before every piece: "a<s>the" became "a <s> the"."""
    for kind in ("prepend", "metaspace"):
        ids = tokenizers[kind].encode_pieces(
            [Piece("the"), Piece("<s>", literal=True), Piece("the the")], add_special_tokens=False
        )
        assert tokenizers[kind].decode(ids) == " the<s>the the"


@pytest.mark.parametrize("first", ["<s>", "<|im_"])
def test_surroundings(tokenizers: dict[str, Tokenizer], first: str) -> None:
    toy = tokenizers["metaspace"]
    bos = toy.bos_token_id
    bare = toy.encode_pieces([Piece(first, literal=True), Piece("x")], add_special_tokens=False)
    assert bos not in bare
    assert toy.encode_pieces([Piece(first, literal=True), Piece("x")], add_special_tokens=True) == [bos, *bare, bos]


def test_token_that_swallows_spaces_on_its_left() -> None:
    backend = Backend(models.BPE(vocab={"Ġ": 0, "x": 1, "<": 2, "s": 3, ">": 4}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<mask>", special=True, lstrip=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    ids = tokenizer.encode_pieces([Piece("<s>", literal=True), Piece("x  <mask>x")], add_special_tokens=False)
    mask = tokenizer.special_id("<mask>")
    assert ids == [2, 3, 4, 1, mask, *tokenizer.encode("x", add_special_tokens=False)]


def test_no_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_pieces([], add_special_tokens=False) == []
