"""``rowferry bench``: what this machine reaches on the user's own sizes, as shares of its own limit, beside other ways."""

from __future__ import annotations

import contextlib
import json as json_text
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from rowferry._bench.clock import Budget
from rowferry._bench.compare import FORMAT, PROGRAM, compare, load
from rowferry._bench.peers import table_of
from rowferry._bench.plot import draw, require_drawable
from rowferry._bench.reading import stamped
from rowferry._bench.sizes import ROW_BYTES, Room, Sizes, filling, fit, fit_batch, pace
from rowferry._bench.suite import Setup, Suite, limit_of
from rowferry._bench.zarr_rows import zarr_rows
from rowferry.pipeline._assembly import thread_count
from rowferry.stores import Store, ZarrStore
from rowferry.stores._device_contract import Device
from rowferry.stores._devices import CpuDevice, device_for

from ._about import about
from ._bench_tables import print_comparison, print_record
from ._device import device_named
from ._output import plain, progress, refusals
from ._stores import ArrayOption, StoredOption, open_named, shown

SECONDS, QUICK_SECONDS = 300.0, 30.0
_MOST_SPARE = 30.0  # seconds, or a quarter: for starting Python, and for what was begun when the time ends
_BATCHES_IN_ALL = 200  # a batch may take that part of the time, so that each work gets a few

Sides = tuple[Path, Path]


def bench(
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="A .npy file or .zarr to read; never written.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the pinned table that is made without PATH.")] = None,
    row_bytes: Annotated[int | None, typer.Option(help=f"Bytes of one of its rows; {ROW_BYTES} by default.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows a batch.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Most host threads, of rowferry and of the others.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute in place of five.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1, help="Most seconds in all; 300, or 30 with --quick.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record to FILE; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")] = None,
    compared: Annotated[
        Sides | None, typer.Option("--compare", metavar="A.json B.json", help="Show two records side by side; measure nothing.")
    ] = None,
    array: ArrayOption = None,
    stored_dtype: StoredOption = None,
) -> None:
    """Measure reading, writing and overlap here, as shares of this machine's own limit, beside other ways."""
    with refusals():
        if compared is not None:
            print_comparison(compare(*map(load, compared)))
            return
        _require_writable(json, plot)
        target = device_for(device_named(device))
        whole = seconds if seconds is not None else QUICK_SECONDS if quick else SECONDS
        silent = json is not None and str(json) == "-"
        if path is not None and (rows is not None or row_bytes is not None):
            raise ValueError("--rows and --row-bytes describe a table that is made; with PATH its own rows are read")
        with contextlib.ExitStack() as held:
            held.enter_context(_torch_threads(threads))
            began = time.perf_counter()
            budget = Budget(whole - min(whole / 4, _MOST_SPARE))
            if path is None:
                setup = _with_table(
                    held, target, rows, ROW_BYTES if row_bytes is None else row_bytes, batch, quick, whole, threads
                )
            else:
                setup = _with_path(held, target, path, array, stored_dtype, batch, whole, threads)
            record = _record(setup, path, threads)
            record["results"] = _measured(setup, budget, quiet=silent)
            record["seconds"] = time.perf_counter() - began
        if json is not None:
            _write(record, json)
        if plot is not None:
            draw(record, plot)
    if not silent:
        print_record(record)


def _require_writable(json: Path | None, plot: Path | None) -> None:
    """Refuse now what can't be written after minutes of measuring."""
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path} can't be written: there is no folder {path.absolute().parent}; make it first")
    if plot is not None:
        require_drawable(plot)


def _with_table(
    held: contextlib.ExitStack,
    device: Device,
    rows: int | None,
    row_bytes: int,
    batch: int | None,
    quick: bool,
    seconds: float,
    threads: int | None,
) -> Setup:
    """A pinned table, read and written."""
    limit = limit_of(device)
    sizes = fit(rows, row_bytes, batch, _room(device, rows, row_bytes, seconds, quick=quick))
    store = held.enter_context(stamped(sizes.rows, sizes.row_bytes))
    sizes = _paced(store, sizes, seconds)
    return Setup(store, store, table_of(store, device), device, sizes, limit, _settings(sizes, threads))


def _with_path(
    held: contextlib.ExitStack,
    device: Device,
    path: str,
    array: str | None,
    stored: str | None,
    batch: int | None,
    seconds: float,
    threads: int | None,
) -> Setup:
    """The user's file, read; and a pinned table of rows of its size, written in its place."""
    store = held.enter_context(open_named(path, array, stored))
    if not store.nbytes:
        raise ValueError(f"{shown(path)} holds no bytes: its shape is {store.shape}; name a file with rows in it")
    limit = limit_of(device)
    fitting, notes = fit_batch(batch, store.row_nbytes, device_free=device.free_bytes(), on_gpu=device.is_cuda)
    sizes = _paced(store, Sizes(len(store), store.row_nbytes, fitting, notes), seconds)
    made = fit(None, store.row_nbytes, sizes.batch, _room(device, len(store), store.row_nbytes, seconds, quick=True))
    written = held.enter_context(stamped(min(made.rows, len(store)), store.row_nbytes))
    note = f"{shown(path)} is only read; a pinned table of {len(written):,} rows of that size is written in its place"
    host = zarr_rows(path, array, store) if isinstance(store, ZarrStore) and not store.remote else None
    sizes = sizes._replace(notes=(*sizes.notes, note))
    return Setup(store, written, table_of(store, device, host), device, sizes, limit, _settings(sizes, threads))


def _room(device: Device, rows: int | None, row_bytes: int, seconds: float, *, quick: bool) -> Room:
    """What there is for a table of at most ``rows`` rows; how fast one is made is tried with a part of it."""
    free = CpuDevice().free_bytes()
    most = free // 16 if rows is None else min(free // 16, rows * row_bytes)
    filled = filling(lambda few: stamped(few, row_bytes), row_bytes, most) if row_bytes > 0 else 0.0
    return Room(free, device.free_bytes(), device.is_cuda, filled, seconds, quick)


def _paced(store: Store, sizes: Sizes, seconds: float) -> Sizes:
    batch, notes = pace(store, sizes.batch, seconds / _BATCHES_IN_ALL)
    return sizes._replace(batch=batch, notes=(*sizes.notes, *notes))


def _settings(sizes: Sizes, threads: int | None) -> dict[str, Any]:
    return {**sizes.staging(), **({"threads": threads} if threads is not None else {})}


def _measured(setup: Setup, budget: Budget, *, quiet: bool) -> list[dict[str, Any]]:
    suite = Suite(setup)
    results = []
    with progress(quiet) as bar:
        task = bar.add_task("measuring", total=len(suite.works))
        for result in suite.results(budget):
            results.append(result)
            bar.update(task, advance=1, description=result["work"])
    return results


def _record(setup: Setup, path: str | None, threads: int | None) -> dict[str, Any]:
    sizes = setup.sizes._asdict()
    notes = list(sizes.pop("notes"))
    return {
        "program": PROGRAM,
        "format": FORMAT,
        "machine": {"device": str(setup.device.torch), **about(setup.device.torch)},
        "host_threads": {"rowferry": thread_count(threads), "torch": torch.get_num_threads()},
        "sizes": {"store": type(setup.store).__name__, "path": path and shown(path), "threads": threads, **sizes},
        "limit": setup.limit._asdict(),
        "notes": notes,
    }


def _write(record: dict[str, Any], path: Path) -> None:
    text = json_text.dumps(plain(record), allow_nan=False, indent=None if str(path) == "-" else 2)
    if str(path) == "-":
        typer.echo(text)
    else:
        path.write_text(text + "\n", "utf-8")


@contextlib.contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """``threads`` for torch's operators, which peers use, inside the block."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
