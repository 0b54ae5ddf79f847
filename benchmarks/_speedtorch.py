"""What the two programs about SpeedTorch share: their options and their record."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _common import Options, options_of, save, synchronize

from rowferry.stores._devices import default_device


class SpeedTorchOptions(Options):
    """What the command line said."""

    json: bool
    threads: int


def finish(name: str, description: str, measure: Callable[[SpeedTorchOptions], Iterable[dict[str, Any]]], **more: Any) -> None:
    """Read the options, run ``measure`` with the threads asked for, write ``name.json``, print it where that is asked for.

    The file is written anew after each result, so that a run that is cut off leaves what it has; ``complete`` tells.
    """
    parser = options_of(description)
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and everything else to stderr")
    parser.add_argument("--threads", type=int, default=2, help="host threads of torch and of the pipeline")
    options = parser.parse_args(namespace=SpeedTorchOptions())
    options.device = options.device or default_device()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            more |= {"threads": options.threads, "seed": 0}
            results: list[dict[str, Any]] = []
            for result in measure(options):
                results.append(result)
                save(name, options, results, complete=False, **more)
            save(name, options, results, complete=True, **more)
    finally:
        torch.set_num_threads(before)
    if options.json:
        print((options.out / f"{name}.json").read_text(), end="")


def milliseconds(call: Callable[[], Any], calls: int, runs: int) -> list[float]:
    """A call, as the mean of ``calls`` between two waits for the device, ``runs`` times; after two that warm up."""
    call()
    call()
    found = []
    for _ in range(runs):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        found.append(1e3 * (time.perf_counter() - start) / calls)
    return found


def collect() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
