"""The table of docs/RELIABILITY.md, from the lines that the fault suite wrote:

python scripts/fault_report.py faults.jsonl docs/RELIABILITY.md
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_NAMES = 30
BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"


@dataclass(frozen=True, slots=True)
class Case:
    """One test: its parameters stand in brackets behind its name."""

    file: str
    name: str
    outcome: str
    seconds: float

    @property
    def test(self) -> str:
        """Without parameters, as words."""
        return self.name.partition("[")[0].removeprefix("test_").replace("_", " ")

    @property
    def parameters(self) -> str:
        """What stands in the brackets."""
        return self.name.partition("[")[2].removesuffix("]")


def read_cases(lines: Sequence[str]) -> list[Case]:
    """Of the report; the last run of a case counts."""
    found = [json.loads(line) for line in lines]
    cases = {(line["file"], line["case"]): line for line in found}
    return [Case(line["file"], line["case"], line["outcome"], line["seconds"]) for line in cases.values()]


def table(cases: Sequence[Case]) -> str:
    """A row for each test: its cases, how many passed, and the time of all."""
    by_test: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        by_test[case.file, case.test].append(case)
    rows = ["| file | attack | cases | outcome | seconds |", "|---|---|---|---|---|"]
    for (file, test), group in by_test.items():
        passed = sum(case.outcome == "passed" for case in group)
        outcome = "passed" if passed == len(group) else f"{passed} of {len(group)} passed"
        names = _names([_cell(case.parameters) for case in group if case.parameters])
        seconds = sum(case.seconds for case in group)
        rows.append(f"| {file} | {test} | {names or len(group)} | {outcome} | {seconds:.1f} |")
    total, failed = sum(case.seconds for case in cases), sum(case.outcome != "passed" for case in cases)
    rows += ["", f"{len(cases)} cases, {failed} failed, {total:.0f} s."]
    return "\n".join(rows)


def _names(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _cell(text: str) -> str:
    text = re.sub(r"[|`<>\\]", " ", text)
    return text if len(text) <= 40 else f"{text[:40]}..."


def insert(document: str, content: str) -> str:
    """The document with `content` between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main(report: Path, document: Path) -> None:
    """Renew the table."""
    cases = read_cases(report.read_text().splitlines())
    document.write_text(insert(document.read_text(), table(cases)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
