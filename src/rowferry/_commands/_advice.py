"""What a machine lacks for rows to cross at full speed, and how to get it. Pure: told everything, asks nothing."""

from __future__ import annotations

from typing import NamedTuple

from ._link import Link

EXTRAS = {"12": "cuda12", "13": "cuda13"}  # by the major version of torch's CUDA


class Advice(NamedTuple):
    """What is missing, and how to get it."""

    missing: str
    remedy: str


class Machine(NamedTuple):
    """What was found.

    ``torch_cuda``: the CUDA version that torch was built for. ``gpu``: torch sees one. ``driver``: its version, or why
    none answers. ``kernels``: why rowferry's kernels can't run on the GPU, None where they can or there is no GPU.
    """

    torch: str
    torch_cuda: str | None
    gpu: bool
    driver: str | None
    driver_problem: str | None
    cupy: tuple[str, str] | None
    kernels: str | None
    link: Link | None
    huge_pages: str | None


def advise(machine: Machine) -> list[Advice]:
    """What to do, the most needed first; empty when nothing is missing."""
    if not machine.gpu:
        return [_no_gpu(machine)]
    found = []
    if machine.cupy is None:
        found.append(_no_cupy(machine.torch_cuda or ""))
    elif machine.kernels is not None:
        package = " ".join(machine.cupy)
        found.append(
            Advice(
                f"kernels can't run with {package}: {machine.kernels}", _right_cupy(machine.torch_cuda or "", machine.cupy[0])
            )
        )
    if machine.link is not None and machine.link[:2] != machine.link[2:]:
        now, most = (f"generation {gen} x{width}" for gen, width in (machine.link[:2], machine.link[2:]))
        found.append(
            Advice(f"the PCIe link runs at {now}, card and slot could do {most}", "check slot, riser and firmware settings")
        )
    if machine.huge_pages == "never":
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        found.append(Advice("transparent huge pages are off, so large pinned tables take longer to make", remedy))
    return found


def _no_gpu(machine: Machine) -> Advice:
    if machine.driver is None:
        return Advice(
            f"no NVIDIA driver answers ({machine.driver_problem}); rows stay on the CPU",
            "nothing to do on a machine without a GPU; else install NVIDIA's driver"
            + ("" if machine.torch_cuda else " and a CUDA build of torch"),
        )
    if machine.torch_cuda is None:
        return Advice(
            f"torch {machine.torch} is a CPU build, though NVIDIA's driver {machine.driver} answers",
            "install a CUDA build of torch for this driver, as pytorch.org/get-started says",
        )
    return Advice(
        f"torch for CUDA {machine.torch_cuda} sees no GPU, though NVIDIA's driver {machine.driver} answers",
        f"look at CUDA_VISIBLE_DEVICES, and whether driver {machine.driver} is new enough for CUDA {machine.torch_cuda}",
    )


def _no_cupy(torch_cuda: str) -> Advice:
    return Advice("CuPy, which runs rowferry's kernels; without it rows are gathered by host threads", _get_cupy(torch_cuda))


def _right_cupy(torch_cuda: str, package: str) -> str:
    return f"pip uninstall {package}, then {_get_cupy(torch_cuda)}"


def _get_cupy(torch_cuda: str) -> str:
    extra = EXTRAS.get(torch_cuda.partition(".")[0])
    if extra is None:
        return (
            f"a torch for CUDA {' or '.join(EXTRAS)} (this one is for {torch_cuda}), then its extra, such as rowferry[cuda12]"
        )
    return f'pip install "rowferry[{extra}]"'
