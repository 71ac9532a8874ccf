"""Hostile grammars: each is refused, or does no harm; nothing here may stop, fill or end this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest

from miniserve.errors import InternalError, InvalidParameterError
from miniserve.sampling_params import StructuredOutput
from miniserve.structured import rehearsal as rehearsal_module
from miniserve.structured.library import Vocabulary
from miniserve.structured.rehearsal import Rehearsal
from tests.structured.grammars import END_IDS, Model, allowed

AMBIGUOUS = "start: a\na: a a | a a a | " + " | ".join(f'a "{chr(97 + i % 26)}"' for i in range(10_000)) + ' | "x"'
HARMFUL: dict[str, tuple[Any, str]] = {
    "nested 10,000 deep": ("json", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "nested 10,000 deep within a grammar": ("grammar", "start: %json " + '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "nested brackets": ("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "nested rules": ("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "a chain of rules that overflows the stack": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "x"',
    ),
    "a chain of references that overflows the stack": (
        "json",
        json.dumps({"$ref": "#/0"} | {str(i): {"items": {"$ref": f"#/{i + 1}"}} for i in range(3000)} | {"3000": {}}),
    ),
    "compiles for hours": ("grammar", "start: A\nA: " + " & ".join(f"/.*{i:03}.*/" for i in range(300))),
    "an ambiguous rule": ("grammar", AMBIGUOUS[:131_072].rpartition(" | ")[0]),
    "loops": ("grammar", "start: a\na: b\nb: a"),
    "refers to itself": ("json", '{"$ref": "#"}'),
    "grows by doubling": (
        "grammar",
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "x"',
    ),
    "many combinations": (
        "json",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"{k}{i}": {}}} for k in "ab"]} for i in range(25)]}),
    ),
}  # fmt: skip
HARMLESS: dict[str, tuple[Any, str]] = {
    "exponential as an automaton": ("regex", "(a|b)*a(a|b){40}"),
    "ten million": ("regex", "[a-z]{1,10000000}"),
    "ten million of a rule": ("grammar", 'start: a{1,10000000}\na: "x" | "y" a'),
    "a million items": ("json", '{"type":"array","items":{"type":"integer"},"minItems":1000000}'),
    "ten million characters": ("json", '{"type":"string","maxLength":10000000}'),
    "a tree that need not end": ("json", '{"type":"object","properties":{"x":{"$ref":"#"}}}'),
    "an enum of 10,000": ("json", json.dumps({"enum": [f"v{i}" for i in range(10_000)]})),
    "a long text": ("choice", json.dumps(["a" * 100_000])),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_what_would_do_harm_is_refused(model: Model, name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        model.compiler.compile(StructuredOutput(*HARMFUL[name]))
    assert len(str(caught.value)) < 400


def wide(prefix: str) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}{i}": {"type": "integer"} for i in range(200)}}


def test_what_is_too_much_within_an_object_is_refused(model: Model) -> None:
    """Bug: chance ended the object at once, and the answer ended in an error when it came further in."""
    several = {"anyOf": [wide(prefix) for prefix in "abcdefgh"]}
    schema = {"type": "object", "properties": {"x": several, "y": {"type": "integer"}}, "additionalProperties": False}
    with pytest.raises(InvalidParameterError, match="too much may come next at one place"):
        model.compiler.compile(StructuredOutput.json(schema))


def test_what_is_too_much_deep_within_is_refused(model: Model) -> None:
    """Bug: no rehearsal came so deep, and the answer ended in an error there."""
    fields = {f"f{i}": {"type": "string"} for i in range(6)}
    schema: dict[str, Any] = {"anyOf": [{"type": "object", "properties": {**fields, f"z{i}": {}}} for i in range(200)]}
    for level in range(8):
        name = f"level{level}"
        schema = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    with pytest.raises(InvalidParameterError, match="too much may come next at one place"):
        model.compiler.compile(StructuredOutput.json(schema))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hostile_is_followed(model: Model, name: str) -> None:
    matcher = model.compiler.compile(StructuredOutput(*HARMLESS[name])).start()
    for _ in range(20):
        if not matcher.complete:
            matcher.accept([max(allowed(matcher) - END_IDS)])


def test_other_threads_run_meanwhile(model: Model) -> None:
    """It would take gigabytes, too."""
    count, done = 0, threading.Event()

    def compile_() -> None:
        with pytest.raises(InvalidParameterError):
            model.compiler.compile(StructuredOutput("regex", "a?" * 60_000))
        done.set()

    thread = threading.Thread(target=compile_)
    thread.start()
    while not done.wait(0.001):
        count += 1
    thread.join()
    assert count > 100


def test_after_a_harmful_grammar_others_are_compiled(model: Model) -> None:
    """The child dies of it, and the next one is started when it is needed."""
    with pytest.raises(InvalidParameterError):
        model.compiler.compile(StructuredOutput(*HARMFUL["a chain of rules that overflows the stack"]))
    processes = [rehearsal._process for rehearsal in model.compiler._rehearsals]
    assert processes[-1] is None
    model.compiler.compile(StructuredOutput("regex", "afterwards"))
    assert model.compiler._rehearsals[-1]._process is not None


def letters() -> Vocabulary:
    return Vocabulary([bytes([byte]) for byte in range(97, 123)] + [b"<end>"], [26], [26])


def test_the_child_ends_with_its_parent() -> None:
    rehearsal = Rehearsal(letters)
    assert rehearsal.refusal("start: /[a-c]+/") == ""
    process = rehearsal._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as the parent's end would do
    assert process.wait(10) == 0
    rehearsal.close()
    assert "look-ahead" in rehearsal.refusal("start: /(?=a)b/")  # with a new child
    rehearsal.close()
    rehearsal.close()


def started() -> tuple[Rehearsal, psutil.Process]:
    rehearsal = Rehearsal(letters)
    assert rehearsal.refusal('start: "a"') == ""
    assert rehearsal._process is not None
    return rehearsal, psutil.Process(rehearsal._process.pid)


def test_a_child_that_was_killed_costs_nobody_anything() -> None:
    """Bug: the next grammar was said to be too hard, whatever it was."""
    rehearsal, child = started()
    child.kill()
    child.wait()
    assert rehearsal.refusal('start: "a"') == ""
    rehearsal.close()


@pytest.mark.parametrize("what", ["kill", "suspend"])
def test_a_child_that_is_killed_or_held_up_at_work(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: who waited for one that stood still did so for ever, and so did the end of the server."""
    monkeypatch.setattr(rehearsal_module, "ANSWER_SECONDS", 1.0)
    rehearsal, child = started()
    child.suspend()
    timer = threading.Timer(0.2, getattr(child, what))
    timer.start()
    with pytest.raises(InternalError, match="was killed: try again"):
        rehearsal.refusal('start: "a"')
    timer.join()
    assert not child.is_running()
    assert rehearsal.refusal('start: "a"') == ""
    rehearsal.close()


def test_a_system_without_limits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "name", "nt")
        elsewhere.setattr(sys, "platform", "win32")
        with pytest.raises(InvalidParameterError, match=r"need a POSIX system: .* on win32") as caught:
            Rehearsal(letters).refusal('start: "a"')
    assert caught.value.param == "structured_outputs"


def test_it_can_be_imported_where_there_are_no_limits() -> None:
    """Bug: on Windows, which has no such module, not even free text could be served."""
    code = "import psutil, sys; sys.modules['resource'] = None; import miniserve.structured.compiler"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_child_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(InternalError, match=r"cannot be started$"):
        Rehearsal(letters).refusal('start: "a"')
