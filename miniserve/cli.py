"""The command line: flags, and what each command prints. Heavy imports wait until a command needs them.

The flags of the engine and of the server are generated from their config classes. Text goes to stdout, everything about
it to stderr. Exit codes: 0 done, 1 the request failed, 2 asked for something that cannot be started, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miniserve.config import EngineConfig, FlagInfo, ServerConfig, flag_info, flag_name
from miniserve.errors import ConfigError, InternalError, InvalidParameterError, RequestError, StartupError
from miniserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from miniserve.core.request import Request
    from miniserve.engine.build import EngineParts
    from miniserve.engine.llm import LLM
    from miniserve.engine.metrics import MetricsHook
    from miniserve.outputs import EngineOutput

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line and exit code 2, and flags spelled out in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        try:
            args = _parser().parse_args(argv)
            code: int = args.command(args)
            return code
        finally:
            print(end="", flush=True)  # a reader that has gone is noticed here, not at the interpreter's exit
    except StartupError as error:
        return _fail(str(error), 2)
    except RequestError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        # What is still buffered has to go somewhere, or the interpreter complains about it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(message: str, code: int) -> int:
    message = " ".join(message.split())  # one line, whatever a library's message was made of
    print(f"miniserve: error: {message}" if code != INTERRUPTED else f"miniserve: {message}", file=sys.stderr)
    return code


# Flags


def _parser() -> Parser:
    parser = Parser(prog="miniserve", description="An LLM inference server to read, to watch and to trust.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    generate = commands.add_parser("generate", help="answer prompts on the terminal")
    _add_generate_flags(generate)
    _add_config_flags(generate, "engine", EngineConfig)
    generate.set_defaults(command=_generate)

    serve = commands.add_parser("serve", help="serve the OpenAI API over HTTP")
    _add_config_flags(serve, "server", ServerConfig)
    _add_config_flags(serve, "engine", EngineConfig)
    serve.set_defaults(command=_serve)

    bench = commands.add_parser("bench", help="measure throughput and latency, with and without prefix caching")
    _add_bench_flags(bench)
    _add_config_flags(bench, "engine", EngineConfig)
    bench.set_defaults(command=_bench)

    attn_demo = commands.add_parser("attn-demo", help="watch the attention backends agree on a toy cache")
    attn_demo.set_defaults(command=_attn_demo)
    kv_demo = commands.add_parser("kv-demo", help="watch the KV cache manager hand out, share and evict blocks")
    kv_demo.add_argument("--no-pause", action="store_true", help="do not wait for a key between the steps")
    kv_demo.set_defaults(command=_kv_demo)
    return parser


def _add_config_flags(parser: Parser, title: str, config: type[EngineConfig] | type[ServerConfig]) -> None:
    """One flag per field of `config`, with its default, choices and help. Absent flags stay absent."""
    group = parser.add_argument_group(title)
    for config_field in fields(config):
        name, default = flag_name(config_field.name), config_field.default
        if isinstance(default, bool):
            group.add_argument(
                name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=f"{flag_info(config_field).help} (default: {'on' if default else 'off'})",
            )
        else:
            metavar = config_field.name.upper().split("_")[-1]
            group.add_argument(name, **_flag_options(flag_info(config_field), metavar, default))


def _flag_options(info: FlagInfo, metavar: str, default: Any) -> dict[str, Any]:
    shown = f" (default: {default})" if isinstance(default, (str, int, float)) and default != "" else ""
    return {
        "action": "append" if info.repeatable else "store",
        "type": _parse_with(info.parse),
        "choices": info.choices,
        "metavar": info.metavar or "|".join(info.choices or ()) or metavar,
        "default": argparse.SUPPRESS,
        "help": (info.help + shown).replace("%", "%%"),
    }


def _parse_with(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, with its ValueError's own words in argparse's error."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            kind = {int: "an integer", float: "a number"}.get(parse)  # type: ignore[call-overload]
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}" if kind else str(error)) from None

    return checked


def _add_generate_flags(parser: Parser) -> None:
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        required=True,
        dest="prompts",
        metavar="TEXT",
        help="the prompt; give it again for a batch; - reads it from stdin",
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="the system message; implies --chat")
    parser.add_argument("--no-stream", action="store_true", help="print each answer when it is complete")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, nothing else")
    group = parser.add_argument_group("sampling (default: as the model recommends, else temperature 1)")
    group.add_argument("--max-tokens", type=_parse_with(int), metavar="N", help="default: the rest of the context")
    group.add_argument("--temperature", type=_parse_with(float), metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=_parse_with(float), metavar="P")
    group.add_argument("--top-k", type=_parse_with(int), metavar="K")
    group.add_argument("--min-p", type=_parse_with(float), metavar="P")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def _add_bench_flags(parser: Parser) -> None:
    parser.description = (
        "Run the same prompts through miniserve with and without prefix caching (with --prefix-caching or "
        "--no-prefix-caching only so), each time in a process of its own, and print one table."
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=_parse_with(int), default=16, metavar="N", help="(default: 16)")
    group.add_argument(
        "--max-tokens", type=_parse_with(int), default=64, metavar="N", help="generated for each prompt (default: 64)"
    )
    group.add_argument("--hf-baseline", action="store_true", help="also measure transformers' static batching")
    group.add_argument(
        "--repeat", type=_parse_with(int), default=1, metavar="N", help="runs of each arm; medians count (default: 1)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine flags that were given; `EngineConfig` has the defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig(**_given(args, EngineConfig))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server flags that were given; `ServerConfig` has the defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    return ServerConfig(**_given(args, ServerConfig))


def _given(args: argparse.Namespace, config: type[EngineConfig] | type[ServerConfig]) -> dict[str, Any]:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    return {f.name: given[f.name] for f in fields(config) if f.name in given}


# generate


def _generate(args: argparse.Namespace) -> int:
    config = engine_config(args)
    sampling = _sampling_flags(args)
    prompts = [_checked_text(_read_stdin() if prompt == "-" else prompt) for prompt in args.prompts]
    llm = _load(config)
    requests = _requests(args, llm, prompts, llm.default_sampling_params(**sampling))
    if args.json:
        return _print_json(llm, requests)
    outputs = _print_texts(llm, requests, stream=not args.no_stream)
    _print_statistics(outputs)
    return 0


def _sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, as `SamplingParams` arguments; the others stay as the model recommends.

    Raises:
        ConfigError: a value is out of range. Found before the model is loaded.
    """
    given = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "seed": getattr(args, "seed", None),
        "stop": tuple(args.stop) if args.stop else None,
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    sampling |= {"max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos}
    if args.max_tokens == 0:
        raise ConfigError("--max-tokens: there is nothing to print of 0 tokens; ask for at least 1")
    try:
        SamplingParams(**sampling)
    except InvalidParameterError as error:
        raise ConfigError(f"{flag_name(error.param or '')}: {error}") from None
    return sampling


def _checked_text(prompt: str) -> str:
    """Refuse what no model can take before one is loaded. Bytes that are not UTF-8 arrive as lone surrogates."""
    if not prompt:
        raise ConfigError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8: see character {error.start}") from None
    return prompt


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidParameterError(f"the prompt on stdin is not text: {error}", param="prompt") from None


def _load(config: EngineConfig) -> LLM:
    """Load the model, with a progress bar on a terminal, and print what was settled."""
    from miniserve.engine.build import build_engine
    from miniserve.engine.llm import LLM

    with _progress_bar("loading") as progress:
        parts = build_engine(config, progress=progress)
    for line in parts.summary:
        print(f"[miniserve] {line}", file=sys.stderr)
    return LLM.from_parts(parts)


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _requests(args: argparse.Namespace, llm: LLM, prompts: list[str], sampling: SamplingParams) -> list[Request]:
    """Checked requests, plain or chat."""
    if not args.chat and args.system is None:
        return llm.prompt_requests(prompts, sampling)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return llm.chat_requests([[*system, {"role": "user", "content": prompt}] for prompt in prompts], sampling)


def _print_texts(llm: LLM, requests: list[Request], *, stream: bool) -> list[EngineOutput]:
    """Print the answers in the order of the prompts; returns the last output of each request.

    All run as one batch. The first unfinished answer streams; the others are held until it is their turn.
    """
    writer = _OrderedWriter([request.request_id for request in requests], stream=stream)
    last = []
    for output in llm.stream(requests):
        writer.add(output)
        if output.finish_reason is not None:
            last.append(output)
    return last


class _OrderedWriter:
    """Writes interleaved answers one after the other to stdout."""

    def __init__(self, request_ids: list[str], *, stream: bool) -> None:
        self._waiting = list(request_ids)
        self._texts = dict.fromkeys(request_ids, "")
        self._finished: set[str] = set()
        self._stream = stream
        self._numbered = len(request_ids) > 1
        self._started = 0

    def add(self, output: EngineOutput) -> None:
        self._texts[output.request_id] += output.text
        if output.finish_reason is not None:
            self._finished.add(output.request_id)
        while self._waiting:
            current = self._waiting[0]
            done = current in self._finished
            if done or self._stream:
                self._write(current)
            if not done:
                break
            print(flush=True)
            self._waiting.pop(0)

    def _write(self, request_id: str) -> None:
        number = len(self._texts) - len(self._waiting) + 1
        if self._numbered and self._started < number:
            self._started = number
            print(f"--- {number}")
        print(self._texts[request_id], end="", flush=True)
        self._texts[request_id] = ""


def _print_statistics(outputs: list[EngineOutput]) -> None:
    """Time to first token, speed and cache use of the batch, to stderr."""
    timings = [output.timing for output in outputs if output.timing is not None]
    firsts = [timing.first_token for timing in timings if timing.first_token is not None]
    if not firsts:
        return
    generated = sum(output.usage.completion_tokens for output in outputs)
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    total = max(timing.total for timing in timings)
    print(
        f"[miniserve] {prompt} prompt tokens ({cached} cached), {generated} generated in {total:.2f} s: "
        f"{generated / total:.1f} tokens/s, first token after {min(firsts):.3f} s",
        file=sys.stderr,
    )


def _print_json(llm: LLM, requests: list[Request]) -> int:
    for output in llm.run(requests):
        print(json.dumps(asdict(output), ensure_ascii=False))
    return 0


# serve


def _serve(args: argparse.Namespace) -> int:
    server, config = server_config(args), engine_config(args)
    from miniserve.api.app import create_app
    from miniserve.engine.async_engine import AsyncEngine
    from miniserve.server import serve

    def build(hooks: Sequence[MetricsHook]) -> EngineParts:
        from miniserve.engine.build import build_engine

        with _progress_bar("loading") as progress:
            return build_engine(config, progress=progress, hooks=hooks)

    names = _model_names(server, config)
    engine = AsyncEngine(build, model_name=names[0], max_queued_requests=server.max_queued_requests)
    serve(create_app(engine, server, names), engine, server, lambda url: _announce(engine.parts, names[0], url))
    return 0


def _model_names(server: ServerConfig, config: EngineConfig) -> tuple[str, ...]:
    """What clients call the model. Of a path only the last part: where it lies is nobody's business."""
    local = Path(config.model)
    return server.served_model_name or (local.name if local.exists() else config.model,)


def _announce(parts: EngineParts, name: str, url: str) -> None:
    backend = f"{parts.resolved.device}, {parts.backend_name}"
    for line in (*parts.summary, f"serving {name} on {url} ({backend})"):
        print(f"[miniserve] {line}", file=sys.stderr, flush=True)


# bench


def _bench(args: argparse.Namespace) -> int:
    from miniserve.benchmarks.bench import BenchOptions, bench

    config = engine_config(args)
    options = BenchOptions(
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        repeat=args.repeat,
        prefix_caching=getattr(args, "prefix_caching", None),
        hf_baseline=args.hf_baseline,
        json=args.json,
        plot=args.plot,
    )
    try:
        bench(config, options, _progress_bar)
    except InternalError as error:
        return _fail(str(error), 1)
    return 0


# The other commands


def _attn_demo(_args: argparse.Namespace) -> int:
    _demo("attn_demo").run()
    return 0


def _kv_demo(args: argparse.Namespace) -> int:
    _demo("kv_demo").run(pause=not args.no_pause)
    return 0


def _demo(name: str) -> Any:
    try:
        return import_module(f"demos.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("demos", f"demos.{name}"):
            raise
        raise StartupError("the demos are not part of the installed package; run main.py in a checkout") from None
