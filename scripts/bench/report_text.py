"""Markdown of a report, from what `report_data` computed. Same rows, same bytes."""

from collections.abc import Iterable, Sequence

from . import compare, report_data, stats, trace
from .report_data import Comparison, Group
from .rows import BadLine, Row

NO_SPEED = "-"
NUMBERS = frozenset(
    "Requests,Input tok/s,P50 TTFT s,P99 TTFT s,Output tok/s,P50 TPOT ms,Pairs,Median,"
    "Interval,Pooled,Mean,P90,Max,Cached tokens,Seed,Prefix,Before,After,Change,"
    "Cached after,Equal to baseline".split(",")
)


def cell(value: object) -> str:
    """Text that cannot break out of a table cell."""
    return " ".join(str(value).replace("|", "\\|").split())


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; the columns in NUMBERS are right-aligned."""
    rule = ["---:" if name in NUMBERS else "---" for name in head]
    result = [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|"]
    return result + ["| " + " | ".join(map(cell, line)) + " |" for line in lines]


def _seconds(values: Sequence[float], percent: float) -> str:
    return f"{stats.percentile(values, percent):.3f}" if values else NO_SPEED


def _speed_cells(runs: Sequence[Row], output: bool) -> list[str]:
    found = report_data.speed(runs)
    if found is None:
        return [NO_SPEED] * (6 if output else 4)
    cells = [
        f"{found.requests:,}",
        f"{found.input_rate:,.2f}",
        _seconds(found.ttft, 50),
        _seconds(found.ttft, 99),
    ]
    if output:
        cells += [f"{found.output_rate:,.2f}"]
        milliseconds = [1000 * value for value in found.tpot]
        cells += [_seconds(milliseconds, 50)]
    return cells


def speed_section(group: Group) -> list[str]:
    """Every formal run, then every arm pooled."""
    runs = group.of("serve")
    output = any(r.output_tokens > 1 for row in runs for r in row.requests)
    head = ["Run", "Arm", "Requests", "Input tok/s", "P50 TTFT s", "P99 TTFT s"]
    head += ["Output tok/s", "P50 TPOT ms"] if output else []
    lines = [
        [row.label, row.arm, *_speed_cells([row], output), _status(row)] for row in runs
    ]
    for arm in group.arms:
        members = [row for row in runs if row.arm == arm]
        passed = [row for row in members if row.passed]
        if len(members) > 1:
            note = f"{len(passed)} of {len(members)} runs"
            name = f"**{arm} pooled**"
            lines.append([name, arm, *_speed_cells(passed, output), note])
    text = table([*head, "Checks"], lines)
    return [
        "### Speed",
        "",
        *text,
        "",
        "Input tok/s is total input tokens / total formal time; percentiles are of"
        " all formal requests together. A run that failed a check shows no speed.",
        "",
    ]


def _status(row: Row) -> str:
    if row.passed:
        return f"{len(row.checks)} passed"
    return "FAILED, see below"


def comparison_section(group: Group, found: Sequence[Comparison]) -> list[str]:
    """Ratios of every arm against the baseline, with the verdict."""
    if not found:
        return []
    floor = report_data.noise(group, report_data.input_rate)
    ttft_floor = report_data.noise(group, report_data.median_ttft)
    differ = report_data.outputs_differ(group)
    lines = []
    for each in found:
        for what, ratios, verdict, pooled in (
            ("input tok/s", each.rate, each.verdict, each.pooled),
            ("P50 TTFT", each.ttft, each.ttft_verdict, None),
        ):
            interval = verdict.interval
            lines.append(
                [
                    each.arm,
                    what,
                    ", ".join(f"{ratio - 1:+.2%}" for ratio in ratios) or NO_SPEED,
                    f"{verdict.change:+.2%}" if ratios else NO_SPEED,
                    f"{interval.low - 1:+.2%} to {interval.high - 1:+.2%}"
                    if interval and interval.pairs > 1
                    else NO_SPEED,
                    f"{pooled - 1:+.2%}" if pooled else NO_SPEED,
                    "outputs differ" if each.arm in differ else verdict,
                ]
            )
    head = ["Arm", "Measure", "Pairs", "Median", "Interval", "Pooled", "Verdict"]
    unknown = "not measured (no arm ran twice)"
    floors = ", ".join(
        f"{name} {unknown if value is None else f'{value:.2%}'}"
        for name, value in (("input tok/s", floor), ("P50 TTFT", ttft_floor))
    )
    text = [
        f"### Compared with {group.baseline}",
        "",
        *table(head, lines),
        "",
        f"A/A noise floor (largest difference of two runs of one tree): {floors}.",
    ]
    for each in found:
        text += [f"- Pair left out: {pair}." for pair in each.left_out]
    return [*text, ""]


def problems_section(group: Group, planned: Sequence[str] = ()) -> list[str]:
    """Failed checks, outputs that differ, missing rows and repeated runs.

    Empty when there are none.
    """
    lines = []
    for row in group.rows:
        lines += [f"- {row.kind} {row.label}: {cell(text)}" for text in row.problems]
    differ = report_data.outputs_differ(group)
    lines += [f"- outputs {arm}: {cell(text)}" for arm, text in differ.items()]
    lines += [f"- missing: {text}" for text in report_data.missing(group, planned)]
    lines += [
        f"- {row.kind} {row.label} ran again; an earlier row"
        f" ({cell('; '.join(row.problems)) or 'passed'}) is not used"
        for row in group.superseded
    ]
    return ["### Failed or missing", "", *lines, ""] if lines else []


def outputs_section(group: Group) -> list[str]:
    """Fixed greedy outputs, each row against the baseline's."""
    found = [row for row in group.of("outputs") if row.outputs]
    base = next((row for row in found if row.baseline), None)
    lines = []
    for row in found:
        differ = compare.outputs(base, row) if base and row is not base else []
        equal = "reference" if row is base else f"{len(row.outputs) - len(differ)}"
        lines.append(
            [
                row.arm,
                len(row.outputs),
                equal if base else "no baseline",
                compare.repeats(row.outputs).detail,
                differ[0] if differ else "none",
            ]
        )
    if not lines:
        return []
    head = ["Arm", "Requests", "Equal to baseline", "Repeats", "First difference"]
    return ["### Fixed outputs", "", *table(head, lines), ""]


def drift_section(group: Group) -> list[str]:
    """Differences of log probabilities of fixed continuations."""
    found = [row for row in group.of("continuation") if row.scored]
    base = next((row for row in found if row.baseline), None)
    lines = []
    for row in found:
        try:
            entries = compare.continuation(row)
            if base and row is not base:
                entries += compare.continuation_arms(base, row)
        except ValueError as error:
            lines.append([row.arm, str(error), *[NO_SPEED] * 5])
            continue
        for each in entries:
            context = f"{each['context']:,}"
            if each["control"]:
                context += " (aligned control)"
            numbers = [f"{each[name]:.4f}" for name in ("mean", "p90", "max")]
            depths = ["?" if d is None else f"{d:,}" for d in each.get("depths", [])]
            depth = " / ".join(depths) or NO_SPEED
            lines.append([row.arm, context, each["states"], *numbers, depth])
    if not lines:
        return []
    head = ["Arm", "Context", "Scored", "Mean", "P90", "Max", "Cached tokens"]
    title = "### Continuation, absolute difference of log probabilities"
    return [title, "", *table(head, lines), ""]


def branching_section(group: Group) -> list[str]:
    """Score of the first branch before and after a competing one."""
    lines = []
    for row in group.of("branching"):
        for each in row.branches:
            try:
                score = compare.branch(each)
            except ValueError as error:
                lines.append([row.arm, each.seed, str(error), *[NO_SPEED] * 5])
                continue
            cached = each.cached_after
            lines.append(
                [
                    row.arm,
                    each.seed,
                    f"{each.prefix:,}",
                    f"{score['before']:.4f}",
                    f"{score['after']:.4f}",
                    f"{score['after'] - score['before']:+.4f}",
                    f"{score['max']:.4f}",
                    "?" if cached is None else f"{cached:,}",
                ]
            )
    if not lines:
        return []
    head = ["Arm", "Seed", "Prefix", "Before", "After", "Change", "Max", "Cached after"]
    return ["### Branching, mean log probability", "", *table(head, lines), ""]


def trace_section(group: Group) -> list[str]:
    """Kernel classes of every arm, and the counts that were stated."""
    runs = [row for row in group.of("trace") if row.trace]
    if not runs:
        return []
    text = ["### Kernels, all ranks together", ""]
    text += trace.table({row.arm: row.trace for row in runs})
    stated = [
        f"- {'ok' if check.ok else 'FAILED'}: {cell(check.detail)}"
        for row in runs
        for check in row.checks
    ]
    return [*text, "", *stated, ""] if stated else [*text, ""]


def environment_section(group: Group) -> list[str]:
    """Hardware, versions, engine digests and arguments, differences named."""
    text = ["### Environment", ""]
    # A run that never served says nothing about its environment.
    known = [r for r in group.rows if r.environment.engine or r.environment.packages]
    environments = [row.environment for row in known]
    formal = [row.environment for row in known if row.kind == "serve" and row.formal]
    facts = {
        "GPU": [
            f"{len(e.gpus)}x {'/'.join(sorted({g.name for g in e.gpus}))}"
            if e.gpus
            else "none"
            for e in environments
        ],
        "Driver": [e.driver or "none" for e in environments],
        "Python": [e.python or "unknown" for e in environments],
        "Load": [_pairs(e.load) for e in formal if e.load],
        "Seed": [str(e.seed) for e in formal],
    }
    packages = sorted({name for e in environments for name in e.packages})
    for name in packages:
        facts[name] = [
            e.packages.get(name, "absent") for e in environments if e.packages
        ]
    lines = []
    for name, values in facts.items():
        different = list(dict.fromkeys(values))
        note = " (DIFFERS between runs)" if len(different) > 1 else ""
        if different:
            lines.append([name, "; ".join(different) + note])
    clocks = [g.sm_clock_mhz for e in environments for g in e.gpus if g.sm_clock_mhz]
    if clocks:
        lines.append(
            ["SM clock at the end of runs", f"{min(clocks)} to {max(clocks)} MHz"]
        )
    text += [*table(["What", "Value"], lines), ""]
    for arm in group.arms:
        rows_of = [row for row in group.rows if row.arm == arm]
        members = [row.environment for row in rows_of]
        digests = sorted({e.engine.digest for e in members if e.engine})
        text.append(
            f"- {arm}: engine {', '.join(f'`{d}`' for d in digests) or 'unknown'}"
        )
        for line in sorted({report_data.arguments(row) for row in rows_of}):
            text += [f"  - `{' '.join(line)}`"] if line else []
        for variables in sorted({_pairs(e.variables) for e in members if e.variables}):
            text.append(f"  - with `{variables}`")
    return [*text, ""]


def _pairs(values: dict) -> str:
    """key=value of everything that is set."""
    known = {k: v for k, v in sorted(values.items()) if v not in ("", [], {}, None)}
    return " ".join(f"{key}={value}" for key, value in known.items())


def document(
    found: Sequence[Group],
    comparisons: Sequence[Sequence[Comparison]],
    plots: Sequence[Sequence[tuple[str, str]]],
    bad: Sequence[BadLine],
    planned: Sequence[Sequence[str]],
) -> str:
    """The whole report; per group, `plots` are (title, file name), `planned` the
    rows it should have."""
    text = []
    for group, compared, images, wanted in zip(
        found, comparisons, plots, planned, strict=True
    ):
        text += [f"## {group.experiment} ({group.config[:12]})", ""]
        if group.of("serve"):
            text += speed_section(group)
            text += comparison_section(group, compared)
            for title, name in images:
                text += [f"![{title}]({name})", ""]
        text += problems_section(group, wanted)
        text += outputs_section(group)
        text += drift_section(group)
        text += branching_section(group)
        text += trace_section(group)
        text += environment_section(group)
    if bad:
        text += ["## Lines that are no rows", ""]
        text += [f"- {cell(line)}" for line in bad] + [""]
    return "\n".join(text).rstrip("\n") + "\n"
