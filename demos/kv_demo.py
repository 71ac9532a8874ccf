"""`kv-demo`: the KV cache manager at work on a pool that is small enough to see, one step at a time.

Owns a story of five requests and its drawing. The manager is the server's own: every block that is drawn, and every
block id in the text, is read from it. Knows no scheduler and no model: a word is a token here, and its keys and values
are the word itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from miniserve.core.block_pool import BlockState
from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request
from miniserve.sampling_params import SamplingParams

NUM_BLOCKS = 12
BLOCK_SIZE = 4

RULES = "you are a kind bot so be brief"  # what A, B, C and E begin with: two whole blocks
PROMPT_A = f"{RULES} why is the sky blue by day?"
ANSWER_A = ("air", "bends")
PROMPT_B = f"{RULES} why is ice cold to touch?"
PROMPT_C = f"{PROMPT_A} {' '.join(ANSWER_A)} at dusk?"
PROMPT_D = "tell me of a fox who met an owl in the wood at dusk and they sang a long song to dawn"

# The colour of a block says who has it, or whether what a free block holds can be found.
STYLES = {
    "reserved": "dim",
    "empty": "white on bright_black",
    "cached": "black on cyan",
    "held": "black on green",
    "shared": "black on yellow",
}
CELL_WIDTH = 19  # of a block's drawing, with one border
MAX_WIDTH = 100


def run(*, pause: bool = True, console: Console | None = None) -> None:
    """Tell the story. With `pause`, and a person at the terminal, wait for Enter after each step; q ends it."""
    console = console or Console(highlight=False)
    waits = pause and console.is_terminal and sys.stdin is not None and sys.stdin.isatty()
    toy = ToyServer()
    before = toy.view()
    num_steps = sum(1 for _ in tell(ToyServer()))
    for number, step in enumerate(tell(toy), start=1):
        if waits:
            console.clear()
        elif number > 1:
            console.print()
        width = min(console.width, MAX_WIDTH)
        console.print(draw(toy, step, f"{number} of {num_steps}", before, width), width=width)
        before = toy.view()
        if waits and number < num_steps and not _goes_on(console):
            return


def _goes_on(console: Console) -> bool:
    try:
        return console.input("Enter: next step, q: quit > ").strip().lower() not in ("q", "quit")
    except EOFError:
        console.print()
        return False
    except KeyboardInterrupt:
        console.print()  # so that what comes next does not stand behind the ^C
        raise


@dataclass(frozen=True, slots=True)
class Step:
    """What happened: the calls of the manager that were made, and what to learn from it."""

    title: str
    calls: tuple[str, ...]
    lesson: str


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block as it is drawn: its state in the pool, the names of its holders, the words that can be read from it."""

    state: BlockState
    holders: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def kind(self) -> str:
        """A key of `STYLES`."""
        if self.state.ref_count:
            return "shared" if self.state.ref_count > 1 else "held"
        return "empty" if self.state.hash is None else "cached"

    def differs(self, other: BlockView) -> bool:
        """Whether more than its place in the free list has changed."""
        return (self.state.hash, self.holders, self.words) != (other.state.hash, other.holders, other.words)


class ToyServer:
    """What a scheduler and a runner do around the manager, by hand. Keeps a list of the calls since the last step.

    Attributes:
        requests: those that run or wait, by name.
        slots: the cache's memory, a word each; slot = block id x block size + offset. Never wiped.
    """

    def __init__(self) -> None:
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self.requests: dict[str, Request] = {}
        self.slots = [""] * (NUM_BLOCKS * BLOCK_SIZE)
        self._vocabulary: list[str] = []
        self._calls: list[str] = []

    def add(self, name: str, prompt: str) -> Request:
        """A new request, which holds nothing yet."""
        token_ids = [self._token_id(word) for word in prompt.split()]
        self.requests[name] = Request(name, token_ids, SamplingParams())
        return self.requests[name]

    def make_room(self, request: Request) -> bool:
        """Give the request blocks for all tokens that it has not computed, if there are enough."""
        name, cached = request.request_id, list[int]()
        if not request.block_ids:
            cached = self.kv.find_cached_prefix(request)
            self._calls.append(f"kv.find_cached_prefix({name}) -> {cached}")
        start = request.num_computed_tokens + len(cached) * BLOCK_SIZE
        fits = self.kv.allocate(request, request.num_tokens - start, cached)
        hits = f", {cached}" if cached else ""
        self._calls.append(f"kv.allocate({name}, {request.num_tokens - start}{hits}) -> {fits}")
        if fits:
            request.num_computed_tokens = start
        return fits

    def compute(self, request: Request) -> None:
        """Write what is missing to its slots. Only now may others find it."""
        for position in range(request.num_computed_tokens, request.num_tokens):
            block_id = request.block_ids[position // BLOCK_SIZE]
            word = self._vocabulary[request.token_ids[position]]
            self.slots[block_id * BLOCK_SIZE + position % BLOCK_SIZE] = word
        request.num_computed_tokens = request.num_tokens
        self.kv.cache_computed_blocks(request)
        self._calls.append(f"kv.cache_computed_blocks({request.request_id})")

    def decode(self, request: Request, word: str) -> None:
        """The model has said `word`: make room for it and compute it."""
        request.token_ids.append(self._token_id(word))
        self.make_room(request)
        self.compute(request)

    def finish(self, request: Request) -> None:
        """The request ends."""
        self.kv.free(request)
        self._calls.append(f"kv.free({request.request_id})")
        del self.requests[request.request_id]

    def step(self, title: str, lesson: str) -> Step:
        """The calls made since the last step, with their lesson."""
        calls, self._calls = tuple(self._calls), []
        return Step(title, calls, lesson)

    def cached_blocks(self) -> list[int]:
        """The blocks that bear a hash, and are found by it, held or free."""
        return [state.block_id for state in self.kv.pool.snapshot() if state.hash is not None]

    def view(self) -> list[BlockView]:
        """All blocks but block 0, by id."""
        return [self._view(state) for state in self.kv.pool.snapshot()]

    def _view(self, state: BlockState) -> BlockView:
        count = 0 if state.hash is None else BLOCK_SIZE
        holders = [request for request in self.requests.values() if state.block_id in request.block_ids]
        for request in holders:  # a block that is not full has no hash, but its holder knows what is in it
            start = request.block_ids.index(state.block_id) * BLOCK_SIZE
            count = max(count, min(request.num_computed_tokens - start, BLOCK_SIZE))
        first = state.block_id * BLOCK_SIZE
        names = tuple(request.request_id for request in holders)
        return BlockView(state, names, tuple(self.slots[first : first + count]))

    def _token_id(self, word: str) -> int:
        if word not in self._vocabulary:
            self._vocabulary.append(word)
        return self._vocabulary.index(word)


# The story


def tell(toy: ToyServer) -> Iterator[Step]:
    """All steps, in order. After each one `toy` is in the state that the step describes."""
    yield toy.step(
        "An empty pool",
        f"{toy.kv.pool.capacity} empty blocks of {BLOCK_SIZE} tokens wait in one list; pos 0, its front, goes next. "
        "Block 0 is reserved: inputs that are padded to a fixed size write the keys and values of the padding there.",
    )
    yield from _compute_and_share(toy)
    yield from _decode_and_free(toy)
    yield from _hit_what_is_free(toy)
    yield from _evict(toy)
    yield from _wait_for_room(toy)


def _compute_and_share(toy: ToyServer) -> Iterator[Step]:
    a = toy.add("A", PROMPT_A)
    toy.make_room(a)
    spare = len(a.block_ids) * BLOCK_SIZE - a.num_tokens
    yield toy.step(
        "A arrives and gets room",
        f"A's {a.num_tokens} tokens take {_name(a.block_ids)} from the front of the list, with {spare} slot to spare: "
        "a request wastes less than one block, however long it is. Nothing is computed yet, so there are no hashes.",
    )
    toy.compute(a)
    named = [block_id for block_id in a.block_ids if toy.kv.pool.is_registered(block_id)]
    yield toy.step(
        "A's prompt is computed",
        f"The full {_name(named)} can be found from now on, by a hash of their tokens and of all tokens before them. "
        f"{_name(_without(a.block_ids, named)).capitalize()} is not full: what it holds will still grow.",
    )
    b = toy.add("B", PROMPT_B)
    toy.make_room(b)
    num_hits = b.num_computed_tokens // BLOCK_SIZE
    toy.compute(b)
    hits, new = b.block_ids[:num_hits], b.block_ids[num_hits:]
    ref_count = toy.view()[hits[0] - 1].state.ref_count
    yield toy.step(
        "B shares A's beginning",
        f"B starts with the same {len(hits) * BLOCK_SIZE} words, and their hashes lead to {_name(hits)}: stored once, "
        f"held {ref_count} times. B computes only its other "
        f"{b.num_tokens - len(hits) * BLOCK_SIZE} tokens, in {_name(new)}.",
    )


def _decode_and_free(toy: ToyServer) -> Iterator[Step]:
    a = toy.requests["A"]
    toy.decode(a, ANSWER_A[0])
    yield toy.step(
        "A decodes a token",
        f"The model answers A: {ANSWER_A[0]!r}. The word goes to the last slot of {_name(a.block_ids[-1:])}, so no "
        "block is taken. The block is full now and gets its hash: answers can be found again as prompts can.",
    )
    toy.decode(a, ANSWER_A[1])
    yield toy.step(
        "A decodes one more, and needs a block",
        f"A's blocks are full, so {ANSWER_A[1]!r} takes a new one, {_name(a.block_ids[-1:])}. It does not lie next to "
        "A's others, and need not: the block table says where each part of a sequence is. Hence 'paged'.",
    )
    block_ids = a.block_ids
    toy.finish(a)
    empty, cached = _freed(toy, block_ids)
    yield toy.step(
        "A is done",
        f"{_name(_without(block_ids, [*empty, *cached])).capitalize()} stay with B. Nothing is wiped: {_name(cached)} "
        f"can still be found, and go to the end of the list. What {_name(empty)} holds has no hash to find it by, so "
        "it counts as empty and goes to the front: taking an empty block costs no cached content.",
    )


def _hit_what_is_free(toy: ToyServer) -> Iterator[Step]:
    c = toy.add("C", PROMPT_C)
    free = set(toy.kv.pool.free_block_ids())
    toy.make_room(c)
    num_cached = c.num_computed_tokens
    toy.compute(c)
    hits = c.block_ids[: num_cached // BLOCK_SIZE]
    revived = [block_id for block_id in hits if block_id in free]
    yield toy.step(
        "C goes on with A's chat",
        f"C is A's chat with a new question. It hits {_name(_without(hits, revived))}, which B holds, and also "
        f"{_name(revived)}, which were free: they leave the list. Of {c.num_tokens} tokens, "
        f"{c.num_tokens - num_cached} are computed. A second turn costs little more than its new words.",
    )
    b = toy.requests["B"]
    block_ids = b.block_ids
    toy.finish(b)
    empty, cached = _freed(toy, block_ids)
    yield toy.step(
        "B is done",
        f"C keeps {_name(_without(block_ids, [*empty, *cached]))}. Again the empty one, {_name(empty)}, is the next to "
        f"be reused, and the cached one, {_name(cached)}, waits behind all others: the longer it stays, the more "
        "requests may still hit it.",
    )


def _evict(toy: ToyServer) -> Iterator[Step]:
    cached = toy.cached_blocks()
    d = toy.add("D", PROMPT_D)
    toy.make_room(d)
    forgotten = _without(cached, toy.cached_blocks())
    toy.compute(d)
    yield toy.step(
        "D takes all the room",
        f"D takes {_name(_without(d.block_ids, forgotten))}, all empty, and only then {_name(forgotten)}. It was "
        "cached, so its hash is forgotten at once: a hash that outlived its content would give one user the words of "
        "another.",
    )
    e = toy.add("E", PROMPT_B)
    toy.make_room(e)
    found = toy.kv.find_cached_prefix(e)
    missing = -(-e.num_tokens // BLOCK_SIZE) - len(found)
    yield toy.step(
        "E finds no room",
        f"E asks what B asked. {_name(found).capitalize()} are found, but {_name(forgotten)} has D's words now. "
        f"E needs {missing} more blocks and {toy.kv.pool.num_free} are free: allocate refuses and changes nothing. "
        "A scheduler would let E wait.",
    )


def _wait_for_room(toy: ToyServer) -> Iterator[Step]:
    c, d, e = (toy.requests[name] for name in "CDE")
    toy.finish(c)
    cached = toy.cached_blocks()
    toy.make_room(e)
    num_hits = e.num_computed_tokens // BLOCK_SIZE
    forgotten = _without(cached, toy.cached_blocks())
    toy.compute(e)
    hits, new = e.block_ids[:num_hits], e.block_ids[num_hits:]
    kept = [view.state.block_id for view in toy.view() if view.kind == "cached"]
    yield toy.step(
        "C is done, and E gets in",
        f"E first holds its hits, {_name(hits)}, lest it evict them itself. It takes "
        f"{_name(_without(new, forgotten))}, which is empty, then the least recently used: {_name(forgotten)} is "
        f"forgotten, {_name(kept)} is kept. The end goes first, as it is of no use without the beginning.",
    )
    toy.finish(d)
    toy.finish(e)
    hit, asked = toy.kv.num_prefix_hit_tokens, toy.kv.num_prefix_query_tokens
    yield toy.step(
        "All are done",
        f"Nobody holds a block, and {len(toy.cached_blocks())} of {toy.kv.pool.capacity} can still be found. The "
        f"prompts had {asked} tokens; the prefix cache gave {hit} of them ({hit / asked:.0%}) without computing.",
    )


def _freed(toy: ToyServer, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of the blocks that are free now: the empty ones, and the cached ones."""
    views = [view for view in toy.view() if view.state.block_id in block_ids]
    empty, cached = ([view.state.block_id for view in views if view.kind == kind] for kind in ("empty", "cached"))
    return empty, cached


def _name(block_ids: Sequence[int]) -> str:
    """ "block 3", "blocks 1, 2 and 3"."""
    if len(block_ids) == 1:
        return f"block {block_ids[0]}"
    return f"blocks {', '.join(map(str, block_ids[:-1]))} and {block_ids[-1]}" if block_ids else "no block"


def _without(block_ids: Iterable[int], others: Sequence[int]) -> list[int]:
    return [block_id for block_id in block_ids if block_id not in others]


# The drawing


def draw(toy: ToyServer, step: Step, number: str, before: Sequence[BlockView], width: int) -> Group:
    """One screen: 23 lines of 80 characters are enough for each step. `before` is the pool before the step."""
    return Group(
        Rule(f"[bold]{number}: {step.title}[/]", align="left", style="dim"),
        *(Text(line, style="bold magenta") for line in _pack(step.calls, width)),
        _draw_pool(toy.view(), before, width),
        _legend(),
        *(_draw_request(request) for request in toy.requests.values()),
        Text("\n" + step.lesson),
    )


def _pack(calls: Sequence[str], width: int) -> list[str]:
    """The calls, as many on a line as fit."""
    lines: list[str] = []
    for call in calls:
        if lines and len(lines[-1]) + len(call) + 3 <= width:
            lines[-1] += "   " + call
        else:
            lines.append(call)
    return lines


def _draw_pool(views: Sequence[BlockView], before: Sequence[BlockView], width: int) -> Table:
    cells = [_cell("0 reserved", "never handed out", "takes padding", "reserved")]
    cells += [_draw_block(view, view.differs(old)) for view, old in zip(views, before, strict=True)]
    num_columns = min(4, max(1, width // CELL_WIDTH))
    table = Table(box=box.SQUARE, show_header=False, show_lines=True, padding=0, border_style="dim", width=width)
    for _ in range(num_columns):
        table.add_column(ratio=1)
    for start in range(0, len(cells), num_columns):
        table.add_row(*cells[start : start + num_columns])
    return table


def _draw_block(view: BlockView, changed: bool) -> Group:
    state = view.state
    who = f"held by {' '.join(view.holders)}" if view.holders else view.kind
    place = f"ref {state.ref_count}" if state.free_position is None else f"pos {state.free_position}"
    name = f"hash {state.hash.hex()[:4]}" if state.hash else "no hash"
    words = [*view.words, *"_" * (BLOCK_SIZE - len(view.words))]
    return _cell(f"{state.block_id} {who}{' *' if changed else ''}", f"{place:<7}{name}", " ".join(words), view.kind)


def _cell(title: str, place: str, words: str, kind: str) -> Group:
    return Group(
        Padding(Text(title, no_wrap=True), (0, 1), style=STYLES[kind]),
        Padding(Text(place, no_wrap=True, style="dim"), (0, 1)),
        Padding(Text(words, no_wrap=True), (0, 1)),
    )


def _legend() -> Text:
    parts: list[str | tuple[str, str]] = []
    for kind in ("empty", "cached", "held", "shared"):
        parts += [(f" {kind} ", STYLES[kind]), " "]
    return Text.assemble(*parts, ("  * changed   ref: holders   pos 0: taken next", "dim"))


def _draw_request(request: Request) -> Text:
    table = " ".join(map(str, request.block_ids)) or "none, it waits"
    counts = f"{request.num_computed_tokens} of {request.num_tokens} tokens computed"
    return Text.assemble((request.request_id, "bold"), f"  block table: {table:<18} ", (counts, "dim"))
