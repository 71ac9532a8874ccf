"""The table of attacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.fault_report import BEGIN, END, insert, main, read_cases, table

LINES = [
    json.dumps({"file": "test_a", "case": "test_it_is_refused[a | b]", "outcome": "failed", "seconds": 1.0}),
    json.dumps({"file": "test_a", "case": "test_it_is_refused[a | b]", "outcome": "passed", "seconds": 0.5}),
    json.dumps({"file": "test_a", "case": "test_it_is_refused[" + "x" * 80 + "]", "outcome": "failed", "seconds": 2.0}),
    json.dumps({"file": "test_b", "case": "test_alone", "outcome": "passed", "seconds": 0.25}),
]


def test_a_row_for_each_test() -> None:
    """The last run of a case counts; what would break the table is left out."""
    rows = table(read_cases(LINES)).splitlines()
    assert rows[2] == f"| test_a | it is refused | a   b, {'x' * 40}... | 1 of 2 passed | 2.5 |"
    assert rows[3] == "| test_b | alone | 1 | passed | 0.2 |"
    assert rows[-1] == "3 cases, 1 failed, 3 s."


def test_the_document_keeps_the_rest(tmp_path: Path) -> None:
    report, document = tmp_path / "report", tmp_path / "doc.md"
    report.write_text("\n".join(LINES))
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main(report, document)
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| test_b | alone |" in text
    with pytest.raises(ValueError, match="has no"):
        insert("nothing", "x")
