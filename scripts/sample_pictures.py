"""Pictures of screens: the terminal chat against a running server, Prometheus' page of targets; by headless Chromium.

Owns how a page becomes a PNG. Does not start the server, nor know what the pictures are for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from textual.widgets import TextArea

from deploy.check_queries import prometheus
from miniserve.tui.app import ChatApp
from miniserve.tui.settings import Settings
from miniserve.tui.widgets import Answer

Pixels = np.ndarray[Any, np.dtype[Any]]

TERMINAL = (100, 32)  # columns, rows
ASCENT, LINE_HEIGHT = 18.5, 24.65  # of a line in Textual's drawing: from its top to the baseline, and to the next
# top, width and height of a block character that Textual's frames have, in parts of its cell
BLOCKS = {"█": (0, 1, 1), "▊": (0, 0.75, 1), "▎": (0, 0.25, 1), "▔": (0, 1, 1 / 8), "▁": (7 / 8, 1, 1 / 8)}
SVG_SCALE = 1.0  # the drawing is large as it is
PAGE_SIZE, PAGE_SCALE = (1200, 900), 1.5
PAGE_MARGIN = 24  # CSS pixels below the last thing on a page
PAGE_TIME_MS = 10_000  # of the page's own clock, for its scripts to fetch and draw
CHROMIUM_SECONDS = 90.0
SCRAPE_SECONDS = 1
UP_SECONDS = 30.0
LEAST_INK = 0.005  # share of the pixels that are not background; a page that drew nothing has none


async def chat(base_url: str, questions: Sequence[str]) -> str:
    """The screen, as SVG, of a conversation in which each question got its answer.

    Raises:
        ValueError: a question got none.
    """
    app = ChatApp(Settings(base_url=base_url, temperature=0.0, max_tokens=200))
    async with app.run_test(size=TERMINAL) as pilot:
        for question in questions:
            await app.workers.wait_for_complete()
            app.query_one(TextArea).insert(question)
            await pilot.press("enter")
            await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause(0.5)  # the last of the text is still being laid out
        answers = list(app.query(Answer))
        if len(answers) != len(questions) or any(answer.meter.usage is None for answer in answers):
            raise ValueError(f"the chat at {base_url} did not answer each of {list(questions)}")
        return without_fonts(app.export_screenshot(title="uv run tui.py"))


def without_fonts(svg: str) -> str:
    """The drawing as any font shows it well.

    Fonts are not loaded from the network: the reader's own monospace font serves. Frames are drawn as areas in place of
    block characters, which leave gaps in a font that is lower than the line.
    """
    svg = re.sub(r"@font-face\s*{[^}]*}\s*", "", svg)
    return re.sub(
        rf'<text class="([\w-]+)" x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>([{"".join(BLOCKS)}])\5*</text>',
        _block,
        svg,
    )


def _block(found: re.Match[str]) -> str:
    """The area of a run of one block character."""
    style, x, length = found[1], float(found[2]), float(found[4])
    top, width, height = BLOCKS[found[5]]
    y = float(found[3]) - ASCENT + top * LINE_HEIGHT
    size = f'width="{width * length:.2f}" height="{height * LINE_HEIGHT:.2f}"'
    return f'<rect class="{style}" x="{x:.2f}" y="{y:.2f}" {size} shape-rendering="crispEdges"/>'


def draw_svg(chromium: str, svg: Path, png: Path) -> None:
    """The drawing as a PNG of its own size."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text(encoding="utf-8"))
    if box is None:
        raise ValueError(f"{svg} tells no size: it has no viewBox")
    screenshot(chromium, svg.as_uri(), png, (round(float(box[1])), round(float(box[2]))), SVG_SCALE)


def draw_targets(chromium: str, program: str, url: str, png: Path) -> None:
    """The targets of a Prometheus that scrapes the server at `url`, once it is up."""
    with prometheus(program, url, SCRAPE_SECONDS) as client:
        _wait_up(client)
        # Debian's build has the classic pages only.
        page = "targets" if client.get("/targets").is_success else "classic/targets"
        screenshot(chromium, str(client.base_url.join(page)), png, PAGE_SIZE, PAGE_SCALE)
    trim(png, round(PAGE_MARGIN * PAGE_SCALE))


def _wait_up(client: httpx.Client) -> None:
    give_up = time.monotonic() + UP_SECONDS
    while True:
        targets = client.get("/api/v1/targets").raise_for_status().json()["data"]["activeTargets"]
        if targets and all(target["health"] == "up" for target in targets):
            return
        if time.monotonic() > give_up:
            raise ValueError(f"Prometheus does not reach the server: {[target['lastError'] for target in targets]}")
        time.sleep(0.2)


def screenshot(chromium: str, url: str, png: Path, size: tuple[int, int], scale: float) -> None:
    """A page as PNG, `size` in CSS pixels.

    Raises:
        ValueError: the browser fails, or the picture is blank.
    """
    with tempfile.TemporaryDirectory(prefix="miniserve-chromium-") as profile:
        command = [
            chromium,
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            f"--force-device-scale-factor={scale}",
            f"--virtual-time-budget={PAGE_TIME_MS}",
            f"--screenshot={png}",
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # root has no sandbox there
            url,
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=CHROMIUM_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{chromium} did not draw {url} within {CHROMIUM_SECONDS:g} s") from error
    if done.returncode or not png.exists():
        raise ValueError(f"{chromium} ended with {done.returncode}: {done.stderr[-500:].decode(errors='replace')}")
    if (ink := ink_share(png)) < LEAST_INK:
        raise ValueError(f"the picture of {url} is blank: {ink:.2%} of it is not background")


def ink_share(png: Path) -> float:
    """The share of the pixels that are not background."""
    return float(_ink(_read(png)).mean())


def trim(png: Path, margin: int) -> None:
    """Cut off what is empty at the bottom, but for `margin` pixels."""
    from matplotlib.image import imsave

    pixels = _read(png)
    last = int(np.flatnonzero(_ink(pixels).any(axis=1)).max(initial=-1))
    imsave(png, pixels[: last + 1 + margin])


def _read(png: Path) -> Pixels:
    from matplotlib.image import imread

    pixels: Pixels = imread(png)  # [height, width, channels], 0 to 1
    return pixels


def _ink(pixels: Pixels) -> Pixels:
    """Whether each pixel, [height, width], differs from the last one, which is background."""
    ink: Pixels = np.abs(pixels - pixels[-1, -1]).max(axis=-1) > 0.1
    return ink


def find_program(names: Sequence[str], package: str, flag: str) -> str:
    """The first of `names` that can be run.

    Raises:
        ValueError: there is none; the message tells what to install.
    """
    for name in names:
        if found := shutil.which(name):
            return found
    raise ValueError(
        f"no program {names[0]!r}: install it (Debian: apt-get install {package}), name it with {flag} FILE, "
        "or run with --skip-pictures"
    )
