"""The chat, key by key, against a server that is told what to say."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from textual.containers import VerticalScroll
from textual.events import Key
from textual.widgets import Footer
from textual.widgets._footer import FooterKey
from textual.widgets.markdown import MarkdownBlock

from tests.tui.chat_server import DEADLINE, ChatServer, answer, delta, ending, event, reasoning_delta
from tests.tui.screen import Screen, play


def block_of(screen: Screen, text: str) -> MarkdownBlock:
    """What shows `text`."""
    [block] = [block for block in screen.app.query(MarkdownBlock) if text in str(block.render())]
    return block


def keys(screen: Screen) -> set[str]:
    """What the keys in the last line are for."""
    return {key.description for key in screen.app.query_one(Footer).query(FooterKey)}


def test_an_answer_is_shown_with_its_numbers() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("What is the capital?")
        await screen.until_shown("40 tokens, 32 cached (80%)")
        text = screen.everything()
        assert "What is the capital?" in text and "It is Paris." in text
        assert "7 tokens" in text and "first token after" in text and "about" not in text
        assert "tiny" in text, "the model's name is in the title"
        assert screen.prompt.text == ""

    with ChatServer(answer("It is", " Paris.")) as server:
        play(scenario, base_url=server.base_url)


def test_the_request_is_what_the_flags_say() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("cached")

    with ChatServer(answer("Yes")) as server:
        flags: dict[str, Any] = {
            "model": "org/m",
            "max_tokens": 9,
            "temperature": 0.0,
            "system": "Be brief.",
            "api_key": "k",
        }
        play(scenario, base_url=server.base_url, **flags)
        request = server.requests[0]
    assert request.pop("headers")["Authorization"] == "Bearer k"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert request == {"model": "org/m", "max_tokens": 9, "temperature": 0.0, "messages": messages, **options}


def test_what_no_flag_says_is_left_to_the_server() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("cached")

    with ChatServer(answer("Yes")) as server:
        play(scenario, base_url=server.base_url)
        request = server.requests[0]
    assert request["model"] == "tiny"
    assert "max_tokens" not in request and "temperature" not in request and len(request["messages"]) == 1


def test_the_second_turn_sends_the_first_and_a_new_conversation_does_not() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("one")
        await screen.until_shown("first")
        await screen.ask("two")
        await screen.until_shown("second")
        await screen.until_idle()
        await screen.pilot.press("ctrl+r")
        assert not screen.answers and "one" not in screen.everything()
        await screen.ask("three")
        await screen.until_shown("third")

    with ChatServer(answer("first"), answer("second"), answer("third")) as server:
        play(scenario, base_url=server.base_url)
        sent = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert sent == [["one"], ["one", "first", "two"], ["three"]]


def test_letters_before_enter_are_part_of_the_question() -> None:
    """With fast typing, enter overtook the letters before it: the app acted on it, they still went to the prompt."""

    async def scenario(screen: Screen) -> None:
        await screen.until_idle()
        for letter in "quickly":
            screen.app.post_message(Key(letter, letter))
        screen.app.post_message(Key("enter", "\r"))
        await screen.until_shown("cached")
        assert screen.prompt.text == ""

    with ChatServer(answer("Yes")) as server:
        play(scenario, base_url=server.base_url)
        assert server.requests[0]["messages"][0]["content"] == "quickly"


def test_markdown_is_rendered_while_it_streams() -> None:
    more = threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.ask("Show code")
        await screen.until(lambda: screen.app.query("MarkdownH2"), "a heading before the answer ended")
        more.set()
        await screen.until(lambda: screen.app.query("MarkdownFence"), "a code block")
        await screen.until_shown("cached")
        assert "##" not in screen.everything()

    with ChatServer([delta("## Ti"), delta("tle\n\n"), more, delta("```py\nx = 1\n```\n"), *ending()]) as server:
        play(scenario, base_url=server.base_url)


def test_line_separators_and_split_characters_in_the_stream() -> None:
    """A client that split lines as str.splitlines() does would cut the JSON at U+2028 and U+0085."""
    wire = b"".join(answer("a\u2028b\x85c", " größer 😀"))

    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("cached")
        assert screen.answers[0].meter.text == "a\u2028b\x85c größer 😀"

    with ChatServer([wire[i : i + 1] for i in range(len(wire))]) as server:
        play(scenario, base_url=server.base_url)


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("[bold]x[/nope] [link=a]")
        await screen.until_shown("cached")
        assert "[bold]x[/nope] [link=a]" in screen.everything()

    with ChatServer(answer("[red]y[/")) as server:
        play(scenario, base_url=server.base_url)


def test_escape_closes_the_stream_and_keeps_what_came() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Count")
        await screen.until_shown("1, 2")
        await screen.pilot.press("escape")
        await screen.until_shown("stopped")
        await screen.until(lambda: not server.gone.empty(), "the server sees the connection close")
        assert "about 1 tokens" in screen.everything()
        await screen.ask("Go on")
        await screen.until_shown("3, 4")

    with ChatServer([delta("1, 2"), threading.Event()], answer("3, 4")) as server:
        play(scenario, base_url=server.base_url)
        assert [m["content"] for m in server.requests[1]["messages"]] == ["Count", "1, 2", "Go on"]


def test_escape_before_the_first_token_gives_the_question_back() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Think")
        await screen.until(lambda: server.requests, "the request arrives")
        await screen.pilot.press("escape")
        await screen.until_shown("stopped")
        await screen.until(lambda: screen.prompt.text == "Think", "the question is back")
        assert "0 tokens" not in screen.everything(), "nothing came, so there is nothing to count"
        await screen.ask("Think")
        await screen.until_shown("Done")

    with ChatServer([b": wait\n\n", threading.Event()], answer("Done")) as server:
        play(scenario, base_url=server.base_url)
        assert len(server.requests[1]["messages"]) == 1


def test_quitting_during_an_answer_ends_the_request() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Count")
        await screen.until_shown("1, 2")
        await screen.pilot.press("ctrl+c")

    with ChatServer([delta("1, 2"), threading.Event()]) as server:
        app = play(scenario, base_url=server.base_url)
        assert server.gone.get(timeout=DEADLINE)
    assert app.return_code == 0


def test_quitting_before_the_first_token() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Think")
        await screen.until(lambda: server.requests, "the request arrives")
        await screen.pilot.press("ctrl+c")

    with ChatServer([b": wait\n\n", threading.Event()]) as server:
        assert play(scenario, base_url=server.base_url).return_code == 0
        assert server.gone.get(timeout=DEADLINE)


def test_a_new_conversation_during_an_answer_ends_the_request_and_keeps_nothing() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Count")
        await screen.until_shown("1, 2")
        await screen.pilot.press("ctrl+r")
        await screen.until(lambda: not server.gone.empty(), "the server sees the connection close")
        await screen.ask("Hello")
        await screen.until_shown("Hi")

    with ChatServer([delta("1, 2"), threading.Event()], answer("Hi")) as server:
        play(scenario, base_url=server.base_url)
        assert [m["content"] for m in server.requests[1]["messages"]] == ["Hello"]


def test_enter_during_an_answer_sends_nothing_and_keeps_the_text() -> None:
    go_on = threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.ask("one")
        await screen.until_shown("slow")
        screen.prompt.text = "two"
        await screen.pilot.press("enter")
        assert screen.prompt.text == "two" and len(server.requests) == 1
        go_on.set()
        await screen.until_shown("cached")

    with ChatServer([delta("slow"), go_on, *ending()]) as server:
        play(scenario, base_url=server.base_url)


def test_an_answer_cut_by_its_length_says_so() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("cut at the length limit")

    with ChatServer([delta("and so on and"), *ending(finish_reason="length")]) as server:
        play(scenario, base_url=server.base_url)


def test_a_usage_without_details_is_no_cache_hit() -> None:
    usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None}

    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("prompt 5 tokens, 0 cached (0%)")

    with ChatServer([delta("Yes"), event(choices=[], usage=usage), b"data: [DONE]\n\n"]) as server:
        play(scenario, base_url=server.base_url)


@pytest.mark.parametrize("names", [("reasoning_content", "reasoning"), ("reasoning",)], ids=str)
def test_reasoning_is_shown_dimmed_above_the_answer_and_not_sent_back(names: tuple[str, ...]) -> None:
    more, begin = threading.Event(), threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.ask("What is the capital?")
        await screen.until_shown("The user asks")
        more.set()
        await screen.until_shown("The user asks about France.")
        assert "about 2 tokens" in screen.everything(), "reasoning counts while it comes"
        begin.set()
        await screen.until_shown("40 tokens, 32 cached (80%)")
        thought, said = (block_of(screen, text) for text in ("The user asks", "It is Paris."))
        await screen.until(lambda: said.region.height > 0, "the answer gets its place")
        assert thought.region.bottom <= said.region.y and thought.opacity < said.opacity == 1
        await screen.ask("And of Spain?")
        await screen.until_shown("Madrid")

    thoughts = [reasoning_delta("The user asks", *names), more, reasoning_delta(" about **France**.", *names)]
    with ChatServer([*thoughts, begin, *answer("It is", " Paris.")], answer("Madrid.")) as server:
        play(scenario, base_url=server.base_url)
        second = server.requests[1]["messages"]
    assert second == [
        {"role": "user", "content": "What is the capital?"},
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "And of Spain?"},
    ]


def test_a_key_hides_the_reasoning_and_is_there_only_where_there_is_some() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("one")
        await screen.until_shown("cached")
        await screen.until(lambda: "Reasoning" not in keys(screen), "an answer without reasoning offers no key")
        await screen.ask("two")
        await screen.until_shown("Yes")
        await screen.until(lambda: "Reasoning" in keys(screen), "the key is offered")
        await screen.pilot.press("ctrl+t")
        await screen.until(lambda: not block_of(screen, "Hmm").region, "it is hidden")
        assert block_of(screen, "Yes").region
        await screen.ask("three")
        await screen.until_shown("Well")
        await screen.until_idle()
        assert not block_of(screen, "Well").region, "hidden means that of the next answers too"
        await screen.pilot.press("ctrl+t")
        await screen.until(lambda: block_of(screen, "Well").region, "it is shown again")
        await screen.pilot.press("ctrl+r")
        await screen.until(lambda: "Reasoning" not in keys(screen), "a new conversation has none")

    thoughtful = [[reasoning_delta(text), *answer("Yes")] for text in ("Hmm", "Well")]
    with ChatServer(answer("No"), *thoughtful) as server:
        play(scenario, base_url=server.base_url)


def test_escape_while_it_reasons_gives_the_question_back() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Think")
        await screen.until_shown("Hmm")
        await screen.pilot.press("escape")
        await screen.until_shown("stopped")
        await screen.until(lambda: screen.prompt.text == "Think", "the question is back")
        await screen.ask("Think")
        await screen.until_shown("Done")

    with ChatServer([reasoning_delta("Hmm"), threading.Event()], answer("Done")) as server:
        play(scenario, base_url=server.base_url)
        assert [m["content"] for m in server.requests[1]["messages"]] == ["Think"]


def test_a_long_answer_is_followed_until_the_user_scrolls_back() -> None:
    more, end = threading.Event(), threading.Event()
    paragraphs = "".join(f"paragraph {i}\n\n" for i in range(40))

    async def scenario(screen: Screen) -> None:
        chat = screen.app.query_one(VerticalScroll)
        await screen.ask("Much")
        await screen.until(lambda: chat.max_scroll_y > 24 and chat.scroll_y == chat.max_scroll_y, "it follows")
        await screen.pilot.press("pageup", "pageup")
        await screen.until(lambda: chat.scroll_y < chat.max_scroll_y - 24, "it scrolls back")
        where = chat.scroll_y
        height = chat.max_scroll_y
        more.set()
        await screen.until(lambda: chat.max_scroll_y > height, "it grows")
        assert chat.scroll_y == where
        end.set()
        await screen.until_idle()

    with ChatServer([delta(paragraphs), more, delta(paragraphs), end, *ending()]) as server:
        play(scenario, base_url=server.base_url)


def test_a_smaller_screen_wraps_what_is_shown() -> None:
    async def scenario(screen: Screen) -> None:
        await screen.ask("Hi")
        await screen.until_shown("cached")
        height = screen.answers[0].size.height
        await screen.pilot.resize_terminal(30, 12)
        await screen.until(lambda: screen.answers[0].size.height > height, "the text wraps")
        assert screen.prompt.region.bottom <= 12 and screen.prompt.size.width <= 30

    with ChatServer(answer("many words " * 20)) as server:
        play(scenario, base_url=server.base_url)


def test_a_narrow_screen_has_room_for_the_answer() -> None:
    """The numbers took three of the four lines that the conversation has there."""
    more = threading.Event()

    async def scenario(screen: Screen) -> None:
        await screen.pilot.resize_terminal(40, 10)
        await screen.ask("Hi")
        await screen.until_shown("It is")
        more.set()
        await screen.until_shown("7 tokens · ")
        await screen.until_idle()
        numbers = screen.answers[0].query_one(".numbers")
        await screen.until(lambda: numbers.size.height == 1, "the numbers take one line")
        text = screen.everything()
        assert "/s · 32 cached" in text and "first token after" not in text
        await screen.pilot.resize_terminal(80, 24)
        await screen.until_shown("prompt 40 tokens, 32 cached (80%)")

    # The second delta comes after the first is on the screen: two at one time have no rate.
    with ChatServer([delta("It is"), more, delta(" Paris."), *ending()]) as server:
        play(scenario, base_url=server.base_url)
