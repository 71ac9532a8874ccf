from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import pytest
from rich.console import Console

from demos import kv_demo
from demos.kv_demo import BlockView, ToyServer, tell


@dataclass
class Scene:
    """A step as it stood, out of reach of the steps after it."""

    lesson: str
    calls: tuple[str, ...]
    blocks: dict[int, BlockView]
    tables: dict[str, list[int]]
    free_list: list[int]

    def ids(self, kind: str) -> list[int]:
        return [block_id for block_id, view in self.blocks.items() if view.kind == kind]


def scenes() -> dict[str, Scene]:
    toy = ToyServer()
    return {
        step.title: Scene(
            step.lesson,
            step.calls,
            {view.state.block_id: view for view in toy.view()},
            {name: list(request.block_ids) for name, request in toy.requests.items()},
            toy.kv.pool.free_block_ids(),
        )
        for step in tell(toy)
    }


def console(width: int = 80, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, width=width, height=24, force_terminal=terminal, highlight=False), screen


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_prompt_has_no_hashes_until_it_is_computed() -> None:
    story = scenes()
    arrived, computed = story["A arrives and gets room"], story["A's prompt is computed"]
    assert arrived.tables == computed.tables == {"A": [1, 2, 3, 4]}
    assert [arrived.blocks[i].state.hash for i in (1, 2, 3, 4)] == [None] * 4
    assert [i for i, view in computed.blocks.items() if view.state.hash] == [1, 2, 3]
    assert "blocks 1, 2 and 3" in computed.lesson and "Block 4 is not full" in computed.lesson


def test_a_shared_beginning_is_held_twice() -> None:
    scene = scenes()["B shares A's beginning"]
    assert scene.tables == {"A": [1, 2, 3, 4], "B": [1, 2, 5, 6]}
    assert scene.ids("shared") == [1, 2] and scene.ids("held") == [3, 4, 5, 6]
    assert scene.blocks[1].state.ref_count == 2 and scene.blocks[1].holders == ("A", "B")
    assert "blocks 1 and 2" in scene.lesson and "held 2 times" in scene.lesson and "6 tokens" in scene.lesson


def test_decode_fills_a_block_and_then_takes_one() -> None:
    story = scenes()
    filled, grown = story["A decodes a token"], story["A decodes one more, and needs a block"]
    assert filled.tables["A"] == [1, 2, 3, 4] and filled.blocks[4].state.hash is not None
    assert grown.tables["A"] == [1, 2, 3, 4, 7] and grown.blocks[7].words == ("bends",)
    assert "block 7" in grown.lesson


def test_freed_blocks_stay_cached_at_the_tail_and_an_empty_one_goes_to_the_head() -> None:
    scene = scenes()["A is done"]
    assert scene.free_list == [7, 8, 9, 10, 11, 4, 3]
    assert scene.ids("cached") == [3, 4] and scene.blocks[7].kind == "empty"
    assert scene.tables == {"B": [1, 2, 5, 6]} and scene.blocks[1].state.ref_count == 1
    assert "Blocks 1 and 2 stay" in scene.lesson and "blocks 3 and 4 can still be found" in scene.lesson
    assert "What block 7 holds" in scene.lesson


def test_free_blocks_are_hit() -> None:
    scene = scenes()["C goes on with A's chat"]
    assert scene.calls[0] == "kv.find_cached_prefix(C) -> [1, 2, 3, 4]"
    assert scene.tables["C"] == [1, 2, 3, 4, 7] and scene.free_list == [8, 9, 10, 11]
    assert "Of 19 tokens, 3 are computed" in scene.lesson


def test_the_least_recently_used_hash_is_forgotten() -> None:
    story = scenes()
    before, after = story["B is done"], story["D takes all the room"]
    assert before.free_list == [6, 8, 9, 10, 11, 5] and before.ids("cached") == [5]
    assert "the empty one, block 6" in before.lesson and "the cached one, block 5" in before.lesson
    assert after.tables["D"] == before.free_list and after.free_list == []
    forgotten = before.blocks[5].state.hash
    assert forgotten is not None and forgotten not in [view.state.hash for view in after.blocks.values()]
    assert "blocks 6, 8, 9, 10 and 11, all empty, and only then block 5" in after.lesson


def test_a_refused_request_changes_nothing() -> None:
    story = scenes()
    before, after = story["D takes all the room"], story["E finds no room"]
    assert after.calls == ("kv.find_cached_prefix(E) -> [1, 2]", "kv.allocate(E, 6, [1, 2]) -> False")
    assert after.blocks == before.blocks and after.tables == {**before.tables, "E": []}


def test_the_end_of_a_sequence_is_evicted_first() -> None:
    scene = scenes()["C is done, and E gets in"]
    assert scene.tables["E"] == [1, 2, 7, 4] and scene.ids("cached") == [3]
    assert "takes block 7, which is empty" in scene.lesson
    assert "block 4 is forgotten, block 3 is kept" in scene.lesson


def test_no_cached_block_is_taken_while_one_is_empty() -> None:
    for title, scene in scenes().items():
        kinds = [scene.blocks[block_id].kind for block_id in scene.free_list]
        assert kinds == sorted(kinds, key=["empty", "cached"].index), title


def test_every_drawing_is_true() -> None:
    """What a block shows must be what its holders wrote there, and its hash must lead to it and to equal words."""
    toy = ToyServer()
    meaning: dict[bytes, tuple[str, ...]] = {}
    for _ in tell(toy):
        views = {view.state.block_id: view for view in toy.view()}
        for view in views.values():
            assert view.state.ref_count == len(view.holders)
            if view.state.hash is not None:
                assert len(view.words) == kv_demo.BLOCK_SIZE
                assert toy.kv.pool.lookup(view.state.hash) == view.state.block_id
                assert meaning.setdefault(view.state.hash, view.words) == view.words
        for request in toy.requests.values():
            words = [word for block_id in request.block_ids for word in views[block_id].words]
            token_ids = [toy._token_id(word) for word in words]
            assert token_ids == request.token_ids[: request.num_computed_tokens]


def test_a_step_fits_a_terminal_of_24_lines() -> None:
    toy = ToyServer()
    before = toy.view()
    for step in tell(toy):
        output, screen = console()
        output.print(kv_demo.draw(toy, step, "1 of 13", before, 80))
        lines = screen.getvalue().splitlines()
        assert len(lines) <= 23, step.title  # one is left for the question
        assert "…" not in screen.getvalue(), step.title
        for view in toy.view():
            assert " ".join(view.words) in screen.getvalue(), step.title
        before = toy.view()


@pytest.mark.parametrize("width", [30, 50, 80, 120, 200])
def test_all_blocks_are_drawn_at_any_width(width: int) -> None:
    output, screen = console(width)
    kv_demo.run(pause=False, console=output)
    first = screen.getvalue().split("2 of 13")[0]
    assert all(f" {block_id} empty" in first for block_id in range(1, kv_demo.NUM_BLOCKS))
    assert max(map(len, first.splitlines())) <= min(width, kv_demo.MAX_WIDTH)


def test_changes_are_marked() -> None:
    output, screen = console()
    kv_demo.run(pause=False, console=output)
    step = screen.getvalue().split("6 of 13")[1].split("7 of 13")[0]
    assert "7 held by A *" in step and step.count("*") == 2  # and the legend's


@pytest.mark.parametrize(("keys", "num_steps"), [("\n\nq\n", 3), ("Q\n", 1), ("", 1), ("\n" * 12, 13)])
def test_enter_goes_on_and_q_or_the_end_of_input_quits(
    monkeypatch: pytest.MonkeyPatch, keys: str, num_steps: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard(keys))
    output, screen = console(terminal=True)
    kv_demo.run(console=output)
    assert screen.getvalue().count(" of 13: ") == num_steps


@pytest.mark.parametrize("stdin", [None, io.StringIO("")])
def test_nobody_is_waited_for_without_a_keyboard(monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO | None) -> None:
    """A closed stdin is None in Python, and asking it for a terminal was a crash."""
    monkeypatch.setattr(sys, "stdin", stdin)
    output, screen = console(terminal=True)
    kv_demo.run(console=output)
    assert screen.getvalue().count(" of 13: ") == 13


def test_ctrl_c_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr("builtins.input", interrupt)
    output, screen = console(terminal=True)
    with pytest.raises(KeyboardInterrupt):
        kv_demo.run(console=output)
    assert screen.getvalue().endswith("> \n")
