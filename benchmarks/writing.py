"""Writing rows back to a pinned table: writing only, and reading, changing and writing every row.

The store is checked before each configuration is timed, and after it.
"""

from __future__ import annotations

from _common import arguments, limit, report, save, speed

from rowferry._bench.clock import NEVER
from rowferry._bench.reading import stamped
from rowferry._bench.workloads import apart
from rowferry._bench.writing import Writing

BATCHES = 200
WARM_BATCHES = 30


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True)
    rows, batch = options.rows(512), options.ids(131_072)
    store = stamped(rows, 512)
    link = limit(options)
    ring = apart(rows, batch, BATCHES)
    results = []
    for name, fetch, rate in (
        ("writing only", False, link.to_host),
        ("read and write every row", True, link.to_device),
    ):
        for settings in ({}, {"depth": 3}):
            with Writing(store, ring, options.device, fetch=fetch, **settings) as writing:
                writing(options.batches(WARM_BATCHES), NEVER)
                writing.check()
                found = options.measure(writing, BATCHES)
                writing.check()
            nbytes = len(ring[0]) * store.row_nbytes * (2 if fetch else 1)
            shown = {key: str(value) for key, value in settings.items()}
            results.append(report({"work": name, **speed(found, nbytes, rate), **shown}))
    save("writing", options, results, link=link._asdict(), seed=1, rows=rows)


if __name__ == "__main__":
    main()
