"""Why a grammar is refused, in words for who sent it: llguidance speaks of its own options, limits and spelling.

What is not known here is passed on as it is: its first line, cut.
"""

from __future__ import annotations

import re

_MAX_LENGTH = 300
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_TOO_LARGE = "it takes too much to compile: shorten its arrays, lengths and patterns, or make it several requests"
_REASONS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"oneOf constraints are not supported",
            "oneOf is supported only where no value can fit two of its schemas; use anyOf",
        ),
        (r'Unimplemented keys: \["([^]]*)"\]', r"'\1' is not supported; leave it out"),
        (r"Unknown format: (.*)", r"the format '\1' is not known; leave it out, or use a pattern"),
        (r"Invalid type: (.*)", r"'\1' is no type of JSON Schema"),
        (r"invalid multiple of", "multipleOf must be a number greater than 0"),
        (
            r"'multipleOf' has too many digits",
            "its multipleOf cannot be kept exactly; use an integer up to 429496729, or a fraction of few digits such "
            "as 0.25",
        ),
        (
            r"Failed to generate regex for (integer|float) range",
            "a minimum or maximum is too large, or has too many digits; use bounds from -9007199254740992 to "
            "9007199254740992, or leave them out",
        ),
        (
            r"Expected (?:[uf]64|positive integer) for '(\w+)', got (.{1,40})",
            r"\1 is \2, which is too large or no integer; use another",
        ),
        (
            r"Unsatisfiable schema: Regex is empty|^Regex is empty",
            "no text fits its pattern, its format and its lengths together; change one of them",
        ),
        (
            r"Unable to determine if regex is empty",
            "it cannot be found out whether any text fits its pattern, its format and its lengths together; make the "
            "pattern simpler, or leave one of them out",
        ),
        (
            r"patternProperty regexes (.{1,60}) and (.{1,60}) are (?:not )?disjoint",
            r"the same name may fit two of its patternProperties, \1 and \2; make them exclude each other",
        ),
        (r'unknown special token: "(.*?)"', r"the model has no special token '\1'; text stands between quotes"),
        (r"Unsatisfiable schema: (.*)", r"no value is valid against it: \1"),
        (r"Pointer '(.*)' does not exist", r"it refers to '#\1', which is not there"),
        (r"Anchor '(.*)' does not exist", r"it refers to '#\1', but no part of it has this $anchor"),
        (
            r"Resource '(?:json-schema:///)?(.*)' is not present",
            r"it refers to '\1', which is not part of it: put that into $defs",
        ),
        (
            r"maximum number of nested parentheses",
            "a regular expression nests too deep, or a number has too many digits; make it shorter",
        ),
        (
            r"look-around, including",
            "look-ahead and look-behind are not supported in regular expressions; write out what may come",
        ),
        (
            r"lookarounds not supported yet; (?:Start|End)",
            "^ and $ are supported at the ends of a regular expression only; leave out the others",
        ),
        (
            r"lookarounds not supported yet",
            r"\\b and \\B, borders of words, are not supported in regular expressions; write out what may come there",
        ),
        (
            r"backreferences are not supported",
            r"backreferences such as \\1 are not supported in regular expressions; write out what they repeat",
        ),
        (
            r"unrecognized flag",
            "groups such as (?>...), (?#...), (?(1)...) and (?P=name) are not supported in regular expressions; use "
            "(?:...), or leave them out",
        ),
        (
            r"unrecognized escape sequence",
            r"a regular expression has an unknown escape, such as \\Z, \\h or \\Q; write out what it stands for",
        ),
        (
            r"pattern can match invalid UTF-8",
            "a regular expression lets through what is not valid UTF-8; leave out (?-u)",
        ),
        (r"decimal literal invalid", "a number in a regular expression is too large; use a smaller one"),
        (
            r"[Cc]ircular references",
            "a $ref that leads back to itself is not supported beside other keywords",
        ),
        (
            r"[Tt]oo many items|Current row has \d+ items",
            "too much may come next at one place: offer fewer alternatives there, or fewer properties that may be left "
            "out",
        ),
        (r"too (big|large)|fuel exhausted|lexer_fuel|check fuel|too many (expressions|states)", _TOO_LARGE),
    )
)


def in_words(message: str, *, shows_place: bool = False) -> str:
    """What llguidance's message says of a grammar.

    Args:
        message: may have the whole grammar in it, up to the fault.
        shows_place: say where in the text of the grammar it is, which is the user's own.
    """
    message = message.removesuffix("<non-verbose/>").strip()
    place = _PLACE.match(message)
    causes = [line.removeprefix("error: ") for line in message.splitlines() if line.startswith("error: ")]
    reason = message.partition("\n")[0].removeprefix(place[0] if place else "")
    if causes:
        reason = f"a regular expression is malformed: {causes[-1]}"
    reason = reason.rpartition("failed to compile JSON schema: ")[2]
    for pattern, words in _REASONS:
        if match := pattern.search(reason):
            reason = match.expand(words).replace('", "', "', '")
            break
    if shows_place and place is not None:
        reason = f"line {place[1]}, column {place[2]}: {reason}"
    return reason if len(reason) <= _MAX_LENGTH else reason[:_MAX_LENGTH] + "..."
