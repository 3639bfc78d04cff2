"""A discovery's report as text."""

from .analysis import Prediction, Report
from .candidates import text


def render(report: Report) -> str:
    """Ranking, failures, how well padding predicted it, and the verdict."""
    lines = ["", f"baseline: {text(report.baseline)} (fastest without a record)", ""]
    lines.append(
        f"{'tactic':<16}{'tile':>5} {'listed':<7}{'median ms':>10}  "
        f"{'against the baseline':<28}numerics"
    )
    for item in report.ranked:
        interval = (
            f"{item.ratio:.4f} [{item.interval.low:.4f}, {item.interval.high:.4f}]"
        )
        lines.append(
            f"{text(item.tactic):<16}{item.tile or '-':>5} "
            f"{'no' if item.hidden else 'yes':<7}{item.median_ms:>10.4f}  "
            f"{interval:<28}{item.numerics}"
        )
    if report.failed:
        lines += ["", "not timed or not usable:"]
        lines += [f"  {text(tactic)}: {why}" for tactic, why in report.failed]
    lines += ["", _prediction(report.prediction), ""]
    if report.challenger is not None:
        lines.append(
            f"confirmation, {text(report.challenger)} against "
            f"{text(report.baseline)}: {report.verdict}"
        )
    if report.winner is not None:
        lines.append(f"RECOMMENDED: {text(report.winner)}")
    else:
        lines.append(f"nothing recommended: {report.verdict.reason}")
    return "\n".join(lines)


def _prediction(found: Prediction) -> str:
    if found.by_tile is None:
        return f"padding against time: {found.tiles} tile(s), no rank correlation"
    return (
        "padding against time, Spearman's rank correlation: "
        f"{found.by_tile:+.2f} over {found.tiles} tiles"
        + (
            f", {found.by_tactic:+.2f} over tactics"
            if found.by_tactic is not None
            else ""
        )
        + f"; fewest rows: tile {found.predicted}, fastest: tile {found.measured}"
        + ("" if found.tiles > 4 else " (few tiles, so read it as a hint)")
    )
