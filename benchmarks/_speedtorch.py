"""What the two programs about SpeedTorch share: their arguments and their record."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, machine, synchronize


def arguments(description: str) -> argparse.ArgumentParser:
    """``--out``, ``--runs``, ``--json``, ``--threads``, ``--device``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--runs", type=int, default=5, help="runs a figure; medians are reported")
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and everything else to stderr")
    parser.add_argument("--threads", type=int, default=2, help="host threads of torch and of the pipeline")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    return parser


def finish(name: str, options: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> None:
    """Run ``measure`` with the threads asked for, write ``name.json``, and print the record where that is asked for."""
    torch.set_num_threads(options.threads)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        record = {"benchmark": name, "command": " ".join(["python", *sys.argv]), "machine": machine(), **measure()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    if options.json:
        print(json.dumps(record))


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
