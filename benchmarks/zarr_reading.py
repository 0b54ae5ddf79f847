"""Rows of zarr arrays: random, in order, by ``shuffle="chunks"`` and large ones, beside zarr, zarrs and tensorstore.

Cold figures begin with the pages of all files dropped and the array opened anew. Rows are checked in every figure. Readers
that are not installed are left out. Random rows are read by one thread in one call, as a window of the pipeline is.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from _common import Options, arguments, report, save, synchronize
from _disk import make_all_cold
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec

import rowferry as rf

WIDTH = 256  # float32: rows of 1 KiB
WINDOWS = (2_048, 16_384)
SPAN_BYTES = 64 << 20  # what is asked for at a time when rows are read in order
BATCH_BYTES = 4 << 20
SHARD_ROWS = 65_536
LARGE = 1 << 20  # float32: rows of 4 MiB

Take = Callable[[NDArray[np.int64] | slice], Any]
LAYOUTS: dict[str, dict[str, Any]] = {
    "raw, 1,024-row chunks": {"chunks": (1024, WIDTH), "compressors": None},
    "raw, 64-row chunks in shards": {"chunks": (64, WIDTH), "shards": (SHARD_ROWS, WIDTH), "compressors": None},
    "zstd, 64-row chunks in shards": {"chunks": (64, WIDTH), "shards": (SHARD_ROWS, WIDTH), "compressors": ZstdCodec()},
}
LARGE_LAYOUTS: dict[str, dict[str, Any]] = {
    "raw, rows of 4 MiB": {"chunks": (1, LARGE), "compressors": None},
    "zstd, rows of 4 MiB": {"chunks": (1, LARGE), "compressors": ZstdCodec()},
}


def make(path: Path, rows: int, width: int, layout: dict[str, Any]) -> None:
    """Rows that begin with their number and are noise of few digits else, so that they compress by about a half."""
    array = zarr.create_array(path, shape=(rows, width), dtype="f4", **layout)
    rng = np.random.default_rng(0)
    step = layout.get("shards", layout["chunks"])[0] * max(SPAN_BYTES // (4 * width * layout["chunks"][0]), 1)
    noise = rng.standard_normal((min(step, rows), width), dtype=np.float32).round(1)
    for start in range(0, rows, step):
        piece = np.roll(noise, start, axis=1)[: min(step, rows - start)]
        piece[:, 0] = np.arange(start, start + len(piece))
        array[start : start + len(piece)] = piece
    os.sync()


# ---- readers: each opens the array and gives a function that takes sorted rows, or a slice of them --------------------


@contextlib.contextmanager
def by_rowferry(path: Path) -> Iterator[Take]:
    with rf.open_store(path) as store:
        yield lambda rows: store.gather(rows).numpy()


@contextlib.contextmanager
def by_zarr(path: Path) -> Iterator[Take]:
    array = zarr.open_array(path, mode="r")
    yield lambda rows: array[rows] if isinstance(rows, slice) else array.oindex[rows]


@contextlib.contextmanager
def by_zarrs(path: Path) -> Iterator[Take]:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}), by_zarr(path) as take:
        yield take


@contextlib.contextmanager
def by_tensorstore(path: Path) -> Iterator[Take]:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    array = tensorstore.open(spec, open=True, read=True).result()
    yield lambda rows: array[rows].read().result()


def readers() -> dict[str, Any]:
    """Those that are installed, by name; rowferry first."""
    found = {"rowferry": by_rowferry, "zarr": by_zarr}
    for name, reader in (("zarrs", by_zarrs), ("tensorstore", by_tensorstore)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            found[name] = reader
    return found


def rate(take: Take, asked: list[Any], before: Callable[[], None]) -> float:
    """Rows a second of one call after the other; ``before`` runs before the clock starts."""
    before()
    rows = 0
    start = time.perf_counter()
    for each in asked:
        found = take(each)
        rows += len(found)
        wanted = np.arange(each.start, each.stop) if isinstance(each, slice) else each
        if not np.array_equal(found[:, 0], wanted):
            raise AssertionError("rows that were not asked for")
    return rows / (time.perf_counter() - start)


def compare(path: Path, work: str, ways: dict[str, Callable[[bool], float]], options: Options) -> list[dict[str, Any]]:
    """Rows a second of each way, cold and warm, in turn; how many times each of the others rowferry's ways are."""
    results = []
    for cold in (True, False):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.runs):
            for name, way in ways.items():
                if cold:
                    make_all_cold(path, strict=not options.smoke)
                found[name].append(way(cold))
        middle = {name: statistics.median(rates) for name, rates in found.items()}
        ours = {name: middle.pop(name) for name in list(middle) if name.startswith("rowferry")}
        for name, speed in ours.items():
            result: dict[str, Any] = {"of_best": speed / max(middle.values())}
            result |= {f"times_{other}": speed / theirs for other, theirs in middle.items()}
            result |= {"work": work, "how": name, "cache": "cold" if cold else "warm", "rows_s": speed}
            result |= {f"rows_s_{other}": theirs for other, theirs in middle.items()}
            results.append(report(result))
    return results


def random_rows(path: Path, work: str, rows: int, options: Options) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)

    def way(reader: Any, window: int) -> Callable[[bool], float]:
        def run(cold: bool) -> float:
            asked = [np.unique(rng.integers(0, rows, window)) for _ in range(1 if cold else 4)]
            with reader(path) as take:
                return rate(take, asked, lambda: None if cold else (take(asked[0]), None)[1])

        return run

    results = []
    for window in (64,) if options.smoke else WINDOWS:
        ways = {name: way(reader, window) for name, reader in readers().items()}
        results += compare(path, f"{work}: {window:,} random rows", ways, options)
    return results


def in_order(path: Path, work: str, rows: int, width: int, options: Options) -> list[dict[str, Any]]:
    """An epoch: the others in spans of 64 MiB (one chunk of large rows), rowferry through the pipeline in batches."""
    span = max(SPAN_BYTES // (4 * width), 1) if width == WIDTH else 1
    spans = [slice(start, min(start + span, rows)) for start in range(0, rows, span)]

    def way(reader: Any) -> Callable[[bool], float]:
        def run(cold: bool) -> float:
            with reader(path) as take:
                return rate(take, spans, lambda: None)

        return run

    def pipeline(shuffle: Any) -> Callable[[bool], float]:
        def run(cold: bool) -> float:
            del cold
            with rf.Pipeline(
                path, batch_size=max(BATCH_BYTES // (4 * width), 1), shuffle=shuffle, device=options.device
            ) as pipe:
                start, right = time.perf_counter(), []
                for batch in pipe:
                    right.append((batch.data[:, 0].long() == batch.index).sum())
                synchronize()
                taken = time.perf_counter() - start
            if sum(map(int, right)) != rows:
                raise AssertionError("rows that were not asked for")
            return rows / taken

        return run

    ways = {"rowferry": pipeline(False), 'rowferry, shuffle="chunks"': pipeline("chunks")}
    ways |= {name: way(reader) for name, reader in readers().items() if name != "rowferry"}
    return compare(path, f"{work}: an epoch", ways, options)


def main() -> None:
    options = arguments(__doc__ or "")
    results: list[dict[str, Any]] = []
    path = Path(tempfile.mkdtemp(prefix="rowferry-", dir=options.folder)) / "rows.zarr"
    for width, layouts in ((WIDTH, LAYOUTS), (LARGE, LARGE_LAYOUTS)):
        rows = max(options.rows(4 * width), 2)
        for work, layout in layouts.items():
            try:
                make(path, rows, width, layout)
                if width == WIDTH:
                    results += random_rows(path, work, rows, options)
                results += in_order(path, work, rows, width, options)
            finally:
                shutil.rmtree(path, ignore_errors=True)
    path.parent.rmdir()
    versions = {name: importlib.metadata.version(name) for name in readers() if name != "rowferry"}
    save("zarr_reading", options, results, readers=versions)


if __name__ == "__main__":
    main()
