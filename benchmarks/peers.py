"""The same random rows of a pinned table by other ways, each where it is installed; rowferry first.

Each way's values are checked before it is timed. Those of ``rowferry bench``, and more.
"""

from __future__ import annotations

import contextlib
from typing import Any

from _common import Options, arguments, limit, report, save, speed
from _more_peers import MORE_PEERS

from rowferry._bench.clock import RUNS, Slice, clock, paced
from rowferry._bench.peers import PEERS, Peered, table_of
from rowferry._bench.reading import Ferried, Way, check, reader, rows_of, stamped
from rowferry._bench.workloads import Ring, ring_length, uniform
from rowferry.stores import PinnedStore
from rowferry.stores._devices import device_for

ROW_BYTES, BATCH = 512, 131_072
CHECKED = 2  # batches; a way of others may take seconds for one
SECONDS, SMOKE_SECONDS = 8.0, 0.3  # for the runs of one way


def measure(name: str, way: Way, store: PinnedStore, ring: Ring, options: Options, rate: float) -> dict[str, Any]:
    """The median of up to five runs, as many batches as fit in their time."""
    with contextlib.closing(way):
        check(way, ring, rows_of(store), name, CHECKED)
        seconds = SMOKE_SECONDS if options.smoke else SECONDS * options.runs / RUNS
        found = paced(reader(way, options.device), Slice(seconds, clock() + seconds))
    return {"work": name, **speed(found, len(ring[0]) * store.row_nbytes, rate), "runs": found.runs}


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    link = limit(options)
    batch = options.ids(BATCH)
    store = stamped(options.rows(ROW_BYTES), ROW_BYTES)
    ring = uniform(len(store), batch, ring_length(batch))
    ours = measure("rowferry", Ferried(store, ring, options.device), store, ring, options, link.to_device)
    results = [report(ours)]
    table = table_of(store, device_for(options.device))
    for peer in (*PEERS, *MORE_PEERS):
        if problem := peer.problem(table):
            results.append(report({"work": peer.name, "not_measured": problem}))
            continue
        found = measure(peer.name, Peered(peer, table, ring), store, ring, options, link.to_device)
        results.append(report({**found, "rowferry_is_times_as_fast": ours["gb_s"] / found["gb_s"]}))
    save("peers", options, results, link=link._asdict(), seed=0, rows=len(store), batch=batch)


if __name__ == "__main__":
    main()
