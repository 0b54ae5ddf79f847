"""How much of the transfer a training loop hides: step time over max(compute + serve, transfer), and what a
launch-bound loop pays for the pipeline beside it.

Compute is bf16 matrix products that fill the GPU; transfer is what the same run reads without compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _common import Options, arguments, limit, report, save

import rowferry as rf
from rowferry._bench.clock import Timing
from rowferry._bench.overlap import RATIOS, compute_of, launch_bound, serve_seconds, step_run
from rowferry._bench.reading import Ferried, Way, check, reader, rows_of, stamped
from rowferry._bench.workloads import ring_length, uniform
from rowferry.stores._devices import device_for

STEPS = 200
LAUNCH_BATCHES = 240


def step_times(
    name: str, way: Way, transfer: float, batch: int, store: rf.Store, options: Options, steps: int
) -> list[dict[str, Any]]:
    """A result for each ratio of compute to ``transfer``, the seconds of a batch without compute."""
    device = device_for(options.device)
    serve = serve_seconds(device, batch, store.row_shape, store.dtype)
    results = []
    for ratio in RATIOS:
        compute = compute_of(device, transfer * ratio)

        def run(count: int, stop: float, step: Callable[[], None] = compute.step) -> Timing:
            return step_run(way, step, device, count, stop)

        found = options.measure(run, steps)
        bound = max(compute.seconds + serve, transfer)
        results.append(
            report(
                {
                    "work": f"compute/transfer {ratio:g}{name}",
                    "step_over_bound": found.median / bound,
                    "lowest": found.fastest / bound,
                    "highest": found.slowest / bound,
                    "ms_a_step": 1e3 * found.median,
                    "ms_compute": 1e3 * compute.seconds,
                    "ms_transfer": 1e3 * transfer,
                    "ms_serve": 1e3 * serve,
                }
            )
        )
    return results


def launched(name: str, way: Way, batch_bytes: int, options: Options, rate: float) -> dict[str, Any]:
    """The median run of a launch-bound loop."""
    device, batches = device_for(options.device), options.batches(LAUNCH_BATCHES)
    found = sorted(launch_bound(way, device, batch_bytes, rate, batches=batches) for _ in range(options.runs))
    ends = {"lowest": found[0].slowdown, "highest": found[-1].slowdown}
    return report({"work": f"launch-bound loop{name}", **found[len(found) // 2]._asdict(), **ends})


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    link = limit(options)
    rows, batch = options.rows(512), options.ids(131_072)
    store = stamped(rows, 512)
    ring = uniform(rows, batch, ring_length(batch))
    with Ferried(store, ring, options.device) as way:
        check(way, ring, rows_of(store), "rowferry")
        transfer = options.measure(reader(way, options.device), STEPS).median
        results = step_times("", way, transfer, batch, store, options, STEPS)
        results.append(launched("", way, batch * store.row_nbytes, options, link.to_device))
    with Ferried(store, ring, options.device, lookahead=0) as way:
        results += step_times(", lookahead=0", way, transfer, batch, store, options, STEPS * 3 // 5)
    save("overlap", options, results, link=link._asdict(), seed=0)


if __name__ == "__main__":
    main()
