"""A launch-bound training loop beside cold reading: pairs of tiny kernels, and now and then a batch of random rows from a disk.

The rows are those of a .npy, and of a raw zarr in chunks of 1,024 rows. Caches are dropped and the file opened anew before
every run. A batch comes after so many pairs that the disk is busy for most of the loop's time; ``disk_busy`` is that share,
as the system counts it (what the pipeline reads alone is no measure: many disks are fast for some seconds and then held to
a rate). ``slowdown`` is the time of a pair beside the pipeline over its time alone, without what ``next()`` took, which is
reported beside it.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from _common import Options, arguments, report, save
from _disk import bytes_from_disk, disk_busy_seconds, make_all_cold, require_stamps, stamped_file

import rowferry as rf
from rowferry._bench.clock import NEVER
from rowferry._bench.overlap import LaunchBound, launch_bound, step_run
from rowferry._bench.workloads import Batches, Ring, ring_length, uniform
from rowferry.stores._device_contract import Device
from rowferry.stores._devices import device_for

WIDTH = 256  # float32: rows of 1 KiB
BATCH, BATCHES = 2_048, 160  # few, so that most rows lie in pages that no earlier batch brought in
KINDS: dict[str, dict[str, Any]] = {"npy": {}, "zarr": {"chunks": 1_024, "shards": False}}
MOST_ROWS = 1 << 24  # whose numbers float32 has
BUSY = 0.8
SECONDS = 3.0  # that the batches of a loop may take: a disk of a tenth of another's speed gets a tenth of its batches
PROBE = 24


@final
class Cold:
    """A way (see ``rowferry._bench.reading.Way``) whose every epoch opens a file that is not in memory.

    An epoch has more batches than are asked for: else the last of them would be fetched, and the loop beside nothing, long
    before it ends.
    """

    def __init__(self, path: Path, ring: Ring, device: torch.device) -> None:
        self._path, self._ring, self._device = path, ring, device
        self._opened: tuple[rf.Store, rf.Pipeline] | None = None
        self._from_disk = 0

    def epoch(self, count: int) -> Iterator[Any]:
        self.close()
        make_all_cold(self._path)
        store = rf.open_store(self._path)
        pipe = rf.Pipeline(store, batch_sampler=Batches(self._ring, 4 * count), device=self._device)
        self._opened, self._from_disk = (store, pipe), bytes_from_disk()
        return iter(pipe)

    def disk_share(self) -> float:
        """Bytes that came from the disk in the live epoch, over those of the rows that were fetched."""
        assert self._opened is not None
        return (bytes_from_disk() - self._from_disk) / max(self._opened[1].stats().bytes_fetched, 1)

    def close(self) -> None:
        if self._opened is not None:
            store, pipe = self._opened
            self._opened = None
            pipe.close()
            store.close()


def check(way: Cold, ring: Ring) -> None:
    """Compare the first batches with what was asked for."""
    for number, batch in enumerate(way.epoch(4)):
        if number == 4:
            break
        require_stamps(ring[number], batch.data.cpu())


def in_time(way: Cold, device: Device, most: int) -> int:
    """How many batches to time on this disk: ``most``, fewer if they took longer than ``SECONDS``."""
    first = step_run(way, lambda: None, device, min(PROBE, most), NEVER)
    return min(most, max(int(SECONDS * first.batches / first.seconds), PROBE))


def beside(path: Path, rows: int, options: Options) -> dict[str, Any]:
    """The median run of the loop beside one file."""
    device, batch = device_for(options.device), options.ids(BATCH)
    ring = uniform(rows, batch, ring_length(batch))
    way = Cold(path, ring, options.device)
    nbytes, disk_busy = 4 * WIDTH * batch, functools.partial(disk_busy_seconds, path)
    found: list[tuple[LaunchBound, float, float]] = []
    try:
        check(way, ring)
        batches = in_time(way, device, options.batches(BATCHES))
        for _ in range(options.runs):
            alone = step_run(way, lambda: None, device, batches, NEVER)
            rate = nbytes * alone.batches / alone.seconds / 1e9
            loop = launch_bound(way, device, nbytes, rate, busy=BUSY, batches=batches, busy_seconds=disk_busy)
            found.append((loop, rate, way.disk_share()))
    finally:
        way.close()
    found.sort(key=lambda each: each[0].slowdown)
    loop, rate, share = found[len(found) // 2]
    shown = loop._asdict()
    busy = shown.pop("link_busy")
    return report(
        {
            "work": f"launch-bound loop beside a cold .{path.suffix[1:]}",
            **shown,
            "lowest": found[0][0].slowdown,
            "highest": found[-1][0].slowdown,
            "disk_busy": busy,
            "gb_s": nbytes / (loop.pairs_a_batch * loop.us_alone * loop.slowdown + loop.us_next) / 1e3,
            "gb_s_alone": statistics.median(each[1] for each in found),
            "disk_bytes_a_byte": share,
            "batches": batches,
        }
    )


def main() -> None:
    options = arguments(__doc__ or "", needs_gpu=True, rows_gib=8)
    rows = min(options.rows(4 * WIDTH), MOST_ROWS)
    folder = Path(tempfile.mkdtemp(prefix="rowferry-", dir=options.folder))
    results = []
    try:
        for kind, layout in KINDS.items():
            path = stamped_file(folder / f"rows.{kind}", rows, WIDTH, **layout)
            results.append(beside(path, rows, options))
            save("beside_disk", options, results, file_bytes=4 * WIDTH * rows, batch=options.ids(BATCH), seed=0)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
