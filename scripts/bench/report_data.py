"""What a report says, computed from raw rows. Nothing here reads or writes files."""

import collections
from collections.abc import Callable, Sequence

import msgspec

from . import config as configs
from . import stats
from .compare import outputs as compare_outputs
from .config import Config
from .rows import Row


class Group(msgspec.Struct):
    """The rows of one experiment under one configuration, in schedule order."""

    experiment: str
    config: str
    rows: list[Row]
    superseded: list[Row] = []

    def of(self, kind: str, formal: bool = True) -> list[Row]:
        return [r for r in self.rows if r.kind == kind and r.formal == formal]

    @property
    def baseline(self) -> str | None:
        """Name of the arm that others are compared with."""
        return next((row.arm for row in self.rows if row.baseline), None)

    @property
    def arms(self) -> list[str]:
        """Arms in order of first appearance, the baseline first."""
        names = list(dict.fromkeys(row.arm for row in self.rows))
        return sorted(names, key=lambda name: name != self.baseline)


def groups(rows: Sequence[Row]) -> list[Group]:
    """Rows by experiment and configuration, sorted.

    A label that occurs twice is a run repeated after a failure: the last row
    counts, earlier ones are kept in `superseded` so that a report can say so.
    """
    found: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        found[(row.experiment, row.config_sha256)].append(row)
    result = []
    for (experiment, config), members in sorted(found.items()):
        last: dict[tuple, Row] = {}
        superseded = []
        for row in members:
            key = (row.kind, row.formal, row.label)
            if key in last:
                superseded.append(last[key])
            last[key] = row
        ordered = sorted(last.values(), key=lambda r: (r.position, r.kind, r.label))
        result.append(Group(experiment, config, ordered, superseded))
    return result


def missing(group: Group, planned: Sequence[str] = ()) -> list[str]:
    """What the schedule has and the rows have not, one text each.

    `planned` are "kind label" of every row the configuration asks for; without
    it only holes in the positions and halves of pairs can be seen.
    """
    present = {f"{row.kind} {row.label}" for row in group.rows if row.formal}
    if planned:
        return [name for name in planned if name not in present]
    runs, result = group.of("serve"), []
    if runs:
        every = range(max(row.position for row in runs) + 1)
        holes = sorted(set(every) - {row.position for row in runs})
        result += [f"the run at position {position}" for position in holes]
    pairs: dict[int, set[bool]] = collections.defaultdict(set)
    for row in runs:
        if row.pair is not None:
            pairs[row.pair].add(row.baseline)
    for pair, sides in sorted(pairs.items()):
        if sides != {True, False}:
            side = "candidate" if True in sides else "baseline"
            result.append(f"the {side} run of pair {pair}")
    return result


def planned(config: Config) -> list[str]:
    """ "kind label" of every row that a whole experiment leaves behind."""
    runs = [f"serve {run.label}" for run in configs.schedule(config)]
    probes = [
        f"{kind} {arm}"
        for kind in ("outputs", "continuation", "branching")
        if getattr(config, kind) is not None
        for arm in config.arms
    ]
    return (runs if config.load else []) + probes


class Speed(msgspec.Struct):
    """Speed of one run or of several pooled. Seconds, tokens and tokens/s."""

    requests: int
    input_rate: float
    output_rate: float
    ttft: list[float]
    tpot: list[float]  # seconds per output token after the first, a request each
    latency: list[float]


def speed(runs: Sequence[Row]) -> Speed | None:
    """Pooled speed of runs, None when one of them may not show any.

    Raises no error for a run without a duration or without requests: it has no
    speed either.
    """
    if not runs or not all(row.passed and row.duration_s for row in runs):
        return None
    good = [r for row in runs for r in row.requests if r.ok]
    tokens = [sum(r.input_tokens for r in row.requests if r.ok) for row in runs]
    if not all(tokens):
        return None
    seconds = [row.duration_s for row in runs]
    return Speed(
        requests=len(good),
        input_rate=stats.pooled_throughput(tokens, seconds),
        output_rate=sum(r.output_tokens for r in good) / sum(seconds),
        ttft=[r.ttft_s for r in good if r.ttft_s is not None],
        tpot=[
            (r.latency_s - r.ttft_s) / (r.output_tokens - 1)
            for r in good
            if r.output_tokens > 1 and None not in (r.latency_s, r.ttft_s)
        ],
        latency=[r.latency_s for r in good if r.latency_s is not None],
    )


def outputs_differ(group: Group) -> dict[str, str]:
    """For each arm whose fixed outputs are not the baseline's: how many, which first."""
    members = [row for row in group.of("outputs") if row.outputs]
    base = next((row for row in members if row.baseline), None)
    result = {}
    for row in members if base else []:
        differ = compare_outputs(base, row)
        if differ:
            count = (
                f"{len(differ)} of {len(row.outputs)} outputs differ from {base.arm}'s"
            )
            result[row.arm] = f"{count}; {differ[0]}"
    return result


class Comparison(msgspec.Struct):
    """One arm against the baseline, over the pairs in which both runs passed."""

    arm: str
    pairs: list[str]  # "A1 B1"
    rate: list[float]  # candidate / baseline of input tokens/s, a pair each
    ttft: list[float]  # of the median time to first token
    pooled: float | None  # of the pooled rates, these pairs only
    verdict: stats.Verdict
    ttft_verdict: stats.Verdict
    left_out: list[str]  # pairs that show nothing, with the reason


def pairs_of(group: Group, arm: str) -> list[tuple[Row, Row]]:
    """(baseline run, run of `arm`) for each pair number, in order."""
    by_pair: dict[int, tuple[list[Row], list[Row]]] = {}
    for row in group.of("serve"):
        if row.pair is None or (not row.baseline and row.arm != arm):
            continue
        sides = by_pair.setdefault(row.pair, ([], []))
        sides[0 if row.baseline else 1].append(row)
    return [
        both
        for _, (base, candidate) in sorted(by_pair.items())
        for both in zip(base, candidate, strict=False)
    ]


def arguments(row: Row) -> tuple[str, ...]:
    """The server's arguments without its port, which is any free one."""
    given = row.environment.arguments
    ports = {i for i, text in enumerate(given) if text == "--port"}
    return tuple(
        t for i, t in enumerate(given) if i not in ports and i - 1 not in ports
    )


def same_engine(one: Row, other: Row) -> bool:
    """True when two runs were of one tree with one set of arguments."""
    a, b = one.environment, other.environment
    if a.engine is None or b.engine is None:
        return one.arm == other.arm
    # The digest says what was imported; where it lay does not matter.
    variables = [
        {name: value for name, value in each.items() if name != "PYTHONPATH"}
        for each in (a.variables, b.variables)
    ]
    same_text = (a.engine.digest, arguments(one)) == (b.engine.digest, arguments(other))
    return same_text and variables[0] == variables[1]


def noise(group: Group, measure: Callable[[Speed], float | None]) -> float | None:
    """The A/A noise floor of one measure.

    A/A pairs are consecutive runs of one arm, and pairs whose two arms ran one
    tree with one set of arguments.
    """
    by_arm: dict[str, list[float]] = collections.defaultdict(list)
    for row in group.of("serve"):
        one = speed([row])
        value = measure(one) if one else None
        if value:
            by_arm[row.arm].append(value)
    series = list(by_arm.values())
    for arm in group.arms:
        for base, candidate in pairs_of(group, arm) if arm != group.baseline else ():
            if not same_engine(base, candidate):
                continue
            both = [speed([base]), speed([candidate])]
            values = [measure(one) if one else None for one in both]
            if all(values):
                series.append(values)
    return stats.noise_floor(series)


def input_rate(one: Speed) -> float | None:
    """Input tokens/s."""
    return one.input_rate


def median_ttft(one: Speed) -> float | None:
    """Median time to first token in seconds, None when no request had one."""
    return stats.percentile(one.ttft, 50) if one.ttft else None


def compare(group: Group, *, level: float, seed: int) -> list[Comparison]:
    """Every arm against the baseline."""
    result = []
    floor, ttft_floor = noise(group, input_rate), noise(group, median_ttft)
    differ = outputs_differ(group)
    candidates = {row.arm for row in group.of("serve") if not row.baseline}
    for arm in [name for name in group.arms if name in candidates]:
        pairs, left_out = [], []
        for base, candidate in pairs_of(group, arm):
            bad = [row.label for row in (base, candidate) if speed([row]) is None]
            if arm in differ:
                left_out.append(f"{base.label} {candidate.label} (outputs differ)")
            elif bad:
                reason = f"{' and '.join(bad)} did not pass"
                left_out.append(f"{base.label} {candidate.label} ({reason})")
            else:
                pairs.append((base, candidate))
        both = [(speed([base]), speed([candidate])) for base, candidate in pairs]
        rate = stats.paired_ratios([(b.input_rate, c.input_rate) for b, c in both])
        times = [(median_ttft(b), median_ttft(c)) for b, c in both]
        ttft = stats.paired_ratios([pair for pair in times if all(pair)])
        pooled = None
        if pairs:
            sides = zip(*pairs, strict=True)
            base_all, candidate_all = (speed(list(side)) for side in sides)
            pooled = candidate_all.input_rate / base_all.input_rate
        shown = {"level": level, "seed": seed}
        result.append(
            Comparison(
                arm=arm,
                pairs=[f"{base.label} {candidate.label}" for base, candidate in pairs],
                rate=rate,
                ttft=ttft,
                pooled=pooled,
                verdict=stats.verdict(rate, noise=floor, **shown),
                ttft_verdict=stats.verdict(
                    ttft, noise=ttft_floor, higher_is_better=False, **shown
                ),
                left_out=left_out,
            )
        )
    return result
