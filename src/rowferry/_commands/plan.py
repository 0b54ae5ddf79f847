"""``rowferry plan``: where a table of some size can live on this machine, and what a step costs there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as RichTable

from rowferry._bench.link import copy_speed, memory_speed
from rowferry.stores._devices import CpuDevice, default_device, device_for

from . import _table_plan
from ._output import JsonOption, console, print_facts, print_json, refusals, size
from ._placements import Machine, Placement, Table, fastest, placements
from ._stores import dtype_name

_GIB = 1 << 30

Gib = Annotated[float | None, typer.Option(min=0, metavar="GIB", help="In place of what is free here.")]
Speed = Annotated[float | None, typer.Option(min=0.001, metavar="GB/S", help="In place of what is measured here.")]


def plan(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the table.")],
    dim: Annotated[int, typer.Option(min=1, help="Values a row.")],
    optimizer: Annotated[str, typer.Option(help="One of torch.optim, in any case; none for a table that is read.")] = "adam",
    optimizer_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the optimizer, such as momentum=0.9; may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, fp16, bf16, or a name of torch.")] = "fp32",
    batch: Annotated[int, typer.Option(min=1, help="Ids a step.")] = 131_072,
    distinct: Annotated[float, typer.Option(min=0, max=1, help="Part of a step's ids that are different.")] = 1.0,
    path: Annotated[Path, typer.Option(help="Where a file would be.")] = Path("table.npy"),
    gpu_memory: Gib = None,
    host_memory: Gib = None,
    disk: Gib = None,
    link: Speed = None,
    gpu_bandwidth: Speed = None,
    host_bandwidth: Speed = None,
    disk_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, metavar="GB/S", help="Of random rows; it is not measured.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Tell where a table with its optimizer state can live here, what a step costs there, and how to make it."""
    with refusals():
        wanted = _table_plan.wanted(rows, dim, dtype, optimizer, optimizer_arg or [], str(path))
        table = Table(rows, wanted.weight_bytes, sum(wanted.columns.values()), batch, distinct, wanted.optimizer is not None)
        given = Machine(
            gpu=gpu_memory is not None or link is not None or gpu_bandwidth is not None,
            device_free=_bytes(gpu_memory),
            host_free=_bytes(host_memory),
            disk_free=_bytes(disk),
            link_in=link,
            link_out=link,
            device_bandwidth=gpu_bandwidth,
            host_bandwidth=host_bandwidth,
            disk_bandwidth=disk_bandwidth,
        )
        machine = _machine(path, given)
        found = placements(table, machine)
    best = fastest(found)
    result = {
        "weight_bytes": rows * wanted.weight_bytes,
        "state_bytes": {name: rows * nbytes for name, nbytes in wanted.columns.items()},
        "bytes": table.nbytes,
        "bytes_moved_a_step": table.moved * (2 if table.trains else 1),
        "dtype": dtype_name(wanted.dtype),
        "optimizer": wanted.optimizer.__name__ if wanted.optimizer else None,
        "machine": machine._asdict(),
        "measured_gpu": default_device().type == "cuda",
        "placements": [{**each._asdict(), "call": _table_plan.constructor(each.name, wanted, batch)} for each in found],
        "fastest": best.name if best else None,
    }
    if json:
        print_json(result)
    else:
        _print(result, found, best)


def _machine(path: Path, given: Machine) -> Machine:
    """What was given, and the rest as it is here; speeds are measured."""
    host, device = CpuDevice(), device_for(default_device())
    folder = next(each for each in path.absolute().parents if each.exists())
    here: dict[str, Any] = {"gpu": given.gpu or device.is_cuda, "host_free": host.free_bytes()}
    here["disk_free"] = shutil.disk_usage(folder).free
    here["host_bandwidth"] = given.host_bandwidth or memory_speed(host)
    if device.is_cuda:
        here["device_free"] = device.free_bytes()
        here["device_bandwidth"] = given.device_bandwidth or memory_speed(device)
        if given.link_in is None:
            speed = copy_speed(device)
            here |= {"link_in": speed.to_device, "link_out": speed.to_host}
    return given._replace(**{name: value for name, value in here.items() if name == "gpu" or getattr(given, name) is None})


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * _GIB)


def _print(result: dict[str, Any], found: list[Placement], best: Placement | None) -> None:
    machine = result["machine"]
    state = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in result["state_bytes"].items())
    print_facts(
        "the table",
        [
            ("weights", f"{size(result['weight_bytes'])}, {result['dtype']}"),
            ("state", f"{state} ({result['optimizer']})" if state else f"none ({result['optimizer'] or 'it is only read'})"),
            ("together", size(result["bytes"])),
            ("a step moves", size(result["bytes_moved_a_step"])),
        ],
    )
    print_facts("\nthe machine", _machine_lines(machine, measured=result["measured_gpu"]))
    screen = console()
    screen.print("\nplacements", style="bold")
    table = RichTable("ms a step", "where", "fits", "limited by", box=None, padding=(0, 2, 0, 0))
    for each in found:
        fits = "unknown" if each.fits is None else "yes" if each.fits else "no"
        fits += "" if each.room is None else f", {size(each.room)} free"
        table.add_row("-" if each.ms is None else f"{each.ms:.2f}", each.where, fits, each.why)
    screen.print(table)
    if best is None:
        screen.print("\nit fits nowhere here; use fewer rows, a narrower --dtype, or an optimizer that keeps less")
        return
    call = next(each["call"] for each in result["placements"] if each["name"] == best.name)
    screen.print(f"\nfastest: {best.where}", style="bold")
    for line in ("import torch, rowferry as rf", call):  # to be copied, so never broken by a table
        typer.echo(f"  {line}")
    if best.name == "gpu":
        screen.print("a table that fits beside your model needs no pipeline: index it in plain PyTorch")


def _machine_lines(machine: dict[str, Any], *, measured: bool) -> list[tuple[str, str]]:
    def speed(value: float | None) -> str:
        return "speed unknown" if value is None else f"{value:.1f} GB/s"

    def room(value: int | None) -> str:
        return "room unknown" if value is None else f"{size(value)} free"

    lines = [("GPU", "none here; pass --gpu-memory, --link and --gpu-bandwidth to plan for a machine that has one")]
    if machine["gpu"]:
        about = "" if measured else " (as given; there is none here)"
        lines = [
            ("GPU", f"{room(machine['device_free'])}, memory {speed(machine['device_bandwidth'])}{about}"),
            ("link", f"{speed(machine['link_in'])} in, {speed(machine['link_out'])} out"),
        ]
    return [
        *lines,
        ("host memory", f"{room(machine['host_free'])}, {speed(machine['host_bandwidth'])}"),
        ("disk", f"{room(machine['disk_free'])}, random rows {speed(machine['disk_bandwidth'])}"),
    ]
