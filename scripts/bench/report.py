"""`report`: Markdown for a pull request and PNG plots, from the raw rows only."""

import argparse
import contextlib
import re
import sys
from pathlib import Path

from . import config as configs
from . import errors, report_data, report_text, rows, stats
from .errors import BenchError

EPILOG = """\
Writes report.md and, for each experiment with speeds, throughput, ttft and
ratios PNGs beside it. The same rows give the same bytes of Markdown.

exit codes: 0 ok, 1 a run failed a check, outputs differ from the baseline's, a
row is missing or a line is no row (the report is written all the same and lists
them), 2 usage
"""


def parser() -> argparse.ArgumentParser:
    """The verb's options."""
    result = argparse.ArgumentParser(
        prog="python scripts/bench report",
        description="Markdown and plots from the raw rows.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "rows", nargs="+", type=Path, metavar="ROWS.jsonl", help="files of raw rows"
    )
    result.add_argument(
        "--config",
        type=Path,
        metavar="EXPERIMENT.toml",
        help="experiment file; its schedule says which rows are missing",
    )
    result.add_argument(
        "--out", type=Path, help="folder of the report (default: beside the first file)"
    )
    result.add_argument("--no-plots", action="store_true", help="Markdown only")
    result.add_argument(
        "--level",
        type=float,
        default=stats.LEVEL,
        help=f"level of the bootstrap interval (default: {stats.LEVEL})",
    )
    result.add_argument(
        "--seed", type=int, default=0, help="seed of the bootstrap (default: 0)"
    )
    return result


def _plots(
    group: report_data.Group, compared: list, folder: Path, number: int
) -> list[tuple[str, str]]:
    """Draws what there is to draw; returns (title, file name) of each plot."""
    # Imported here: Markdown alone needs no plotting library.
    from . import report_plots

    slug = re.sub(r"[^A-Za-z0-9]+", "-", group.experiment).strip("-").lower()
    name = f"{number:02}-{slug or 'experiment'}"
    drawn = []
    for kind, title, draw in (
        ("throughput", "Throughput by run", report_plots.throughput),
        ("ttft", "Time to first token", report_plots.ttft),
    ):
        if draw(group, folder / f"{name}-{kind}.png"):
            drawn.append((title, f"{name}-{kind}.png"))
    if report_plots.ratios(group, compared, folder / f"{name}-ratios.png"):
        drawn.append(("Paired changes", f"{name}-ratios.png"))
    return drawn


def _planned(groups: list[report_data.Group], path: Path | None) -> list[list[str]]:
    """For each group the rows it should have, empty where no file says so."""
    if path is None:
        return [[] for _ in groups]
    config = configs.load(path)
    key = (config.experiment, configs.digest(config))
    if key not in [(group.experiment, group.config) for group in groups]:
        raise BenchError(
            f"{path} is experiment {key[0]} ({key[1][:12]}); the rows are of"
            f" {', '.join(f'{g.experiment} ({g.config[:12]})' for g in groups)};"
            " give the file the rows were measured with"
        )
    rows_of = report_data.planned(config)
    return [rows_of if (g.experiment, g.config) == key else [] for g in groups]


def main(argv: list[str]) -> int:
    """Runs the verb; returns the exit code."""
    arguments = parser().parse_args(argv)
    if not 0 < arguments.level < 1:
        raise BenchError(f"--level {arguments.level}: write a number between 0 and 1")
    good, bad = [], []
    for path in dict.fromkeys(arguments.rows):
        some, others = rows.read(path)
        good += some
        bad += others
    if not good:
        first = f"; the first line that is none: {bad[0]}" if bad else ""
        raise BenchError(
            f"no row in {', '.join(map(str, arguments.rows))}{first};"
            " run serve-ab or another verb first"
        )
    found = report_data.groups(good)
    compared = [
        report_data.compare(group, level=arguments.level, seed=arguments.seed)
        for group in found
    ]
    wanted = _planned(found, arguments.config)
    folder = arguments.out or arguments.rows[0].parent
    target = folder / "report.md"
    partial = target.with_suffix(".md.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = [
            [] if arguments.no_plots else _plots(group, comparisons, folder, number)
            for number, (group, comparisons) in enumerate(
                zip(found, compared, strict=True), start=1
            )
        ]
        text = report_text.document(found, compared, plots, bad, wanted)
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise BenchError(
            f"cannot write the report: {error}; choose a writable --out folder"
        ) from error
    print(target)
    wrong = [
        line.removeprefix("- ")
        for group, planned in zip(found, wanted, strict=True)
        for line in report_text.problems_section(group, planned)
        if line.startswith("- ")
    ]
    for line in [*wrong, *map(str, bad)]:
        print(f"bench report: {line}", file=sys.stderr)
    failed = any(not row.passed for group in found for row in group.rows)
    differ = any(map(report_data.outputs_differ, found))
    lost = any(map(report_data.missing, found, wanted))
    return errors.CHECK_FAILED if failed or differ or lost or bad else errors.OK
