"""Which tokens a grammar in Lark names, by id as in `<[5-9,11]>` or as `<|name|>`, and whether it may.

An end token ends the answer wherever it comes, so none may be named: what follows it would never be written. Knows how
Lark spells tokens, and nothing else of a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from miniserve.sampling_params import StructuredOutput

# What may look like a token but is none comes first: strings, comments, regular expressions.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s"]+>)', re.DOTALL)
_IDS = re.compile(r"<\[(\^?)(\*|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]>")
_REMEDY = "leave it out: an answer ends where its grammar does"


def misnamed_token(asked: StructuredOutput, *, num_token_ids: int, end_tokens: Mapping[int, str]) -> str:
    """Why a token must not be named; empty if all may, as far as is known.

    Args:
        asked: a grammar; nothing else names tokens.
        num_token_ids: ids from 0.
        end_tokens: name by id.
    """
    for name in _named_tokens(asked):
        if (match := _IDS.fullmatch(name)) is None:
            if name in end_tokens.values():
                return f"{name[:100]} ends the answer wherever it comes; {_REMEDY}"
            continue
        unknown = next((digits for digits in re.findall(r"\d+", match[2]) if int(digits[:19]) >= num_token_ids), None)
        if unknown is not None:
            last = num_token_ids - 1
            return f"{name[:40]} has the token id {unknown[:19]}; the vocabulary goes from 0 to {last}"
        ends = [token_id for token_id in sorted(end_tokens) if _has(match, token_id)]
        if ends and match[2] == "*":
            others = ",".join(map(str, ends))
            return f"{name} has the end of the answer in it; send <[^{others}]> for all other tokens"
        if ends:
            end = f"the token {ends[0]}, {end_tokens[ends[0]]}"
            return f"{name[:40]} has {end}, which ends the answer wherever it comes; {_REMEDY}"
    return ""


def _named_tokens(asked: StructuredOutput) -> Iterator[str]:
    if asked.kind == "grammar" and "<" in asked.source:
        yield from (match[1] for match in _PARTS.finditer(asked.source) if match[1] is not None)


def _has(ids: re.Match[str], token_id: int) -> bool:
    if ids[2] == "*":
        return True
    bounds = (part.partition("-") for part in ids[2].split(","))
    is_listed = any(int(low[:19]) <= token_id <= int(high[:19] or low[:19]) for low, _, high in bounds)
    return is_listed is not bool(ids[1])
