"""One sentence about a pipeline's run: what limits it, how far that goes, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._stats import Stats

UNFELT = 0.05  # of the time; a training that waits less is limited by itself
NEAR = 0.75  # of the link; above that a better mover gains little


def verdict(stats: Stats) -> str:
    """See the module. Shares of time leave out the cold start, which a longer epoch makes small."""
    if not stats.batches:
        return "no batch was given out yet"
    cold = stats.wait_seconds.get("cold start", 0.0)
    seconds = stats.seconds - cold
    waits = {cause: value for cause, value in stats.wait_seconds.items() if cause != "cold start"}
    share = sum(waits.values()) / seconds if seconds > 0 else 0.0
    if share >= UNFELT:
        cause = max(waits, key=lambda name: waits[name])
        return _LIMITS[cause](stats, waits[cause] / seconds)
    if cold > stats.seconds / 2:
        return (
            f"the cold start limits: the first batch came after {cold:.2f} of {stats.seconds:.2f} s; an epoch of more than "
            f"{_count(stats.batches, 'batch', 'batches')} makes up for it"
        )
    if not stats.windows:
        rate = stats.bytes / stats.seconds / 1e9 if stats.seconds else 0.0
        return f"nothing crosses: the rows are in the memory of {stats.device}, {rate:.2f} GB/s of them were given out"
    return f"the training limits: it waited {_percent(share, 1)} of {seconds:.2f} s; {_hides(stats)}"


def _link(stats: Stats, share: float) -> str:
    del share
    if stats.bytes_fetched:
        rate, reached = stats.fetch_gbps, stats.fetch_gbps / stats.link_gbps if stats.link_gbps else None
    else:
        rate, reached = stats.drain_gbps, stats.link_share
    of = f"{rate:.1f} GB/s" if reached is None else f"{reached:.2f} of {stats.link_gbps:.1f} GB/s"
    near = reached is not None and reached >= NEAR
    change = "" if near else "; larger windows (staging_bytes, lookahead) or wider rows come nearer to it"
    return f"the link limits: {of}; {_hides(stats)}{change}"


def _sampler(stats: Stats, share: float) -> str:
    del stats
    return (
        f"the sampler limits: the training waited {_percent(share)} of the time for index batches; yield whole arrays, or use "
        "batch_size and shuffle"
    )


def _plan(stats: Stats, share: float) -> str:
    return (
        f"the plan limits: the training waited {_percent(share)} of the time for it; "
        f"larger batches or larger windows (lookahead, now {stats.batches_in_window}) need fewer plans"
    )


def _host_gather(stats: Stats, share: float) -> str:
    change = "a PinnedStore needs no host threads" if stats.link_gbps else "larger windows (staging_bytes) have fewer rows"
    return (
        f"the host's gather limits: {stats.fetch_gbps:.1f} GB/s{_of_link(stats)}, "
        f"the training waited {_percent(share)} of the time for it; more threads= make it faster, {change}"
    )


def _store(stats: Stats, share: float) -> str:
    return (
        f"the store limits: {stats.fetch_gbps:.2f} GB/s, the training waited {_percent(share)} of the time for it; "
        "larger windows (staging_bytes) read less of a file, rows in memory (PinnedStore.load) none"
    )


def _drain(stats: Stats, share: float) -> str:
    change = "depth=3 lets drains and fetches overlap" if stats.depth < 3 else "write back fewer rows or columns"
    return (
        f"the drain limits: {stats.drain_gbps:.1f} GB/s{_of_link(stats)}, "
        f"the training waited {_percent(share)} of the time for changed rows to reach their stores; {change}"
    )


_LIMITS: dict[str, Callable[[Stats, float], str]] = {
    "link": _link,
    "sampler": _sampler,
    "plan": _plan,
    "host gather": _host_gather,
    "store": _store,
    "drain": _drain,
}


def _hides(stats: Stats) -> str:
    size = max(round(stats.batches / stats.windows), 1) if stats.windows else 1
    return f"windows of {_count(size, 'batch', 'batches')} hide {_percent(stats.hidden_share)} of it"


def _of_link(stats: Stats) -> str:
    return f" of the link's {stats.link_gbps:.1f}" if stats.link_gbps else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
