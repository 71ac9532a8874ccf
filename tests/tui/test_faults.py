"""Servers that refuse, break off, or are not there: a message, and another try."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.tui.chat_server import ChatServer, answer, delta, ending, event, reasoning_delta
from tests.tui.screen import Screen, play


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_server_that_comes_later_is_found() -> None:
    port = free_port()

    async def scenario(screen: Screen) -> None:
        await screen.until_shown("trying again in")
        assert f"no answer from http://127.0.0.1:{port}/v1: cannot connect" in screen.everything()
        with ChatServer(answer("Here"), port=port):
            await screen.until_shown("tiny")
            await screen.ask("Hi")
            await screen.until_shown("Here")
            assert "trying again" not in screen.everything()

    play(scenario, base_url=f"http://127.0.0.1:{port}/v1")


def test_a_question_waits_for_a_server_that_went_away() -> None:
    server = ChatServer(answer("first"))

    async def scenario(screen: Screen) -> None:
        with server:
            await screen.ask("one")
            await screen.until_shown("cached")
        await screen.ask("two")
        await screen.until_shown("trying again in")
        with ChatServer(answer("second"), port=server.port) as again:
            await screen.until_shown("second")
            assert [m["content"] for m in again.requests[0]["messages"]] == ["one", "first", "two"]

    play(scenario, base_url=server.base_url)


def test_escape_ends_the_trying() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.until_shown("trying again in")
        await screen.pilot.press("escape")
        await screen.until_idle()
        assert "trying again" not in screen.everything()

    play(scenario, base_url=f"http://127.0.0.1:{free_port()}/v1")


def test_a_server_that_is_not_ready_is_asked_again() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("HTTP 503: the reason; trying again")
        await screen.until_shown("Ready now")

    with ChatServer([503], answer("Ready now")) as server:
        play(scenario, base_url=server.base_url)


def test_the_problem_goes_when_the_answer_comes() -> None:
    """It stood below the answer until the answer's end."""
    rest = threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("trying again in")
        await screen.until_shown("Half")
        assert "trying again" not in screen.everything()
        rest.set()
        await screen.until_shown("done")

    with ChatServer([503], [delta("Half"), rest, delta(" and done"), *ending()]) as server:
        play(scenario, base_url=server.base_url)


def test_a_refusal_is_shown_and_the_question_given_back() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("too long")
        await screen.until_shown("HTTP 400: the reason")
        await screen.until_idle()
        assert screen.prompt.text == "too long"
        await screen.ask("shorter")
        await screen.until_shown("Better")

    with ChatServer([400], answer("Better")) as server:
        play(scenario, base_url=server.base_url)
        assert [m["content"] for m in server.requests[1]["messages"]] == ["shorter"]


def test_a_wrong_key_names_the_flag() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("HTTP 401: the reason (see --api-key)")

    with ChatServer([401]) as server:
        play(scenario, base_url=server.base_url)


def test_an_error_in_the_stream() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("the server broke off: out of luck")
        await screen.until_idle()
        assert screen.prompt.text == "Hi" and "Well" in screen.everything()

    with ChatServer([delta("Well"), event(error={"message": "out of luck"}), b"data: [DONE]\n\n"]) as server:
        play(scenario, base_url=server.base_url)


def test_a_stream_that_just_ends_is_no_whole_answer() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("the server broke off the answer; enter asks again")
        await screen.until_idle()
        assert screen.prompt.text == "Hi"
        await screen.pilot.press("enter")
        await screen.until_shown("Whole")

    with ChatServer([delta("Half")], answer("Whole")) as server:
        play(scenario, base_url=server.base_url)
        assert len(server.requests[1]["messages"]) == 1


@pytest.mark.parametrize("script", [[None], [b": wait\n\n", None], [b": wait\n\n"]], ids=["at-once", "broken", "ended"])
def test_a_connection_that_breaks_before_the_answer_is_explained(script: list[bytes | None]) -> None:
    """The words were those of the HTTP library."""

    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("the connection broke before the answer was there; the server's log may say why")
        assert f"no answer from {server.base_url}: " in screen.everything()
        assert "trying again in 0.5 s, escape stops" in screen.everything()
        await screen.until_shown("Whole")

    with ChatServer(script, answer("Whole")) as server:
        play(scenario, base_url=server.base_url)
        assert len(server.requests[1]["messages"]) == 1


@pytest.mark.parametrize("begin", [delta("Half"), reasoning_delta("Half")], ids=["text", "reasoning"])
def test_a_connection_that_breaks_in_the_answer_is_not_tried_again(begin: bytes) -> None:
    """Another try would show the beginning twice."""
    shown = threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("Half")
        shown.set()
        await screen.until_shown("the server broke off the answer; enter asks again")
        await screen.until_idle()
        assert screen.prompt.text == "Hi"

    with ChatServer([begin, shown, None]) as server:
        play(scenario, base_url=server.base_url)


def test_what_is_no_chat_server_is_named() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("is this an OpenAI API?")

    with ChatServer([b"data: <html>\n\n"]) as server:
        play(scenario, base_url=server.base_url)


def test_chunks_of_an_unknown_shape_are_no_traceback() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("is this an OpenAI API?")

    with ChatServer([b'data: {"choices": [{"text": "x"}]}\n\n']) as server:
        play(scenario, base_url=server.base_url)
