"""What every program here shares: options, result file, lines on the screen. Measuring is in ``rowferry._bench``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rowferry._bench.clock import Figures, Run, fixed, idle
from rowferry._bench.suite import Limit, limit_of
from rowferry._commands._about import about
from rowferry.stores._devices import default_device, device_for, resolve_device
from rowferry.stores._files import beside

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
SMOKE_SHARE = 50  # a smoke run does so many times less


class Options(argparse.Namespace):
    """What the command line said."""

    out: Path
    runs: int
    rows_gib: float
    device: torch.device
    smoke: bool
    folder: Path

    def batches(self, count: int) -> int:
        """``count`` batches, a few in a smoke run."""
        return max(count // SMOKE_SHARE, 4) if self.smoke else count

    def rows(self, row_bytes: int) -> int:
        """Rows of the pinned table."""
        return int(self.rows_gib * GIB) // row_bytes

    def ids(self, batch: int) -> int:
        """``batch`` ids a batch, fewer in a smoke run."""
        return max(batch // SMOKE_SHARE, 8) if self.smoke else batch

    def measure(self, run: Run, batches: int) -> Figures:
        """``runs`` runs of so many batches."""
        return fixed(run, self.batches(batches), self.runs)


def arguments(description: str, *, needs_gpu: bool = False, rows_gib: float = 16) -> Options:
    """The options, the same for all. A program that needs a GPU refuses to begin without one, but for ``--device cpu``."""
    parser = options_of(description)
    parser.set_defaults(rows_gib=rows_gib)
    options = parser.parse_args(namespace=Options())
    if options.device is None:
        options.device = default_device()
        if needs_gpu and options.device.type == "cpu":
            parser.error("this needs a GPU; --device cpu --smoke --rows-gib 0.01 runs it without, for its values alone")
    return options


def options_of(description: str) -> argparse.ArgumentParser:
    """A parser of these options, to which a program may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--runs", type=int, default=5, help="runs a figure; medians are reported")
    parser.add_argument("--rows-gib", type=float, default=16, help="size of the pinned table")
    parser.add_argument("--device", type=resolve_device, default=None, help="cuda:1, or cpu to see that the program runs")
    parser.add_argument("--smoke", action="store_true", help="few and small batches, to see that the program runs")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where programs about files put theirs meanwhile")
    return parser


def machine() -> dict[str, Any]:
    """What this machine is, with versions and date."""
    return about(default_device())


def synchronize() -> None:
    """Wait for the device, where there is one."""
    idle(device_for(default_device()))


def limit(options: Options) -> Limit:
    """The link of the device, measured now and printed; without a GPU, host memory in its place."""
    found = limit_of(device_for(options.device))
    print(f"limit: {found._asdict()}", flush=True)
    return found


def save(name: str, options: Options, results: Iterable[dict[str, Any]], **more: Any) -> None:
    """Write ``name.json``."""
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/{name}.py --runs {options.runs} --rows-gib {options.rows_gib:g}"
    command += " --smoke" if options.smoke else ""
    record = {"benchmark": name, "command": command, "machine": about(options.device), **more, "results": list(results)}
    write_record(options.out / f"{name}.json", record)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` as JSON; what had that name before stays as it is until the new file is whole."""
    with beside(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def speed(found: Figures, nbytes: float, limit: float) -> dict[str, float]:
    """Of ``nbytes`` a batch: as a share of ``limit`` GB/s, and in GB/s with the slowest and the fastest run."""
    rates = {
        "gb_s": nbytes / found.median / 1e9,
        "lowest": nbytes / found.slowest / 1e9,
        "highest": nbytes / found.fastest / 1e9,
    }
    return {"share_of_link": rates["gb_s"] / limit, **rates}


def report(result: dict[str, Any]) -> dict[str, Any]:
    """Print one result on one line, and give it back."""
    print(
        "  ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()),
        flush=True,
    )
    return result
