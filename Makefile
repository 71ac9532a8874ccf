# One command is the check: what `make check` says is what CI says.

.PHONY: check format lint types imports test fix sample-run

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

fix:
	uv run ruff format .
	uv run ruff check --fix .

sample-run:
	uv run python scripts/sample_run.py
