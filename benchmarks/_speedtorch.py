"""What the two programs about SpeedTorch share: their options and their record."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import Options, options_of, save, synchronize

from rowferry.stores._devices import default_device


class SpeedTorchOptions(Options):
    """What the command line said."""

    json: bool
    threads: int


def finish(name: str, description: str, measure: Callable[[SpeedTorchOptions], list[dict[str, Any]]], **more: Any) -> None:
    """Read the options, run ``measure`` with the threads asked for, write ``name.json``, print it where that is asked for."""
    parser = options_of(description)
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and everything else to stderr")
    parser.add_argument("--threads", type=int, default=2, help="host threads of torch and of the pipeline")
    options = parser.parse_args(namespace=SpeedTorchOptions())
    options.device = options.device or default_device()
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            save(name, options, measure(options), threads=options.threads, seed=0, **more)
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
