"""What a serving run must meet before it may show a speed. Pure functions."""

from .config import Load
from .rows import Check, Request

SHOWN = 5  # offenders named in one message


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def complete(requests: list[Request], load: Load) -> Check:
    """All requests answered."""
    bad = [f"request {r.index}: {r.error}" for r in requests if not r.ok]
    short = len(requests) != load.requests
    if short:
        bad.insert(0, f"{len(requests)} of {load.requests} requests reported")
    good = sum(r.ok for r in requests)
    detail = _listed(bad) or f"{good} of {load.requests} requests succeeded"
    return Check(name="requests", ok=not bad, detail=detail)


def lengths(requests: list[Request], load: Load) -> Check:
    """Every answered request had the stated number of tokens in and out."""
    bad = [
        f"request {r.index}: {r.input_tokens} in, {r.output_tokens} out"
        for r in requests
        if r.ok and (r.input_tokens, r.output_tokens) != (load.isl, load.osl)
    ]
    stated = f"{load.isl} tokens in, {load.osl} out stated"
    detail = f"{stated}; {_listed(bad)}" if bad else stated
    return Check(name="lengths", ok=not bad, detail=detail)


def cached(requests: list[Request], load: Load) -> Check:
    """Every answered request found the stated share of its prompt in the cache."""
    bad = []
    for r in requests:
        if not r.ok:
            continue
        if r.cached_tokens is None:
            bad.append(f"request {r.index}: cached tokens unknown")
        elif abs(r.cached_tokens - r.input_tokens * load.cached_share) > (
            load.cached_slack + 0.5  # a share need not be a whole number of tokens
        ):
            bad.append(
                f"request {r.index}: {r.cached_tokens} of {r.input_tokens} cached"
            )
    stated = (
        f"{load.cached_share:.1%} of each prompt stated,"
        f" {load.cached_slack} tokens of slack"
    )
    hint = ""
    if bad and not load.cached_share:
        hint = " (were two prompts alike? another load.seed gives other prompts)"
    detail = f"{stated}; {_listed(bad)}{hint}" if bad else stated
    return Check(name="cached-tokens", ok=not bad, detail=detail)


def retractions(before: int | None, after: int | None) -> Check:
    """The server took no request back during the formal part."""
    if before is None or after is None:
        detail = (
            "the server publishes no retraction count; start it with --enable-metrics"
        )
        return Check(name="retractions", ok=False, detail=detail)
    count = after - before
    detail = f"{count} requests retracted"
    if count:
        detail += "; lower load.concurrency or give the server more cache"
    return Check(name="retractions", ok=count == 0, detail=detail)
