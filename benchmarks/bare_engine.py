"""rowferry beside a bare engine on the same idea, in one run: what share of it the library reaches.

Rows: reading uniform and Zipf ids, the time of a step beside compute, and a launch-bound loop. Each engine takes its turn
in every figure, and its values are checked before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from _bare import BareEngine
from _common import Options, arguments, limit, report, save
from overlap import LAUNCH_BATCHES, STEPS

from rowferry._bench.clock import NEVER, Run, figures
from rowferry._bench.overlap import RATIOS, LaunchBound, compute_of, launch_bound, serve_seconds, step_run
from rowferry._bench.reading import Ferried, Way, check, reader, rows_of, stamped
from rowferry._bench.workloads import Ring, ring_length, truncated_zipf, uniform
from rowferry.stores import PinnedStore
from rowferry.stores._devices import device_for

ENGINES = ("rowferry", "bare")


class Work(NamedTuple):
    """Reading: rows of so many bytes, ids a batch, batches an epoch, and batches in a window of the bare engine."""

    name: str
    row_bytes: int
    ids: int
    batches: int
    window: int
    zipf: bool = False


WORKS = (
    Work("131,072 x 512 B, uniform", 512, 131_072, 320, 8),
    Work("4,096 x 512 B, uniform", 512, 4_096, 6_144, 256),
    Work("131,072 x 128 B, uniform", 128, 131_072, 640, 32),
    Work("131,072 x 512 B, Zipf 1.05", 512, 131_072, 640, 32, zipf=True),
)


def seconds_a_batch(runs: dict[str, Run], options: Options, batches: int) -> dict[str, list[float]]:
    """Of each engine, in turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.runs):
        for name, run in runs.items():
            done, seconds = run(options.batches(batches), NEVER)
            found[name].append(seconds / done)
    return found


def beside(work: str, found: dict[str, list[float]], measure: Callable[[float], dict[str, float]]) -> list[dict[str, Any]]:
    """A result for each engine, from seconds a batch, and with rowferry's what share of the bare engine's speed it has."""
    medians = {name: figures(seconds).median for name, seconds in found.items()}
    results = []
    for name in found:
        more = {"share_of_bare": medians["bare"] / medians["rowferry"]} if name == "rowferry" else {}
        results.append(report({"work": f"{work}, {name}", **more, **measure(medians[name])}))
    return results


@contextlib.contextmanager
def engines(store: PinnedStore, ring: Ring, options: Options, window: int) -> Iterator[dict[str, Way]]:
    """Both, checked over several windows; closed after the block."""
    made: dict[str, Way] = {
        "rowferry": Ferried(store, ring, options.device),
        "bare": BareEngine(store, ring, options.device, window),
    }
    for name, way in made.items():
        check(way, ring, rows_of(store), name, options.batches(4 * window))
    try:
        yield made
    finally:
        for way in made.values():
            way.close()


def read(work: Work, options: Options, rate: float) -> list[dict[str, Any]]:
    rows, batch = options.rows(work.row_bytes), options.ids(work.ids)
    store = stamped(rows, work.row_bytes)
    ring = truncated_zipf(rows, batch, 256) if work.zipf else uniform(rows, batch, max(ring_length(batch), 8 * work.window))
    nbytes = batch * store.row_nbytes
    with engines(store, ring, options, work.window) as ways:
        runs = {name: reader(way, options.device) for name, way in ways.items()}
        found = seconds_a_batch(runs, options, work.batches)
    store.close()
    return beside(work.name, found, lambda each: {"share_of_link": nbytes / each / 1e9 / rate, "gb_s": nbytes / each / 1e9})


def steps(ways: dict[str, Way], store: PinnedStore, batch: int, options: Options) -> list[dict[str, Any]]:
    """Both beside the same compute; each over the larger of compute + serve and its own transfer."""
    device = device_for(options.device)
    runs = {name: reader(way, options.device) for name, way in ways.items()}
    transfer = {name: figures(each).median for name, each in seconds_a_batch(runs, options, STEPS).items()}
    serve = serve_seconds(device, batch, store.row_shape, store.dtype)
    results = []
    for ratio in RATIOS:
        compute = compute_of(device, transfer["rowferry"] * ratio)

        def stepping(way: Way, step: Callable[[], None] = compute.step) -> Run:
            return lambda count, stop: step_run(way, step, device, count, stop)

        found = seconds_a_batch({name: stepping(way) for name, way in ways.items()}, options, STEPS)
        for name in ENGINES:
            bound, took = max(compute.seconds + serve, transfer[name]), figures(found[name]).median
            more = {"share_of_bare": figures(found["bare"]).median / took} if name == "rowferry" else {}
            ms = {"ms_a_step": 1e3 * took, "ms_compute": 1e3 * compute.seconds, "ms_transfer": 1e3 * transfer[name]}
            results.append(
                report({"work": f"compute/transfer {ratio:g}, {name}", "step_over_bound": took / bound, **more, **ms})
            )
    return results


def launches(ways: dict[str, Way], batch_bytes: int, options: Options, rate: float) -> list[dict[str, Any]]:
    """The launch-bound loop beside each, in turns; the median run of each."""
    device, batches = device_for(options.device), options.batches(LAUNCH_BATCHES)
    found: dict[str, list[LaunchBound]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, way in ways.items():
            found[name].append(launch_bound(way, device, batch_bytes, rate, batches=batches))
    middles = {name: sorted(runs)[len(runs) // 2] for name, runs in found.items()}
    return [report({"work": f"launch-bound loop, {name}", **middle._asdict()}) for name, middle in middles.items()]


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    link = limit(options)
    results = [result for work in WORKS for result in read(work, options, link.to_device)]
    batch = options.ids(131_072)
    store = stamped(options.rows(512), 512)
    ring = uniform(len(store), batch, ring_length(batch))
    with engines(store, ring, options, 8) as ways:
        results += steps(ways, store, batch, options)
        results += launches(ways, batch * store.row_nbytes, options, link.to_device)
    save("bare_engine", options, results, link=link._asdict(), seed=0, table_bytes=options.rows(1))


if __name__ == "__main__":
    main()
