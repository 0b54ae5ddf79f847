"""float32 against float16 with float32 master weights: speed, the largest batch that fits, and what is lost.

Residual networks on images of CIFAR-100's shape and recurrent language models on bytes of text, all streamed from .npy as
uint8, cast on the way by rowferry. Each model is trained three times, from the same weights: in float32 (torch's default:
convolutions may use TF32); by ``torch.autocast`` and ``GradScaler`` (autocast); and cast whole to float16, with batch
normalization and master weights in float32 (half). The loss is float32 in all three. The largest batch is found by trying.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, machine
from _mixed import images, output, text
from _mixed.precision import NAMES, Name
from _mixed.resnet import DEPTHS
from _mixed.training import Task, fits, largest, train
from rich.console import Console

from rowferry.stores._devices import resolve_device

MODELS = (*(f"resnet{depth}" for depth in DEPTHS), *text.CELLS)
FIRST_BATCH = 32  # the search for the largest begins here


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
    add("--memory-gb", type=float, help="limit of the device's memory, GB of 1e9 bytes, for the largest batch; default: all")
    add("--no-search", action="store_true", help="do not look for the largest batch; it needs a GPU")
    add("--data", type=Path, help="folder of CIFAR-100's binary version; default: synthetic images")
    add("--images", type=int, default=16_000, help="training images, at most")
    add("--size", type=int, default=48, help="pixels a side that images are resized to")
    add("--image-batch", type=int, default=256)
    add("--width", type=int, default=64, help="channels of the first stage")
    add("--text", type=Path, help="file of text; default: the language reference that Python brings")
    add("--text-bytes", type=int, default=4_000_000, help="bytes of it, at most")
    add("--text-batch", type=int, default=64)
    add("--length", type=int, default=128, help="bytes in a window")
    add("--hidden", type=int, default=1024)
    add("--layers", type=int, default=2)
    add("--out", type=Path, default=RESULTS, help="folder of mixed_precision.json and mixed_precision.png")
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


def compared(given: argparse.Namespace, these: list[Task], console: Console) -> Iterator[output.Result]:
    """One result for each model and precision."""
    device = resolve_device(given.device)  # with its number: a limit of memory is that of one device
    for task in these:
        for precision in given.precisions:
            figures = asdict(train(task, precision, device, given.epochs))
            result = {"model": task.name, "precision": precision, "batch": task.batch, **figures}
            result["largest_batch"] = None if given.no_search else searched(task, precision, device, given.memory_gb)
            console.print(
                f"{task.name} {precision}: {result['seconds_an_epoch']:.2f} s an epoch, accuracy "
                f"{result['test_accuracy']:.1%}, largest batch {result['largest_batch'] or 'not tried'}"
            )
            yield result


def searched(task: Task, precision: Name, device: torch.device, memory_gb: float | None) -> int:
    """The largest batch under the limit; the limit ends with the search."""
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0 if memory_gb is None else min(1.0, memory_gb * 1e9 / total), device)
    try:
        return largest(lambda batch: fits(task, precision, device, batch), FIRST_BATCH)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def main() -> int:
    given = parsed()
    output.drawing()  # fails now where it would fail after the training
    if given.no_tf32:
        torch.backends.cudnn.allow_tf32 = False
    console = Console(stderr=given.json)  # with --json, stdout has the record and nothing else
    if given.device == "cpu" and not given.no_search:
        console.print("largest batch: not tried, a CPU has no memory of its own to fill")
        given.no_search = True
    with tempfile.TemporaryDirectory() as folder:
        these, said = tasks(given, Path(folder))
        for line in said:
            console.print(line)
        results = output.with_ratios(list(compared(given, these, console)))
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key != "out"}
    record: dict[str, Any] = {
        "benchmark": "mixed_precision",
        "command": " ".join(["python benchmarks/mixed_precision.py", *sys.argv[1:]]),
        "machine": machine(),
        "data": said,
        "options": options,
        "tf32": {"convolutions": torch.backends.cudnn.allow_tf32, "products": torch.backends.cuda.matmul.allow_tf32},
        "results": results,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "mixed_precision.json").write_text(json.dumps(record, indent=2) + "\n")
    output.charts(results, given.out / "mixed_precision.png", "\n".join(said))
    if given.json:
        print(json.dumps(record, indent=2))
    else:
        console.print(output.table(results, "\n".join([*said, f"written: {given.out}/mixed_precision.json and .png"])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
