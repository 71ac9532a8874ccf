"""The command line: what it refuses and how, what goes to stdout and what to stderr, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from miniserve import cli
from miniserve.cli import generate as generate_command
from miniserve.config import EngineConfig, ServerConfig, flag_name
from miniserve.engine.llm import LLM
from miniserve.text.chat_template import ChatTemplate
from tests.chat_templates import THINKING_WITH_TOOLS
from tests.engine.scripted import EOS, TOKENIZER, make_input_processor, make_parts, tokens
from tests.support import tiny_model

CONTEXT = 100_000  # of the tiny model: long enough to be interrupted
TIMEOUT = 120
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in this process."""

    def run_command(*argv: str) -> Result:
        try:
            code = cli.main(argv)
        except SystemExit as end:  # argparse's way
            assert isinstance(end.code, int)
            code = end.code
        return Result(code, *capsys.readouterr())

    return run_command


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(path, "llama", max_position_embeddings=CONTEXT)
    return str(path)


@pytest.fixture
def generate(run: Run, folder: str) -> Run:
    """`generate` with the tiny model, greedy, eight tokens."""

    def generate_with(*argv: str) -> Result:
        fixed = ("--model", folder, "--dtype", "fp32", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
        return run("generate", *fixed, *argv)

    return generate_with


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is to be found before the model is loaded."""

    def load(_config: EngineConfig) -> None:
        pytest.fail("the model is loaded before the flags are checked")

    monkeypatch.setattr(generate_command, "_load", load)


# Mistakes

BAD_ENGINE_FLAGS = {
    "model": ["", "./nowhere", "/nowhere/at/all", "nowhere.gguf", __file__],
    "revision": ["main"],  # of a local model
    "tokenizer": ["./nowhere"],
    "chat_template": ["./nowhere"],
    "generation_config": ["mine"],
    "load_format": ["fast"],
    "device": ["gpu"],
    "dtype": ["int8", "FP32"],
    "max_model_len": ["1", "0", "-1", "many", "8m", "1.5k"],
    "max_num_seqs": ["0", "-3", "two", "1.5", ""],
    "max_num_batched_tokens": ["0", "1kk"],
    "scheduling_policy": ["random"],
    "gpu_memory_utilization": ["0", "1.5", "-0.5", "nan", "half"],
    "num_kv_blocks": ["1", "x"],
    "block_size": ["0", "16.0"],
    "kernels": ["fast", ""],
    "quantization": ["fp4", ""],
    "kv_cache_dtype": ["fp8", "bf16"],
    "attention_backend": ["flash"],
    "prefix_caching": [],
    "cuda_graphs": [],
    "seed": ["-1", "9223372036854775808", "x"],
    "threads": ["0", "all"],
}
BAD_SERVER_FLAGS = {
    "host": ["no.such.host.invalid", "256.0.0.1"],
    "port": ["-1", "65536", "http"],
    "uds": ["", "/no/such/folder/a.sock", __file__],
    "api_key": [""],
    "served_model_name": [""],
    "allowed_origins": [""],
    "max_queued_requests": ["0", "x"],
    "max_body_bytes": ["0", "1000", "1M"],
    "timeout_keep_alive": ["0", "1.5"],
    "timeout_request": ["0", "1.5"],
    "timeout_step": ["0", "1.5"],
    "timeout_unread": ["0", "1.5"],
    "timeout_graceful_shutdown": ["-1"],
    "log_level": ["loud"],
    "access_log": [],
    "log_requests": [],
    "root_path": ["no-slash"],
    "ssl_keyfile": ["key.pem"],
    "ssl_certfile": ["cert.pem"],
}
BAD_SAMPLING_FLAGS = {
    "--max-tokens": ["0", "-1", "many", "1.5"],
    "--temperature": ["-0.1", "2.1", "nan", "warm"],
    "--top-p": ["0", "1.1", "x"],
    "--top-k": ["-2", "1.5"],
    "--min-p": ["-0.1", "2"],
    "--stop": [""],
}


def check_refusal(result: Result, *names: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that names what is wrong."""
    assert result.code == 2
    assert result.out == ""
    [line] = result.err.splitlines()
    assert line.startswith("miniserve") and ": error: " in line
    for name in names:
        assert name in line


def test_every_engine_flag_has_its_mistakes_tested() -> None:
    assert list(BAD_ENGINE_FLAGS) == [field.name for field in fields(EngineConfig)]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_ENGINE_FLAGS.items() for value in values]
)
def test_bad_engine_flag(run: Run, folder: str, field: str, value: str) -> None:
    result = run("generate", "-p", "hi", "--model", folder, f"{flag_name(field)}={value}")
    names_a_file = field in ("model", "tokenizer", "chat_template") and value
    check_refusal(result, Path(value).name if names_a_file else flag_name(field))


def test_every_server_flag_has_its_mistakes_tested() -> None:
    assert list(BAD_SERVER_FLAGS) == [field.name for field in fields(ServerConfig)]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_SERVER_FLAGS.items() for value in values]
)
def test_bad_server_flag(run: Run, folder: str, field: str, value: str) -> None:
    check_refusal(run("serve", "--model", folder, f"{flag_name(field)}={value}"), flag_name(field))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD_SAMPLING_FLAGS.items() for value in values]
)
def test_bad_sampling_flag(run: Run, flag: str, value: str) -> None:
    """Bug: a temperature of 9 was refused only after the model had been loaded."""
    check_refusal(run("generate", "-p", "hi", f"{flag}={value}"), flag)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("generate",), "--prompt"),
        (("generate", "-p"), "--prompt"),
        (("generate", "-p", "hi", "--max-model", "8k"), "--max-model"),  # no abbreviations: they would change meaning
        (("generate", "-p", "hi", "--no-such-flag"), "--no-such-flag"),
        (("generate", "-p", "hi", "--prefix-caching=yes"), "--prefix-caching"),
        (("serve", "--block-size", "0"), "--block-size"),
        (("bench", "--block-size", "0"), "--block-size"),
        (("kv-demo", "--block-size", "4"), "--block-size"),
    ],
)
def test_bad_command(run: Run, argv: tuple[str, ...], name: str) -> None:
    check_refusal(run(*argv), name)


def test_a_device_that_is_not_there(run: Run, folder: str) -> None:
    from miniserve import platform

    absent = next(device for device in ("cuda", "mps") if device not in platform.detect().devices)
    check_refusal(run("generate", "-p", "hi", "--model", folder, "--device", absent), absent, "cpu")


def test_a_damaged_checkpoint(run: Run, folder: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not what it says")
    check_refusal(run("generate", "-p", "hi", "--model", str(tmp_path)), "model.safetensors")


def test_an_error_of_many_lines_becomes_one(run: Run, folder: str, tmp_path: Path) -> None:
    """Bug: a library's own message, with its line breaks, made a paragraph of the error."""
    (tmp_path / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model":\n"\n')
    check_refusal(run("generate", "-p", "hi", "--model", str(tmp_path)), "tokenizer")


@pytest.mark.parametrize(("prompt", "name"), [("", "empty"), ("a\udcffb", "not UTF-8")])
def test_a_prompt_that_no_model_can_take(generate: Run, prompt: str, name: str) -> None:
    """Bug: it was refused only after the model was loaded."""
    result = generate("-p", prompt, "--model", "no such model")
    assert (result.code, result.out) == (2, "")
    assert name in result.err and len(result.err.splitlines()) == 1


WRONG_STRICT = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]


@pytest.mark.parametrize(
    ("argv", "content", "start"),
    [
        (("-p", "x" * 5000), "", "the prompt has 5000 tokens"),
        (("-p", "hi", "--max-tokens", "5000"), "", "--max-tokens: the prompt has 2 tokens"),
        (("-p", "hi", "--regex", "(a"), "", "--regex cannot be used: a regular expression is malformed"),
        (("-p", "hi", "--regex", "(?=a)b"), "", "--regex cannot be used: look-ahead"),
        (("-p", "hi", "--json-schema", "FILE"), '{"not": {}}', "--json-schema cannot be used: 'not'"),
        (("-p", "hi", "--tools", "FILE"), json.dumps(WRONG_STRICT), "--tools: tools[0].function.parameters of 'f'"),
    ],
    ids=["prompt", "max-tokens", "regex", "look-ahead", "schema", "tools"],
)
def test_what_only_the_model_finds_wrong(
    generate: Run, tmp_path: Path, argv: tuple[str, ...], content: str, start: str
) -> None:
    """Bug: the message named a field of the HTTP API, which nobody had sent; the exit code was a failure's."""
    file = tmp_path / "file.json"
    file.write_text(content)
    flags = [str(file) if part == "FILE" else part for part in argv]
    result = generate("--max-model-len", "4096", *flags)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith(f"miniserve: error: {start}"), result.err


def test_an_answer_that_the_engine_fails_on(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a traceback."""

    def load(_config: EngineConfig) -> LLM:
        parts = make_parts({})
        parts.engine.runner.errors["offline-0"] = "it broke"  # type: ignore[attr-defined]
        return LLM.from_parts(parts)

    monkeypatch.setattr(generate_command, "_load", load)
    result = run("generate", "--model", folder, "-p", "hi")
    assert result == Result(1, "", "miniserve: error: request offline-0: it broke\n")


# Help


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_help_has_every_engine_flag(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert (result.code, result.err) == (0, "")
    for field in fields(EngineConfig):
        assert flag_name(field.name) in result.out
    assert "--no-prefix-caching" in result.out


def test_help_of_serve_has_every_server_flag(run: Run) -> None:
    result = run("serve", "--help")
    assert (result.code, result.err) == (0, "")
    for field in fields(ServerConfig):
        assert flag_name(field.name) in result.out


def test_help_has_defaults_and_commands(run: Run) -> None:
    assert "(default: 4096)" in " ".join(run("generate", "--help").out.split())
    overview = run("--help").out
    for command in ("generate", "serve", "bench", "attn-demo", "kv-demo"):
        assert command in overview


# Choices


def test_model_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISERVE_MODEL", "./from-the-environment")
    check_refusal(run("generate", "-p", "hi"), "from-the-environment")
    check_refusal(run("generate", "-p", "hi", "--model", "./from-the-flag"), "from-the-flag")


def test_the_settled_choices_are_printed(generate: Run) -> None:
    result = generate(
        *("-p", "hi", "--max-model-len", "8k", "--num-kv-blocks", "9", "--block-size", "8"),
        *("--attention-backend", "flash_attn", "--cuda-graphs", "--threads", "1", "--device", "cpu"),
        *("--kernels", "torch"),
    )
    assert result.code == 0
    for part in (
        "llama",
        "context 8192 tokens",
        "device cpu, float32, kernels torch, attention sdpa, threads 1",
        "9 blocks x 8 tokens = 64 tokens",
        "note: flash_attn",
        "note: --cuda-graphs",
    ):
        assert part in result.err


def test_kernels_without_a_compiler(generate: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error where they were asked for, a note where they are the default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent")
    on_cpu = ("-p", "hi", "--device", "cpu")
    check_refusal(generate(*on_cpu, "--kernels", "native"), "$CXX names /nonexistent", "--kernels torch")
    result = generate(*on_cpu)
    assert result.code == 0 and result.out == generate(*on_cpu, "--kernels", "torch").out
    assert "kernels torch, attention sdpa" in result.err
    assert "note: native kernels are passed over: $CXX names /nonexistent" in result.err


def test_dummy_weights_need_no_weights(run: Run, folder: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    argv = ("generate", "--model", str(tmp_path), "-p", "hi", "--max-tokens", "4", "--ignore-eos")
    check_refusal(run(*argv), "safetensors")
    answers = [run(*argv, "--load-format", "dummy", "--temperature", "0", "--seed", seed).out for seed in "112"]
    assert answers[0] == answers[1] != answers[2]


# generate


def test_text_to_stdout_and_statistics_to_stderr(generate: Run) -> None:
    result = generate("-p", "hello")
    assert result.code == 0
    [output] = json_lines(generate("-p", "hello", "--json"))
    assert result.out == output["text"] + "\n"
    assert "5 prompt tokens (0 cached), 8 generated in" in result.err
    assert "tokens/s, first token after" in result.err
    assert all(line.startswith("[miniserve] ") for line in result.err.splitlines())


def json_lines(result: Result) -> list[dict[str, Any]]:
    assert result.code == 0
    return [json.loads(line) for line in result.out.splitlines()]


def test_json(generate: Run) -> None:
    result = generate("-p", "hello", "-p", "you", "--json")
    first, second = json_lines(result)
    assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "cached_tokens": 0, "reasoning_tokens": 0}
    assert first["reasoning"] == "" and first["tool_calls"] == []
    assert len(first["prompt_token_ids"]) == 5 and len(second["prompt_token_ids"]) == 3
    assert len(first["token_ids"]) == len(second["token_ids"]) == 8
    assert first["finish_reason"] == "length" and first["stop_reason"] is None
    assert "generated in" not in result.out


def test_several_prompts_in_their_order(generate: Run) -> None:
    prompts = ("-p", "hello", "-p", "you", "-p", "there")
    texts = [output["text"] for output in json_lines(generate(*prompts, "--json"))]
    assert len(set(texts)) == 3
    streamed, whole = generate(*prompts), generate(*prompts, "--no-stream")
    assert streamed.out == "".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts, 1))
    assert whole.out == streamed.out
    assert "13 prompt tokens (0 cached), 24 generated" in streamed.err


def test_prompt_from_stdin(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate("-p", "hello").out
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert generate("-p", "-").out == expected


@pytest.mark.usefixtures("no_loading")
def test_bytes_on_stdin_that_are_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), encoding="utf-8"))
    result = run("generate", "-p", "-")
    check_refusal(result, "the prompt on stdin", "0xe9")


def test_chat(generate: Run) -> None:
    plain, chat, system = (
        json_lines(generate("-p", "x", "--json", *flags))[0]["usage"]["prompt_tokens"]
        for flags in ((), ("--chat",), ("--system", "be kind"))
    )
    assert plain == 1
    assert chat == len("_user: x") + len("_assistant:")  # _ for <sep>, one token
    assert system == chat + len("_system: be kind")


def test_stop(generate: Run) -> None:
    [output] = json_lines(generate("-p", "hello", "--json"))
    stop = next(char for char in output["text"][1:] if char != "\ufffd" and char not in output["text"][0])
    [stopped] = json_lines(generate("-p", "hello", "--json", "--stop", "never", "--stop", stop))
    assert stopped["text"] == output["text"].partition(stop)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_json_schema_and_regex(generate: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert generate("-p", "hello", "--json-schema", str(schema)).out in ('"yes"\n', '"no"\n')
    assert re.fullmatch("[xy]{3}\n", generate("-p", "hello", "--regex", "[xy]{3}").out)


def test_tools(run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning goes to stderr, and calls are printed each on a line; with --json, all of it is in the object."""
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    lines = {
        "offline-0": f"<think>why</think>So: {call}",
        "offline-1": f"{call}{call}",
        "offline-2": "<think>why</think>no",
    }
    template = ChatTemplate(THINKING_WITH_TOOLS, TOKENIZER.special_tokens)

    def load(_config: EngineConfig) -> LLM:
        parts = make_parts(
            {name: [*tokens(line), EOS] for name, line in lines.items()}, max_model_len=1024, num_blocks=513
        )
        processor = make_input_processor(max_model_len=1024, chat_template=template)
        return LLM.from_parts(replace(parts, input_processor=processor))

    monkeypatch.setattr(generate_command, "_load", load)
    argv = ("generate", "--model", folder, "--tools", str(tools), "-p", "a", "-p", "b", "-p", "c")
    result = run(*argv)
    assert result.out == '--- 1\nSo:\nf({"a": 1})\n--- 2\nf({"a": 1})\nf({"a": 1})\n--- 3\nno\n'
    assert result.err.startswith("why\nwhy\n[miniserve] ")
    first, *_ = json_lines(run(*argv, "--json"))
    assert (first["reasoning"], first["text"]) == ("why", "So:")
    assert first["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}'}]


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("flag", ["--json-schema", "--tools"])
@pytest.mark.parametrize(
    "content", [None, "{", "5", "", "null", '[{"type": "function"}]', '{"minimum": NaN}', "[" * 9999]
)
def test_files_that_cannot_be_used(run: Run, tmp_path: Path, flag: str, content: str | None) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    check_refusal(run("generate", "-p", "hi", flag, str(path)), flag)


@pytest.mark.usefixtures("no_loading")
def test_a_schema_that_is_none(run: Run, tmp_path: Path) -> None:
    """Bug: what was wrong with it was said in the words of the library, and after the model was loaded."""
    path = tmp_path / "file.json"
    path.write_text('{"properties": {"a": {"type": "strng"}}}')
    check_refusal(run("generate", "-p", "hi", "--json-schema", str(path)), "--json-schema is not", "properties.a.type")
    path.write_text('{"minimum": NaN}')
    check_refusal(run("generate", "-p", "hi", "--json-schema", str(path)), "--json-schema", "NaN is no number of JSON")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("flag", ["--system", "--stop", "--regex"])
def test_text_that_is_not_utf_8(run: Run, flag: str) -> None:
    check_refusal(run("generate", "-p", "hi", flag, "caf\udce9"), f"{flag} is not UTF-8: see character 3")


@pytest.mark.usefixtures("no_loading")
def test_one_form_of_the_answer(run: Run) -> None:
    check_refusal(run("generate", "-p", "hi", "--regex", "a", "--json-schema", "x"), "--json-schema")
    check_refusal(run("generate", "-p", "hi", "--regex", ""), "--regex")


def test_seed(generate: Run) -> None:
    def answer(*flags: str) -> str:
        return generate("-p", "hello", "--temperature", "1.5", *flags).out

    assert answer("--seed", "1") == answer("--seed", "1") != answer("--seed", "2")
    assert answer("--seed", "1", "--top-k", "1") == generate("-p", "hello").out


def test_the_models_own_sampling_is_the_default(run: Run, folder: str, tmp_path: Path) -> None:
    """A recommended top_k of 1 makes the answer greedy, unless a flag says otherwise."""
    for path in Path(folder).iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").write_text('{"top_k": 1, "temperature": 1.9}')
    argv = ("generate", "--model", str(tmp_path), "--dtype", "fp32", "-p", "hello", "--max-tokens", "8", "--seed", "0")
    greedy = run(*argv, "--temperature", "0").out
    assert run(*argv).out == greedy
    assert run(*argv, "--top-k", "0").out != greedy


# How it ends


def test_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_config: EngineConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "_load", interrupted)
    assert run("generate", "-p", "hi") == Result(130, "", "miniserve: interrupted\n")


def start(folder: str, *argv: str) -> subprocess.Popen[bytes]:
    """A process of its own that generates for a long time."""
    # A process started in the background of a shell ignores SIGINT; this one shall not.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from miniserve.cli import main; sys.exit(main())"
    )
    flags = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "1", "--ignore-eos", "-p", "hello"]
    return subprocess.Popen(
        [sys.executable, "-c", code, "generate", "--model", folder, *flags, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=BUFFERED,
    )


def test_ctrl_c_while_generating(folder: str) -> None:
    process = start(folder)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "miniserve: interrupted"
    assert "Traceback" not in err.decode()


def test_a_reader_that_goes_away(folder: str) -> None:
    """As `| head` does."""
    process = start(folder)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=TIMEOUT) == 1
    assert all(line.startswith("[miniserve] ") for line in err.splitlines()), err


@pytest.mark.parametrize("argv", [("generate", "--help"), ("serve",)])
def test_a_reader_that_is_gone_before_the_first_word(argv: tuple[str, ...]) -> None:
    """Bug: what was still buffered at the end made the interpreter complain about a broken pipe, with code 120."""
    code = "import sys; from miniserve.cli import main; sys.stdin.read(); print('so far'); sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=BUFFERED,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()  # only now does it write
    err = process.stderr.read().decode()
    assert process.wait(timeout=TIMEOUT) == 1
    assert "Exception" not in err and "Traceback" not in err
