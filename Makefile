# One command is the check: what `make check` says is what CI says.

.PHONY: check format lint types imports test faults soak audit fix sample-run

check: format lint types imports test

format:
	uv run ruff format --check .

lint:
	uv run ruff check .

types:
	uv run mypy

imports:
	uv run lint-imports

test:
	uv run pytest

# All attacks on a real server, and the table of them.
faults:
	rm -f faults.jsonl
	FAULT_REPORT=faults.jsonl uv run pytest tests/faults -m "slow or not slow" --numprocesses 0
	uv run python scripts/fault_report.py faults.jsonl docs/RELIABILITY.md
	rm -f faults.jsonl

# Half an hour of mixed traffic, and whether the server stays as it was: output/soak/report.md.
soak:
	uv run python scripts/soak.py

# The locked packages against the public lists of known vulnerabilities; needs the network.
audit:
	uv export --locked --no-emit-project --quiet | \
		uvx pip-audit --strict --require-hashes --disable-pip --requirement /dev/stdin

fix:
	uv run ruff format .
	uv run ruff check --fix .

sample-run:
	uv run python scripts/sample_run.py
