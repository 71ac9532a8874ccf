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
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miniserve.config import EngineConfig, FlagInfo, ServerConfig, flag_info, flag_name
from miniserve.errors import ConfigError, InternalError, InvalidParameterError, RequestError, StartupError
from miniserve.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from miniserve.core.request import Request
    from miniserve.engine.build import EngineParts
    from miniserve.engine.llm import LLM
    from miniserve.engine.metrics import MetricsHook
    from miniserve.engine.options import ChatOptions

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

    build_kernels = commands.add_parser(
        "build-kernels", help="compile the native kernels for this machine ahead of time"
    )
    build_kernels.set_defaults(command=_build_kernels)

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
    parser.add_argument("--tools", type=Path, metavar="FILE", help="functions it may call, as JSON; implies --chat")
    answer = parser.add_mutually_exclusive_group()
    answer.add_argument("--json-schema", type=Path, metavar="FILE", help="answer with JSON that is valid against it")
    answer.add_argument("--regex", metavar="PATTERN", help="answer with text that matches it")
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
    sampling, chat = _sampling_flags(args), _chat_flags(args)
    prompts = [_checked_text(_read_stdin() if prompt == "-" else prompt) for prompt in args.prompts]
    llm = _load(config)
    requests = _requests(args, llm, prompts, llm.default_sampling_params(**sampling), chat)
    from miniserve.printing import print_json, print_statistics, print_texts

    if args.json:
        print_json(llm, requests, chat)
    else:
        print_statistics(print_texts(llm, requests, chat, stream=not args.no_stream))
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
        "structured_outputs": _answer_format(args),
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


def _answer_format(args: argparse.Namespace) -> StructuredOutput | None:
    """What the answer has to look like. Whether it can be compiled is found out with the model's tokenizer.

    Raises:
        ConfigError: as `_sampling_flags`.
    """
    if args.regex is not None:
        with _as_flag("--regex"):
            return StructuredOutput("regex", args.regex)
    if args.json_schema is None:
        return None
    schema = _read_json("--json-schema", args.json_schema)
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {args.json_schema} has no JSON object in it")
    with _as_flag("--json-schema"):
        return StructuredOutput.json(schema)


def _chat_flags(args: argparse.Namespace) -> ChatOptions | None:
    """How prompts become conversations; None where they stay what they are.

    Raises:
        ConfigError: as `_sampling_flags`.
    """
    if not args.chat and args.system is None and args.tools is None:
        return None
    from miniserve.engine.openai_fields import parse_tools
    from miniserve.engine.options import ChatOptions

    if args.tools is None:
        return ChatOptions()
    with _as_flag("--tools"):
        return ChatOptions(tools=parse_tools(_read_json("--tools", args.tools)))


@contextmanager
def _as_flag(flag: str) -> Iterator[None]:
    """A value that is refused is the flag's fault."""
    try:
        yield
    except InvalidParameterError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _read_json(flag: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not valid JSON: {error}") from None


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
        parts = build_engine(config, progress=progress, on_build=_say)
    for line in parts.summary:
        _say(line)
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


def _requests(
    args: argparse.Namespace, llm: LLM, prompts: list[str], sampling: SamplingParams, chat: ChatOptions | None
) -> list[Request]:
    """Checked requests, plain or chat."""
    if chat is None:
        return llm.prompt_requests(prompts, sampling)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return llm.chat_requests([[*system, {"role": "user", "content": prompt}] for prompt in prompts], sampling, chat)


# serve


def _serve(args: argparse.Namespace) -> int:
    server, config = server_config(args), engine_config(args)
    from miniserve.api.app import create_app
    from miniserve.engine.async_engine import AsyncEngine
    from miniserve.server import serve

    def build(hooks: Sequence[MetricsHook]) -> EngineParts:
        from miniserve.engine.build import build_engine

        with _progress_bar("loading") as progress:
            return build_engine(config, progress=progress, on_build=_say, hooks=hooks)

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
        _say(line)


def _say(line: str) -> None:
    print(f"[miniserve] {line}", file=sys.stderr, flush=True)


# build-kernels


def _build_kernels(_args: argparse.Namespace) -> int:
    from miniserve import platform
    from miniserve.kernels.build import build
    from miniserve.kernels.load import best_instruction_set

    print(build(best_instruction_set(platform.detect().instruction_sets), progress=_say).path)
    return 0


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
    except RequestError as error:  # the prompts are ours: what does not fit was asked for with a flag
        return _fail(str(error), 2)
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
