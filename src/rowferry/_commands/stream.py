"""``rowferry stream``: an epoch of random batches from any file, and how fast they came."""

from __future__ import annotations

import itertools
import time
from typing import Annotated, Any

import torch
import typer

from rowferry.pipeline import Pipeline
from rowferry.stores import Store

from ._device import device_named, finish
from ._output import JsonOption, count, print_facts, print_json, progress, refusals, share, waits
from ._stores import ArrayOption, PathArgument, StoredOption, dtype_name, dtype_named, open_named, shown


def stream(
    path: PathArgument,
    array: ArrayOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a batch.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast rows on the way: float16, bfloat16, ...")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through the rows.")] = 1,
    limit_batches: Annotated[int | None, typer.Option(min=1, help="End each epoch after so many batches.")] = None,
    stored_dtype: StoredOption = None,
    json: JsonOption = False,
) -> None:
    """Stream random batches of PATH to the device and tell how fast they came."""
    with refusals():
        target, cast = device_named(device), dtype_named(dtype)
        with open_named(path, array, stored_dtype) as store:
            result = run(store, target, cast, batch_size, epochs, limit_batches, quiet=json)
    result = {"path": shown(path), "array": array, **result}
    if json:
        print_json(result)
    else:
        print_facts(shown(path), _lines(result))


def run(
    store: Store,
    device: torch.device,
    dtype: torch.dtype | None,
    batch_size: int,
    epochs: int,
    limit: int | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Iterate over ``epochs`` shuffled epochs of ``store``, at most ``limit`` batches each; what was measured.

    Time runs from the first ``iter()`` until the last batch is on the device; ``gigabytes_per_second`` counts the
    bytes of the delivered rows in the store's dtype, 1e9 bytes a GB.
    """
    with Pipeline(store, batch_size=batch_size, shuffle=True, device=device, dtype=dtype) as pipe, progress(quiet) as bar:
        an_epoch = len(pipe) if limit is None else min(limit, len(pipe))
        task = bar.add_task("batches", total=an_epoch * epochs)
        rows = batches = 0
        start = time.perf_counter()
        for _ in range(epochs):
            for batch in itertools.islice(pipe, limit):
                rows += len(batch.index)
                batches += 1
                bar.advance(task)
        finish(device)
        seconds = time.perf_counter() - start
        stats = pipe.stats()
    waited = dict(stats.wait_seconds)
    return {
        "device": str(device),
        "dtype": dtype_name(dtype or store.dtype),
        "mover": str(stats.mover),
        "epochs": epochs,
        "batches": batches,
        "rows": rows,
        "seconds": seconds,
        "rows_per_second": share(rows, seconds),
        "gigabytes_per_second": share(rows * store.row_nbytes, seconds) / 1e9,
        "waited_seconds": sum(waited.values()),
        "waited_share": share(sum(waited.values()), seconds),
        "waited_for": waited,
        "verdict": str(stats.verdict),
    }


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("device", f"{result['device']}, rows as {result['dtype']}, mover {result['mover']}"),
        ("delivered", f"{count(result['rows'])} rows in {count(result['batches'])} batches, {result['seconds']:.2f} s"),
        ("speed", f"{result['rows_per_second']:,.0f} rows/s, {result['gigabytes_per_second']:.2f} GB/s"),
        ("the consumer waited", waits(result["waited_for"], result["seconds"])),
        ("verdict", result["verdict"]),
    ]
