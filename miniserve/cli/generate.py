"""`generate`: answer prompts on the terminal. Says which flag is wrong, where the engine names a field."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniserve.cli.console import progress_bar, say
from miniserve.cli.flags import Parser, add_config_flags, engine_config, parse_with
from miniserve.config import EngineConfig, flag_name
from miniserve.errors import ConfigError, InvalidParameterError, RequestError
from miniserve.sampling_params import SamplingParams, StructuredOutput
from miniserve.strict_json import read_json

if TYPE_CHECKING:
    from miniserve.core.request import Request
    from miniserve.engine.llm import LLM
    from miniserve.engine.options import ChatOptions

# Fields that the engine names; a structure is named by its flag already, and a prompt as such.
_FLAGS = {"max_tokens": "--max-tokens", "tools": "--tools"}


def add_command(commands: Any) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("generate", help="answer prompts on the terminal")
    _add_flags(parser)
    add_config_flags(parser, "engine", EngineConfig)
    parser.set_defaults(command=_generate)


def _add_flags(parser: Parser) -> None:
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
    group.add_argument("--max-tokens", type=parse_with(int), metavar="N", help="default: the rest of the context")
    group.add_argument("--temperature", type=parse_with(float), metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=parse_with(float), metavar="P")
    group.add_argument("--top-k", type=parse_with(int), metavar="K")
    group.add_argument("--min-p", type=parse_with(float), metavar="P")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def _generate(args: argparse.Namespace) -> int:
    config = engine_config(args)
    sampling, chat = _sampling_flags(args), _chat_flags(args)
    prompts = [_read_stdin() if prompt == "-" else prompt for prompt in args.prompts]
    _check_texts(args, prompts)
    llm = _load(config)
    requests = _requests(args, llm, prompts, llm.default_sampling_params(**sampling), chat)
    from miniserve.printing import print_json, print_statistics, print_texts

    if args.json:
        print_json(llm, requests, chat)
    else:
        print_statistics(print_texts(llm, requests, chat, stream=not args.no_stream))
    return 0


def _check_texts(args: argparse.Namespace, prompts: list[str]) -> None:
    if not all(prompts):
        raise ConfigError("the prompt is empty")
    texts = (("--system", args.system), ("--regex", args.regex), *(("--stop", stop) for stop in args.stop or ()))
    for what, text in (*(("the prompt", prompt) for prompt in prompts), *texts):
        _check_text(what, text or "")


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
        raise _fault_of(flag_name(error.param or ""), error) from None
    return sampling


def _answer_format(args: argparse.Namespace) -> StructuredOutput | None:
    """What the answer has to look like. Whether it can be compiled is found out with the model's tokenizer.

    Raises:
        ConfigError: as `_sampling_flags`.
    """
    if args.regex is not None:
        with _as_flag("--regex"):
            return StructuredOutput("regex", args.regex, "--regex")
    if args.json_schema is None:
        return None
    schema = _read_json("--json-schema", args.json_schema)
    if not isinstance(schema, dict):
        raise ConfigError(f"--json-schema {args.json_schema} has no JSON object in it")
    from miniserve.text.json_schema import check_schema

    with _as_flag("--json-schema"):
        check_schema(schema, "--json-schema", "--json-schema")
        return StructuredOutput.json(schema, "--json-schema")


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
    tools = _read_json("--tools", args.tools)
    if tools is None:
        raise ConfigError(f"--tools {args.tools} has null in it, in place of a list of functions")
    with _as_flag("--tools"):
        return ChatOptions(tools=parse_tools(tools))


@contextmanager
def _as_flag(flag: str) -> Iterator[None]:
    """A value that is refused is the flag's fault."""
    try:
        yield
    except RequestError as error:
        raise _fault_of(flag, error) from None


def _fault_of(flag: str, error: RequestError) -> ConfigError:
    message = str(error)
    return ConfigError(message if not flag or message.startswith(flag) else f"{flag}: {message}")


def _read_json(flag: str, path: Path) -> Any:
    try:
        return read_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is not valid JSON: {error}") from None


def _check_text(what: str, text: str) -> None:
    """Refuse what no model can take before one is loaded. Bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8: see character {error.start}") from None


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin is not text: {error}") from None


def _load(config: EngineConfig) -> LLM:
    """Load the model, with a progress bar on a terminal, and print what was settled."""
    from miniserve.engine.build import build_engine
    from miniserve.engine.llm import LLM

    with progress_bar("loading") as progress:
        parts = build_engine(config, progress=progress, on_build=say)
    for line in parts.summary:
        say(line)
    return LLM.from_parts(parts)


def _requests(
    args: argparse.Namespace, llm: LLM, prompts: list[str], sampling: SamplingParams, chat: ChatOptions | None
) -> list[Request]:
    """Checked requests, plain or chat.

    Raises:
        ConfigError: one of the prompts or flags is wrong, which took the model to find out.
    """
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    try:
        if chat is None:
            return llm.prompt_requests(prompts, sampling)
        return llm.chat_requests([[*system, {"role": "user", "content": prompt}] for prompt in prompts], sampling, chat)
    except RequestError as error:
        field = (error.param or "").partition("[")[0]
        raise _fault_of(_FLAGS.get(field, ""), error) from None
