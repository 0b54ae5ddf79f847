"""``rowferry demo``: the main job in small: a classifier trained from .npy and from .zarr through the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ._device import device_named
from ._digits import Training, train, write_digits
from ._output import JsonOption, console, print_json, refusals

PASS_ACCURACY = 0.95
FORMATS = ("npy", "zarr")


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files are written.")] = Path("demo-data"),
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through the training rows.")] = 20,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; a GPU if there is one.")] = None,
    json: JsonOption = False,
) -> None:
    """Write scikit-learn's digits as .npy and .zarr, train a classifier from each, and compare."""
    with refusals():
        target = device_named(device)
        write_digits(directory, FORMATS)
        results = {suffix: train(directory, suffix, target, epochs) for suffix in FORMATS}
    passed = all(result.accuracy >= PASS_ACCURACY for result in results.values())
    verdict = f"demo {'ok' if passed else 'failed'}: " + ", ".join(
        f"{suffix} accuracy {result.accuracy:.3f}" for suffix, result in results.items()
    )
    if json:
        print_json({"ok": passed, "device": str(target), **{suffix: result._asdict() for suffix, result in results.items()}})
    else:
        _print_table(results, str(target))
        typer.echo(verdict if passed else f"{verdict}; at least {PASS_ACCURACY} is expected")
    if not passed:
        raise typer.Exit(1)


def _print_table(results: dict[str, Training], device: str) -> None:
    table = Table("store", "device", "test accuracy", "rows/s", "consumer waited")
    for suffix, result in results.items():
        table.add_row(suffix, device, f"{result.accuracy:.3f}", f"{result.rows_per_second:,.0f}", f"{result.waited_share:.1%}")
    console().print(table)
