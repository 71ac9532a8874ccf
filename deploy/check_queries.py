"""Does the dashboard show anything? Under a small load, with a real Prometheus, every query of it must return data.

    uv run python deploy/check_queries.py --url http://127.0.0.1:8000

Starts Prometheus in a temporary folder, with the configuration and the rules that lie here but for the target, which is
the running miniserve. The rules must evaluate too. Does not ask Loki's queries. Knows miniserve by HTTP only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

DEPLOY = Path(__file__).resolve().parent
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "miniserve.json"
TARGET = "host.docker.internal:8000"
POLL_SECONDS = 0.25
CALL_SECONDS = 120  # a large model on a small machine is slow
CALLERS = 3
PAUSE_SECONDS = 0.05  # between two calls: a small load, also where the answers come at once
PROMPT = "A small request that every caller sends, so that the prefix cache has something to find. Number "


@dataclass(frozen=True)
class Query:
    """One query of one panel. `name`: the panel's title, and the query's legend."""

    name: str
    expression: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print one line a query; 0 if all had data."""
    args = _parse(arguments)
    try:
        return _check(args)
    except httpx.ConnectError as error:
        problem = f"nothing answers at {args.url} ({error}); start the server, or say where it is with --url"
    except httpx.HTTPStatusError as error:
        problem = f"{error.request.url} answers {error.response.status_code}: {error.response.text[:300]}"
    except (OSError, ValueError, httpx.HTTPError) as error:
        problem = str(error)
    print(f"check_queries: {problem}", file=sys.stderr)
    return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the running miniserve (default: %(default)s)"
    )
    parser.add_argument("--api-key", default=os.environ.get("MINISERVE_API_KEY", ""), help="if the server wants one")
    parser.add_argument("--prometheus", default="prometheus", metavar="FILE", help="the program (default: on PATH)")
    parser.add_argument("--scrape-interval", type=int, default=5, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="to wait (default: %(default)s)")
    return parser.parse_args(arguments)


def _check(args: argparse.Namespace) -> int:
    program = shutil.which(args.prometheus)
    if program is None:
        raise FileNotFoundError(f"no program {args.prometheus!r}; install Prometheus, or name it with --prometheus")
    queries = dashboard_queries(json.loads(DASHBOARD.read_text()))
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with (
        httpx.Client(base_url=args.url, headers=headers, timeout=CALL_SECONDS) as miniserve,
        load(miniserve),
        prometheus(program, args.url, args.scrape_interval) as server,
    ):
        give_up = time.monotonic() + args.timeout
        problems = _ask_all(server, queries, args.scrape_interval, give_up) + _rule_problems(server, give_up)
    for problem in problems:
        print(f"NO   {problem}")
    print(f"{len(queries)} queries, {len(problems)} problems")
    return 1 if problems else 0


# The dashboard


def dashboard_queries(dashboard: dict[str, Any]) -> list[Query]:
    """The queries for Prometheus of all panels."""
    return [
        Query(", ".join(filter(None, (panel["title"], _legend(target)))), target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        if target["datasource"]["type"] == "prometheus"
    ]


def _legend(target: dict[str, Any]) -> str:
    """What tells the queries of a panel from each other: the legend without the model's name."""
    return re.sub(r"{{(\w+)}}", r"by \1", re.sub(r"{{model_name}} ?", "", target["legendFormat"]))


def fill_in(expression: str, scrape_interval: int) -> str:
    """What Grafana would send: its variables replaced.

    Raises:
        ValueError: a variable is left that is not known here.
    """
    values = {"$model": ".*", "$__rate_interval": f"{4 * scrape_interval}s", "$__range": "15m"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    if unknown := re.search(r"\$\w+", expression):
        raise ValueError(
            f"{unknown[0]} in the dashboard is a variable that this check does not know; add it to fill_in"
        )
    return expression


# Prometheus


@contextmanager
def prometheus(program: str, url: str, scrape_interval: int) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the server at `url`, ready, until the context ends."""
    with tempfile.TemporaryDirectory(prefix="miniserve-prometheus-") as folder:
        config = _write_config(Path(folder), url, scrape_interval)
        address = f"127.0.0.1:{_free_port()}"
        flags = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}")
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
            try:
                with httpx.Client(base_url=f"http://{address}", timeout=10) as client:
                    _wait_ready(client, process, Path(log.name))
                    yield client
            finally:
                process.terminate()
                process.wait()


def _write_config(folder: Path, url: str, scrape_interval: int) -> Path:
    for file in (DEPLOY / "prometheus").iterdir():
        shutil.copy(file, folder)
    config = folder / "prometheus.yml"
    text, address = config.read_text(), urlsplit(url)
    if address.scheme != "http":
        raise ValueError(f"--url {url} must begin with http://: prometheus.yml has nothing about TLS")
    if TARGET not in text:
        raise ValueError(f"prometheus.yml has no target {TARGET} that could be replaced by --url")
    text = text.replace(TARGET, address.netloc if address.port else f"{address.netloc}:80")
    config.write_text(re.sub(r"_interval: \S+", f"_interval: {scrape_interval}s", text))
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            if client.get("/-/ready").is_success:
                return
        except httpx.ConnectError:
            pass
        time.sleep(POLL_SECONDS)
    raise OSError("Prometheus did not start:\n" + log.read_text()[-2000:])


def _ask_all(server: httpx.Client, queries: Sequence[Query], scrape_interval: int, give_up: float) -> list[str]:
    """Ask each query until it has data, and print it; what has none in the end is a problem."""
    missing = list(queries)
    while True:
        for query in list(missing):
            if values := ask(server, fill_in(query.expression, scrape_interval)):
                missing.remove(query)
                print(f"ok   {query.name}: {', '.join(f'{value:.4g}' for value in values)}")
        if not missing or time.monotonic() > give_up:
            return [f"{query.name}: no data for {query.expression}" for query in missing]
        time.sleep(POLL_SECONDS)


def ask(server: httpx.Client, expression: str) -> list[float]:
    """The numbers that the expression has now. One that is not finite draws nothing."""
    answer = server.get("/api/v1/query", params={"query": expression}).json()
    if answer["status"] != "success":
        raise ValueError(f"Prometheus refuses {expression}: {answer['error']}")
    values = (float(series["value"][1]) for series in answer["data"]["result"])
    return [value for value in values if math.isfinite(value)]


def _rule_problems(server: httpx.Client, give_up: float) -> list[str]:
    """What is wrong with the alert rules, once all were evaluated."""
    while True:
        groups = server.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > give_up:
            break
        time.sleep(POLL_SECONDS)
    if not rules:
        return ["prometheus.yml loads no rules"]
    print(f"ok   {len(rules)} alert rules are loaded")
    return [
        f"alert {rule['name']}: {rule['health']} {rule.get('lastError', '')}"
        for rule in rules
        if rule["health"] != "ok"
    ]


# The load


@contextmanager
def load(miniserve: httpx.Client) -> Iterator[None]:
    """A few callers that ask the server, one request after the other, until the context ends.

    Raises:
        httpx.HTTPError: the server does not answer a first call as it should.
    """
    _complete(miniserve, "0")
    done = threading.Event()
    callers = [threading.Thread(target=_call_until, args=(done, miniserve)) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        done.set()
        for caller in callers:
            caller.join()


def _call_until(done: threading.Event, miniserve: httpx.Client) -> None:
    number = 0
    while not done.wait(PAUSE_SECONDS):
        number += 1
        # The queries tell of a server that went away; a caller only has to stop.
        try:
            _complete(miniserve, str(number))
        except httpx.HTTPError:
            return


def _complete(miniserve: httpx.Client, number: str) -> None:
    body = {"prompt": PROMPT + number, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    miniserve.post("/v1/completions", json=body).raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
