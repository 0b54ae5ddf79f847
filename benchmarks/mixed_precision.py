"""float32 against float16 with float32 master weights: speed, the largest batch that fits, and what is lost.

Residual networks on images of CIFAR-100's shape and recurrent language models on bytes of text, all streamed from .npy as
uint8, cast on the way by rowferry. Each model is trained three times, from the same weights: in float32 (torch's default:
convolutions may use TF32); by ``torch.autocast`` and ``GradScaler`` (autocast); and cast whole to float16, with batch
normalization and master weights in float32 (half). The loss is float32 in all three. The largest batch is found by trying.
The record is written after each training and after each search, so that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS
from _mixed import images, output, record, text
from _mixed.precision import NAMES
from _mixed.resnet import DEPTHS
from _mixed.search import CudaMemory, Memory, Search, searched
from _mixed.training import Task, train
from rich.console import Console

from rowferry._commands._about import about
from rowferry.stores._devices import resolve_device

MODELS = (*(f"resnet{depth}" for depth in DEPTHS), *text.CELLS)
NOT_SEARCHED = dict.fromkeys(field.name for field in fields(Search))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="resnet18,resnet50,resnet101,elman,gru,lstm", help=f"of {', '.join(MODELS)}")
    add("--precisions", default=",".join(NAMES), help="of fp32, autocast, half")
    add("--fp16", action="store_true", help="train in float16 only: --precisions half")
    add("--epochs", type=int, default=4)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-tf32", action="store_true", help="float32 convolutions and recurrent layers without TF32, which torch allows")
    add(
        "--memory-gb",
        type=float,
        default=80,
        help="the largest batch is that within so many GB of 1e9 bytes, or all there is if less",
    )
    add("--no-search", action="store_true", help="do not look for the largest batch; it needs a GPU")
    add("--data", type=Path, help="folder of CIFAR-100's binary version; default: synthetic images")
    add("--images", type=int, default=10_240, help="training images, at most")
    add("--size", type=int, default=64, help="pixels a side that images are resized to")
    add("--image-batch", type=int, default=256)
    add("--width", type=int, default=64, help="channels of the first stage")
    add("--text", type=Path, help="file of text; default: the sources of Python's standard library")
    add("--text-bytes", type=int, default=4_000_000, help="bytes of it, at most")
    add("--text-batch", type=int, default=256)
    add("--length", type=int, default=128, help="bytes in a window")
    add("--hidden", type=int, default=1024)
    add("--layers", type=int, default=2)
    add("--out", type=Path, default=RESULTS, help="folder of mixed_precision.json and mixed_precision.png")
    add("--merge", action="store_true", help="add to the record there, which has the same options and machine, if there is one")
    add("--draw", action="store_true", help="train nothing: table and charts of the record there, cut off or not; needs no GPU")
    add("--json", action="store_true", help="print the record instead of the table")
    given = parser.parse_args()
    given.models = given.models.split(",")
    given.precisions = ["half"] if given.fp16 else given.precisions.split(",")
    for what, allowed in (("models", MODELS), ("precisions", NAMES)):
        if unknown := set(getattr(given, what)) - set(allowed):
            parser.error(f"--{what} has {', '.join(sorted(unknown))}; allowed are {', '.join(allowed)}")
    return given


def tasks(given: argparse.Namespace, folder: Path) -> tuple[list[Task], list[str]]:
    """What to train, and what it is trained with; the files are in ``folder`` afterwards."""
    made: list[Task] = []
    said: dict[str, None] = {}
    for model in given.models:
        if model in text.CELLS:
            made.append(text.TextTask(model, folder, given.text_batch, given.length, given.hidden, given.layers))
        else:
            depth = int(model.removeprefix("resnet"))
            made.append(images.ImageTask(model, depth, folder, given.image_batch, given.size, given.width))
    if any(isinstance(task, images.ImageTask) for task in made):
        said[images.write(folder, given.data, given.images)] = None
    if any(isinstance(task, text.TextTask) for task in made):
        said[text.write(folder, given.text, given.text_bytes, given.length)] = None
    return made, list(said)


def compared(
    given: argparse.Namespace, these: list[Task], device: torch.device, memory: Memory | None, console: Console
) -> Iterator[output.Result]:
    """For each model and precision the result of the training, and again with the largest batch; no ``memory``: only once.

    A search that fails is no reason to lose the others: what it died of is in the result, as ``search_error``.
    """
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for task, precision in product(these, given.precisions):
        start = time.perf_counter()
        figures = asdict(train(task, precision, device, given.epochs))
        figures["training_seconds"] = time.perf_counter() - start
        result: output.Result = {"model": task.name, "precision": precision, "batch": task.batch, **figures, **NOT_SEARCHED}
        result |= {"search_error": None, "complete": memory is None}
        yield result
        say(
            f"{task.name} {precision}: {result['seconds_an_epoch']:.2f} s an epoch, accuracy {result['test_accuracy']:.1%}, "
            f"{result['training_seconds']:.1f} s of training"
        )
        if memory is None:
            continue
        try:
            found = searched(task, precision, device, memory)
        except RuntimeError as error:
            result = {**result, "search_error": f"{type(error).__name__}: {error}"}
            say(f"{task.name} {precision}: the search for the largest batch failed: {result['search_error']}")
        else:
            result = {**result, **asdict(found), "complete": True}
            say(
                f"{task.name} {precision}: largest batch {found.largest_batch:,}, by {found.trials} trials from a guess of "
                f"{found.guess:,}, {found.search_seconds:.1f} s of searching"
            )
        yield result


def measured(given: argparse.Namespace, path: Path, console: Console) -> dict[str, Any]:
    """The record, when all is measured; ``path`` has it, and had the part that there was, all the time."""
    device = resolve_device(given.device)  # with its number: a limit of memory is that of one device
    if given.no_tf32:
        torch.backends.cudnn.allow_tf32 = False
    if device.type == "cpu" and not given.no_search:
        console.print("largest batch: not tried, a CPU has no memory of its own to fill")
    memory = None if given.no_search or device.type == "cpu" else CudaMemory(device, given.memory_gb)
    earlier = record.read(path) if given.merge and path.exists() else None
    asked = [(model, precision) for model in given.models for precision in given.precisions]
    with tempfile.TemporaryDirectory() as folder:
        these, said = tasks(given, Path(folder))
        for line in said:
            console.print(line)
        facts = {
            "benchmark": "mixed_precision",
            "command": " ".join(["python benchmarks/mixed_precision.py", *without_folder(sys.argv[1:])]),
            "machine": about(device),
            "data": said,
            "options": {
                key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key != "out"
            },
            "tf32": {"convolutions": torch.backends.cudnn.allow_tf32, "products": torch.backends.cuda.matmul.allow_tf32},
        }
        kept = record.Record(path, facts, asked, earlier)
        for result in compared(given, these, device, memory, console):
            kept.keep(result)
    return kept.finish()


def without_folder(arguments: list[str]) -> list[str]:
    """The command line without ``--out``: where a record was first written is nobody's business later."""
    kept, skipped = [], False
    for each in arguments:
        if not skipped and each.partition("=")[0] != "--out":
            kept.append(each)
        skipped = each == "--out"
    return kept


def show(found: dict[str, Any], given: argparse.Namespace, path: Path, console: Console) -> None:
    """The charts beside the record, the tables on the screen."""
    results = found["results"]
    chart = path.with_suffix(".png")
    output.charts(results, chart, "\n".join(found["data"]))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    spent = [sum(each[key] or 0 for each in results) for key in ("training_seconds", "search_seconds")]
    caption = [*found["data"], f"seconds: {spent[0]:.0f} of training, {spent[1]:.0f} of searching", f"in {path}; {chart.name}"]
    console.print(output.table(results, "\n".join(caption)))
    console.print(output.against_the_article(results))
    if absent := record.missing(found):
        console.print(f"not complete, still to be measured: {', '.join(absent)}", highlight=False, soft_wrap=True)


def main() -> int:
    given = parsed()
    output.drawing()  # fails now where it would fail after the training
    console = Console(stderr=given.json)  # with --json, stdout has the record and nothing else
    path = given.out / "mixed_precision.json"
    try:
        found = record.read(path) if given.draw else measured(given, path, console)
    except record.Refused as refused:
        console.print(f"error: {refused}", highlight=False, markup=False, soft_wrap=True)
        return 2
    show(found, given, path, console)
    return 1 if any(each["search_error"] for each in found["results"]) and not given.draw else 0


if __name__ == "__main__":
    raise SystemExit(main())
