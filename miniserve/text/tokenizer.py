"""Text to token ids and back. Owns what each token id stands for, as bytes.

Text is assembled from the true bytes of its tokens, not by asking the tokenizer library to decode windows
of them: `decode(ids)` is the UTF-8 of the joined bytes, so it does not depend on how the ids are cut into
pieces. A character may be spread over several tokens: a single token has bytes, but not always text.
Nothing is trimmed or tidied: the leading space of a SentencePiece token belongs to the text, because the
text continues a prompt.

Does not know chat messages, requests or the model: an id may lie outside the vocabulary (models pad theirs).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniserve.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from miniserve.panics import panics_as_errors
from miniserve.text.spelling import Piece, compile_spellings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

# One text at a time gains nothing from the library's own threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SENTENCEPIECE_SPACE = "\u2581"  # the visible stand-in for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte that no other token covers
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MOST_SHORTENED = 4  # how much a normaliser (NFC, stripping) may shorten a text, generously


class Tokenizer:
    """A `tokenizers` tokenizer with the special tokens and the chat template that came with it.

    Attributes:
        vocab_size: number of tokens, the added ones included.
        num_token_ids: one more than the largest id.
        bos_token_id, eos_token_id: None where the tokenizer has none.
        special_tokens: spelling of the named special tokens (bos_token, eos_token, ...), for chat templates.
        special_spellings: finds the longest special token spelled at a place in a text; None without such tokens.
        chat_template: Jinja source, or None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        # A tokenizer file may carry the truncation it was trained with: that would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        self._backend = backend
        self._bytes = _token_bytes(backend.get_vocab(with_added_tokens=False), added, _spelling(decoder))
        self._plain = _plain_backend(backend)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._ids_of_special = {added[token_id].content: token_id for token_id in sorted(self._special_ids)}
        self._ids_of_added = {added[token_id].content: token_id for token_id in sorted(added)}
        self._added_spellings = compile_spellings(token.content for token in added.values())
        self._lstrip = frozenset(token.content for token in added.values() if token.lstrip)
        self.vocab_size = len(self._bytes)
        self.num_token_ids = max(self._bytes, default=-1) + 1
        self._longest_token = max(map(len, self._bytes.values()), default=1)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.special_tokens = _named_special_tokens(tokenizer)
        self.special_spellings = compile_spellings(self._ids_of_special)
        self.chat_template = _chat_template(tokenizer.chat_template)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder. Never asks the network.

        Raises:
            CheckpointError: there is none, or it is damaged.
            UnsupportedModelError: its tokens cannot be mapped to bytes.
        """
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(
                f"{path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there; "
                "copy the model's tokenizer files into it, or name a folder that has them with --tokenizer"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # tokenizer.json is complete in itself; without it, only the model's own class knows how to build one.
        complete = (path / "tokenizer.json").is_file()
        load = PreTrainedTokenizerFast.from_pretrained if complete else AutoTokenizer.from_pretrained
        return cls(_load(path, partial(load, str(path), local_files_only=True)))

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """Read the tokenizer inside a GGUF file; files beside it do not matter. Raises as `from_folder`."""
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file; name a .gguf file that is there")
        from transformers import PreTrainedTokenizerFast

        # `from_pretrained` would prefer a tokenizer.json that happens to lie in the same folder.
        load = partial(
            PreTrainedTokenizerFast,
            name_or_path=str(path.parent),
            gguf_file=path.name,
            local_files_only=True,
        )
        return cls(_load(path, load))

    @panics_as_errors
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it become special tokens.

        `add_special_tokens` puts BOS and the like around it, as the tokenizer says: right for a bare prompt,
        wrong for a rendered chat template, which writes its own.

        Raises:
            InvalidParameterError: `text` has half a surrogate pair, which no encoding can carry.
        """
        require_encodable(text, param="prompt")
        return _encode(self._backend, text, add_special_tokens=add_special_tokens)

    @panics_as_errors
    def encode_pieces(self, pieces: Sequence[Piece], *, add_special_tokens: bool) -> list[int]:
        """Token ids of the joined pieces, as `encode`, except that no special token is found in a literal piece.

        A piece tokenises as it would in the middle of a text: SentencePiece style puts no space before it.
        """
        if not any(piece.literal for piece in pieces):
            return self.encode("".join(piece.text for piece in pieces), add_special_tokens=add_special_tokens)
        text = "".join(piece.text for piece in pieces)
        require_encodable(text, param="prompt")
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if piece.literal:
                ids += self.encode_literal(piece.text)
            elif index == 0:
                ids += _encode(self._backend, piece.text)
            else:
                ids += self._encode_continued(piece.text)
        before, after = self._surroundings(text) if add_special_tokens else ([], [])
        return before + ids + after

    @panics_as_errors
    def encode_literal(self, text: str) -> list[int]:
        """Token ids of `text` in the middle of a text, none of them special, whatever it spells."""
        ids = _encode(self._plain, text)
        if len(text) == 1 or self._special_ids.isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) spell special tokens too: in parts they cannot match.
        return self.encode_literal(text[:1]) + self.encode_literal(text[1:])

    def _encode_continued(self, text: str) -> list[int]:
        """Behind a literal piece: up to the next added token as plain text, from there on as always."""
        match = self._added_spellings.search(text) if self._added_spellings else None
        start = match.start() if match else len(text)
        if match and match[0] in self._lstrip:
            start = len(text[:start].rstrip())
        return _encode(self._plain, text[:start]) + _encode(self._backend, text[start:])

    def _surroundings(self, text: str) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after `text`."""
        [whole] = self._backend.encode_batch([text], add_special_tokens=True)
        own = [place for place, sequence in enumerate(whole.sequence_ids) if sequence is not None]
        return (whole.ids[: own[0]], whole.ids[own[-1] + 1 :]) if own else (whole.ids, [])

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(token_ids, skip_special_tokens=skip_special_tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """Joined bytes of `token_ids`."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self._bytes.get(token_id, b"") for token_id in token_ids if token_id not in skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token: of a special token its spelling, of an id outside the vocabulary none."""
        return self._bytes.get(token_id, b"")

    def beginnings_of(self, data: bytes) -> tuple[int, ...]:
        """The tokens, special ones aside, that are shown as a beginning of `data`, or as all of it."""
        parts = (data[:length] for length in range(1, len(data) + 1))
        return tuple(token_id for part in parts if (token_id := self._ids_of_bytes.get(part)) is not None)

    @cached_property
    def _ids_of_bytes(self) -> dict[bytes, int]:
        """One token for each; of several, the last, which is none of SentencePiece's single bytes."""
        return {data: token_id for token_id, data in self._bytes.items() if token_id not in self._special_ids}

    def min_num_tokens(self, num_characters: int) -> int:
        """A text of this length has at least as many tokens: a bound that needs no tokenising."""
        return num_characters // (_MOST_SHORTENED * self._longest_token)

    def special_id(self, text: str) -> int | None:
        """The special token that is spelled exactly so; None if there is none."""
        return self._ids_of_special.get(text)

    def added_id(self, text: str) -> int | None:
        """The added token, special or not, that is spelled exactly so; None if there is none."""
        return self._ids_of_added.get(text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token rather than text."""
        return token_id in self._special_ids


def require_encodable(text: str, *, param: str) -> None:
    """Refuse text with half a surrogate pair, as JSON's \\ud83d may smuggle in, naming the request field."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{param} is not valid Unicode: half a surrogate pair, \\u{ord(text[error.start]):04x}, "
            f"at character {error.start}; send both halves or leave it out",
            param=param,
        ) from error


def _load(path: Path, load: Callable[[], object]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = load()
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise TypeError(f"{type(tokenizer).__name__} has no tokenizer.json form")
        return tokenizer
    except Exception as error:  # the libraries raise anything here, bare Exception included
        raise CheckpointError(
            f"the tokenizer of {path} cannot be read: {error}; fetch the file again, or name another with --tokenizer"
        ) from error


def _named_special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    named: Mapping[str, Any] = tokenizer.special_tokens_map
    return {name: str(token) for name, token in named.items() if token is not None and not isinstance(token, list)}


def _chat_template(template: str | Mapping[str, str] | None) -> str | None:
    """Some checkpoints carry several templates by name; "default" is the one for plain chat."""
    if isinstance(template, Mapping):
        return template.get("default")
    return template


# Text without special tokens


def _encode(backend: Backend, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """As a batch of one: only then the library lets other threads run meanwhile. A long text takes seconds."""
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _plain_backend(backend: Backend) -> Backend:
    """The same model without added tokens, and without the space that SentencePiece style puts before a text."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    steps = {name: _without_prefix(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")}
    plain = type(backend).from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": empty} | steps))
    plain.model = backend.model  # shared, not copied
    return plain


def _without_prefix(component: Any) -> dict[str, Any] | None:
    """The description of a normalizer or pre-tokenizer, without what it puts before a text."""
    return _drop_prefix(json.loads(component.__getstate__())) if component is not None else None


def _drop_prefix(step: dict[str, Any]) -> dict[str, Any]:
    match step["type"]:
        case "Sequence":
            key = "normalizers" if "normalizers" in step else "pretokenizers"
            return step | {key: [_drop_prefix(inner) for inner in step[key]]}
        case "Prepend":
            return {"type": "Sequence", "normalizers": []}
        case "Metaspace":
            return step | {"prepend_scheme": "never"}
        case "ByteLevel" if "add_prefix_space" in step:
            return step | {"add_prefix_space": False}
        case _:
            return step


# What the bytes of a token are


def _token_bytes(
    vocab: Mapping[str, int], added: Mapping[int, Any], spelling: Callable[[str], bytes]
) -> dict[int, bytes]:
    """Bytes of every id. Added tokens are literal text, except plain ones that the vocabulary spells."""
    result = {token_id: spelling(token) for token, token_id in vocab.items()}
    for token_id, token in added.items():
        if token.special or token_id not in result:
            result[token_id] = token.content.encode()
    return result


def _spelling(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How the vocabulary spells bytes, from the description of the tokenizer's decoder.

    Raises:
        UnsupportedModelError: neither byte-level nor SentencePiece style.
    """
    steps = list(_decoder_steps(decoder)) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    spaces = [space for step in steps if (space := _stand_in_for_space(step)) is not None]
    # Fuse joins, Strip trims the leading space of a whole text: neither changes what a token stands for.
    unknown = set(kinds) - {"ByteLevel", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if not unknown and "ByteLevel" in kinds and not spaces:
        return partial(_byte_level_bytes, alphabet=_byte_alphabet())
    if not unknown and len(spaces) == 1:
        return partial(_sentencepiece_bytes, space=spaces[0], byte_fallback="ByteFallback" in kinds)
    raise UnsupportedModelError(
        f"the tokenizer's decoder is {' + '.join(kinds) or 'missing'}; "
        "byte-level and SentencePiece style (Replace or Metaspace, ByteFallback) are supported"
    )


def _decoder_steps(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _stand_in_for_space(step: Mapping[str, Any]) -> str | None:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", _SENTENCEPIECE_SPACE))
    if step["type"] == "Replace" and step["content"] == " ":
        pattern: str | None = step["pattern"].get("String")
        return pattern
    return None


def _byte_level_bytes(token: str, *, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # not spelled in the alphabet at all
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes are U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _sentencepiece_bytes(token: str, *, space: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(match[1])
    return token.replace(space, " ").encode()
