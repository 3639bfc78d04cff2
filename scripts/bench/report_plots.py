"""PNG plots of a report. Each function writes one file and shows passed runs only."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from . import report_data
from .report_data import Comparison, Group

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

# Okabe and Ito's colours, told apart in every common form of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"
# A fixed entry instead of the writer's version, so that equal plots are equal files.
METADATA = {"Software": "bench report"}


def _style(group: Group) -> dict[str, tuple[str, str]]:
    return {
        arm: (COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)])
        for index, arm in enumerate(group.arms)
    }


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=144, metadata=METADATA)
    plt.close(figure)


def _legend(figure) -> None:
    """Above the axes, where it covers no point."""
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)


def throughput(group: Group, path: Path) -> bool:
    """Input tok/s of every passed run, in the order they ran."""
    runs = group.of("serve")
    shown = [(i, row, report_data.speed([row])) for i, row in enumerate(runs)]
    if not any(one for _, _, one in shown):
        return False
    figure, axes = plt.subplots(
        figsize=(max(5.0, 0.55 * len(runs) + 2), 3.8), layout="constrained"
    )
    style = _style(group)
    for arm in group.arms:
        mine = [(i, one.input_rate) for i, row, one in shown if one and row.arm == arm]
        if not mine:
            continue
        colour, marker = style[arm]
        at, rates = zip(*mine, strict=True)
        axes.plot(at, rates, marker, color=colour, label=arm, markersize=7)
        pooled = report_data.speed(
            [row for _, row, one in shown if one and row.arm == arm]
        )
        axes.axhline(pooled.input_rate, color=colour, linewidth=0.8, linestyle="--")
    failed = [i for i, _, one in shown if not one]
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    for i in failed:
        axes.text(i, middle, "failed", rotation=90, ha="center", va="center")
    axes.set_xticks(range(len(runs)), [row.label for row in runs])
    axes.set_xlim(-0.5, len(runs) - 0.5)
    if len(runs) > 12:
        axes.tick_params(axis="x", rotation=90)
    axes.set_ylabel("input tok/s (axis not from 0)")
    axes.set_xlabel("run, in schedule order; dashed: arm pooled")
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y", alpha=0.3)
    _legend(figure)
    _save(figure, path)
    return True


def ttft(group: Group, path: Path) -> bool:
    """Distribution function of the time to first token, all requests of an arm."""
    style, drawn = _style(group), False
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for arm in group.arms:
        rows = [row for row in group.of("serve") if row.arm == arm and row.passed]
        found = report_data.speed(rows)
        if found is None or not found.ttft:
            continue
        values = np.sort(found.ttft)
        share = np.arange(1, len(values) + 1) / len(values)
        label = f"{arm} ({len(values):,} requests)"
        axes.step(values, share, where="post", color=style[arm][0], label=label)
        drawn = True
    if drawn:
        for share, name in ((0.5, "P50"), (0.99, "P99")):
            axes.axhline(share, color="grey", linewidth=0.6, linestyle=":")
            axes.annotate(
                name,
                (1, share),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(3, 0),
                va="center",
                fontsize="small",
            )
        axes.set_xlabel("time to first token, s")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        _legend(figure)
        _save(figure, path)
    plt.close(figure)
    return drawn


def ratios(group: Group, found: Sequence[Comparison], path: Path) -> bool:
    """Each pair's change of input tok/s, the interval of the median, the A/A noise."""
    found = [each for each in found if each.rate]
    if not found:
        return False
    style, floor = _style(group), report_data.noise(group, report_data.input_rate)
    figure, axes = plt.subplots(
        figsize=(6.4, 1.6 + 0.75 * len(found)), layout="constrained"
    )
    if floor is not None:
        axes.axvspan(
            -100 * floor / (1 + floor), 100 * floor, color="grey", alpha=0.25, lw=0
        )
    axes.axvline(0, color="black", linewidth=0.8)
    for row, each in enumerate(found):
        colour, marker = style[each.arm]
        low, high = each.verdict.interval.low, each.verdict.interval.high
        axes.plot(
            [100 * (low - 1), 100 * (high - 1)],
            [row, row],
            color=colour,
            linewidth=6,
            alpha=0.3,
            solid_capstyle="butt",
        )
        points = [100 * (ratio - 1) for ratio in each.rate]
        # Spread over the line's height, first pair on top, so that none is hidden.
        offsets = np.linspace(-0.18, 0.18, len(points)) if len(points) > 1 else [0]
        axes.plot(points, row + np.asarray(offsets), marker, color=colour, markersize=5)
        axes.plot(
            100 * each.verdict.change, row, "|", color="black", markersize=22, mew=1.6
        )
    names = [
        f"{each.arm}\n{len(each.rate)} pair{'s'[: len(each.rate) > 1]}"
        for each in found
    ]
    axes.set_yticks(range(len(found)), names)
    axes.set_ylim(len(found) - 0.5, -0.5)
    noise = "no A/A pair" if floor is None else f"grey: A/A noise {floor:.2%}"
    axes.set_xlabel(
        f"input tok/s against {group.baseline}, %\n"
        f"points: pairs; bar: interval; line: median; {noise}"
    )
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)
    return True
