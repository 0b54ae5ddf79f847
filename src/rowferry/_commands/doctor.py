"""``rowferry doctor``: what this machine has for rowferry, what it lacks, and how to get that."""

from __future__ import annotations

from typing import Any

import torch

from rowferry.stores._devices import default_device
from rowferry.stores._kernels import available, why_unavailable

from . import _gpu
from ._advice import Machine, advise
from ._machine import available_memory, huge_pages, locked_memory_limit
from ._movers import movers
from ._output import JsonOption, print_facts, print_json, size
from ._versions import cupy_package, versions


def doctor(json: JsonOption = False) -> None:
    """Tell what this machine has for rowferry, what is missing, and how to get it."""
    device = default_device()
    driver, driver_problem = _gpu.driver()
    gpu = _gpu.examine(device) if device.type == "cuda" else None
    kernels = why_unavailable() if gpu and not available(device) else None
    machine = Machine(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpu=gpu is not None,
        driver=driver,
        driver_problem=driver_problem,
        cupy=cupy_package(),
        kernels=kernels,
        link=gpu.link if gpu else None,
        huge_pages=huge_pages(),
    )
    limit = locked_memory_limit()
    result = {
        "device": str(device),
        "driver": driver,
        "gpu": _gpu.as_json(gpu) if gpu else None,
        "memory": {
            "locked_limit_bytes": "unlimited" if limit is None else limit,
            "available_bytes": available_memory(),
            "transparent_huge_pages": machine.huge_pages,
        },
        "versions": versions(),
        "movers": movers(device, kernels),
        "missing": [advice._asdict() for advice in advise(machine)],
    }
    if json:
        print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    print_facts("device", _device_lines(result))
    memory = result["memory"]
    limit, free = memory["locked_limit_bytes"], memory["available_bytes"]
    print_facts(
        "\nmemory",
        [
            ("limit on locked memory", limit if isinstance(limit, str) else size(limit)),
            ("available", "unknown" if free is None else size(free)),
            ("transparent huge pages", memory["transparent_huge_pages"] or "unknown"),
        ],
    )
    print_facts("\nhow rows will cross", [(kind, f"{each['mover']}: {each['why']}") for kind, each in result["movers"].items()])
    print_facts("\nversions", [(name, version or "none") for name, version in result["versions"].items()])
    missing = [(f"{number}.", f"{each['missing']}\n{each['remedy']}") for number, each in enumerate(result["missing"], 1)]
    print_facts("\nmissing", missing or [("nothing", "")])


def _device_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("device", result["device"]), ("NVIDIA driver", result["driver"] or "none")]
    gpu = result["gpu"]
    if gpu is None:
        return lines
    lines.append(("GPU", f"{gpu['name']}, {size(gpu['memory_bytes'])}, compute capability {gpu['compute_capability']}"))
    pcie, copy = gpu["link"], gpu["copy"]
    if pcie:
        limit = pcie["limit_gigabytes_per_second"]
        most = f"generation {pcie['max_generation']} x{pcie['max_width']}" + (f", {limit:.1f} GB/s" if limit else "")
        lines.append(("PCIe link", f"generation {pcie['generation']} x{pcie['width']} now; at most {most}"))
    else:
        lines.append(("PCIe link", f"unknown: {gpu['link_problem']}"))
    if copy is None:
        return [*lines, ("a pinned copy reaches", f"not measured: {gpu['copy_problem']}")]
    for name, key in (("to the device", "to_device"), ("to the host", "to_host")):
        part = copy[f"{key}_share_of_limit"]
        speed = f"{copy[f'{key}_gigabytes_per_second']:.1f} GB/s" + (f", {part:.2f} of the link" if part else "")
        lines.append((f"a pinned copy {name}", speed))
    return lines
