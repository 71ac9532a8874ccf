"""The plot of a load run: what each request waited for, and what the server held meanwhile, on one time axis.

Draws what it is given. Does not know where results and samples come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demos.load_client import Result
from scripts.sample_load import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TTFT_COLOUR, REST_COLOUR, KV_COLOUR, RUNNING_COLOUR, WAITING_COLOUR = "0.75", "C1", "C2", "C0", "C3"


def plot_load(path: Path, title: str, results: Sequence[Result], samples: Sequence[Sample]) -> None:
    """`load_figure` as PNG."""
    load_figure(title, results, samples).savefig(path, format="png", dpi=120)


def load_figure(title: str, results: Sequence[Result], samples: Sequence[Sample]) -> Figure:
    """Three panels: the requests and their latencies; KV blocks in use; requests running and waiting."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(10, 8), layout="constrained")
    latency, cache, queue = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    _latencies(latency, results)
    _cache(cache, samples)
    _queue(queue, samples)
    for axes in (cache, queue):
        axes.set_ylim(bottom=0)
    for axes in (latency, cache, queue):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    queue.set_xlim(min(samples[0].seconds, 0), samples[-1].seconds)
    queue.set_xlabel("seconds since the first request")
    figure.suptitle(title)
    return figure


def _latencies(axes: Axes, results: Sequence[Result]) -> None:
    """A request is a bar in the order of sending, from then to its end; the grey part is its time to first token."""
    from matplotlib.patches import Patch

    good = [(each.index + 1, each.sent_at, each.ttft, each.e2e) for each in results if each.ttft is not None]
    for row, sent, first, last in good:
        axes.barh(row, first, left=sent, color=TTFT_COLOUR)
        axes.barh(row, last - first, left=sent + first, color=REST_COLOUR)
    axes.invert_yaxis()
    axes.set_ylabel("request")
    axes.set_title("latency of each request, from its sending to its end", fontsize="medium")
    kinds = (("time to first token", TTFT_COLOUR), ("from then to the end", REST_COLOUR))
    axes.legend(handles=[Patch(color=colour, label=name) for name, colour in kinds])


def _cache(axes: Axes, samples: Sequence[Sample]) -> None:
    total = samples[-1].kv_blocks_total
    times, used = [sample.seconds for sample in samples], [sample.kv_blocks_used for sample in samples]
    axes.fill_between(times, used, step="post", color=KV_COLOUR, alpha=0.3)
    axes.step(times, used, where="post", color=KV_COLOUR)
    axes.margins(y=0.1)
    axes.set_ylabel("blocks")
    axes.set_title(f"KV cache: blocks in use, of {total}", fontsize="medium")

    def percent(blocks: Any) -> Any:  # matplotlib gives arrays too
        return blocks / total * 100

    def blocks(percent: Any) -> Any:
        return percent * total / 100

    share = axes.secondary_yaxis("right", functions=(percent, blocks))
    share.set_ylabel("% of the pool")


def _queue(axes: Axes, samples: Sequence[Sample]) -> None:
    from matplotlib.ticker import MaxNLocator

    times = [sample.seconds for sample in samples]
    running, waiting = [sample.running for sample in samples], [sample.waiting for sample in samples]
    axes.step(times, running, where="post", color=RUNNING_COLOUR, label="running")
    axes.step(times, waiting, where="post", color=WAITING_COLOUR, label="waiting")
    axes.margins(y=0.1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("requests")
    axes.set_title("requests in the engine", fontsize="medium")
    axes.legend()
