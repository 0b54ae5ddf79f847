"""``rowferry convert``: a file's rows into the layout that random rows want."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rowferry.stores import Store
from rowferry.stores._convert import Layout
from rowferry.stores._convert import convert as convert_rows

from ._output import JsonOption, count, print_facts, print_json, refusals, size
from ._stores import ArrayOption, PathArgument, StoredOption, dtype_name, open_named, shown

Packing = Literal["raw", "zstd", "blosc"]


def convert(
    source: PathArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new .npy or .zarr; nothing may be there.")],
    array: ArrayOption = None,
    stored_dtype: StoredOption = None,
    chunk_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of a chunk of a .zarr: what is decoded for one row. About 64 KiB.")
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=0, help="Rows of a shard, whole chunks: one file. About 64 MiB; 0: a file a chunk.")
    ] = None,
    compressor: Annotated[
        Packing, typer.Option(help="raw: any row is read alone, at the disk's speed. zstd, blosc: smaller files.")
    ] = "raw",
    json: JsonOption = False,
) -> None:
    """Rewrite the rows of PATH as TARGET, compare them, and only then give TARGET its name.

    A conversion that was stopped goes on where it was when the same command is given again.
    """
    with refusals(), open_named(source, array, stored_dtype) as store:
        layout = Layout(chunk_rows, False if shard_rows == 0 else shard_rows, None if compressor == "raw" else compressor)
        result = {"source": shown(source), "array": array, "target": target, **run(store, target, layout, quiet=json)}
    if json:
        print_json(result)
    else:
        print_facts(target, _lines(result))


def run(store: Store, target: str, layout: Layout, *, quiet: bool) -> dict[str, Any]:
    """Convert, with a bar on stderr; what was done. ``seconds`` is for the rows of this run, comparing all included."""
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=Console(stderr=True), disable=quiet)
    steps: dict[str, TaskID] = {}

    def report(step: str, rows: int) -> None:
        progress.start()  # not before: what is refused is said in one line
        if step not in steps:
            steps[step] = progress.add_task(step, total=len(store))
        progress.update(steps[step], completed=rows)

    try:
        resumed = convert_rows(store, target, layout, report)
    finally:
        if steps:
            progress.stop()
    return {
        "rows": len(store),
        "bytes": store.nbytes,
        "dtype": dtype_name(store.dtype),
        "rows_done_before": resumed,
        "seconds": time.perf_counter() - start,
        "compared": True,
    }


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    before = result["rows_done_before"]
    return [
        ("rows", count(result["rows"]) + (f", {count(before)} of them by an earlier run" if before else "")),
        ("bytes", size(result["bytes"])),
        ("compared with the source", "equal, bit for bit"),
        ("took", f"{result['seconds']:.1f} s"),
    ]
