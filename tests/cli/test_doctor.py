"""``rowferry doctor`` is useful with and without a GPU, and knows the remedy for what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from rowferry._commands._advice import Machine, advise
from rowferry._commands._link import Link, limit_gigabytes
from rowferry._commands._machine import available_memory, huge_pages

Ask = Callable[..., dict[str, Any]]

HEALTHY = Machine(
    torch="2.11.0",
    torch_cuda="13.0",
    gpu=True,
    driver="580.1",
    driver_problem=None,
    cupy=("cupy-cuda13x", "14.2.0"),
    kernels=None,
    link=Link(5, 16, 5, 16),
    huge_pages="madvise",
)
NO_GPU = HEALTHY._replace(gpu=False, link=None, kernels=None)
NO_DRIVER = NO_GPU._replace(driver=None, driver_problem="NVML Shared Library Not Found")


def test_the_doctor_speaks_on_any_machine(ask: Ask) -> None:
    said = ask("doctor")
    assert said["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert said["versions"]["torch"] == torch.__version__
    assert set(said["versions"]) >= {"rowferry", "python", "torch", "torch's CUDA", "cupy", "numpy", "zarr"}
    assert set(said["memory"]) == {"locked_limit_bytes", "available_bytes", "transparent_huge_pages"}
    assert all(each["mover"] and each["why"] for each in said["movers"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this one is about machines without a GPU")
def test_without_a_gpu_rows_in_memory_stay_where_they_are_and_the_doctor_says_what_is_missing(ask: Ask) -> None:
    said = ask("doctor")
    assert said["gpu"] is None
    assert said["movers"]["PinnedStore"]["mover"] == "local"
    assert said["movers"]["ZarrStore"]["mover"] == "copy"
    assert len(said["missing"]) == 1


def test_a_person_reads_it_in_tables(run: Callable[..., Result]) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for part in ("NVIDIA driver", "limit on locked memory", "transparent huge pages", "how rows will cross", "zarr", "missing"):
        assert part in result.stdout


def test_a_healthy_machine_lacks_nothing() -> None:
    assert advise(HEALTHY) == []


@pytest.mark.parametrize(
    ("machine", "missing", "remedy"),
    [
        (NO_DRIVER, "no NVIDIA driver answers (NVML Shared Library Not Found)", "install NVIDIA's driver"),
        (NO_DRIVER._replace(torch_cuda=None), "no NVIDIA driver", "and a CUDA build of torch"),
        (NO_GPU._replace(torch_cuda=None), "CPU build", "CUDA build of torch"),
        (NO_GPU, "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (HEALTHY._replace(cupy=None), "CuPy", 'pip install "rowferry[cuda13]"'),
        (HEALTHY._replace(cupy=None, torch_cuda="12.8"), "CuPy", 'pip install "rowferry[cuda12]"'),
        (HEALTHY._replace(cupy=None, torch_cuda="11.8"), "CuPy", "a torch for CUDA 12 or 13"),
        (HEALTHY._replace(kernels="no NVRTC"), "no NVRTC", "pip uninstall cupy-cuda13x"),
        (HEALTHY._replace(link=Link(3, 8, 5, 16)), "generation 3 x8", "slot"),
        (HEALTHY._replace(huge_pages="never"), "huge pages", "madvise"),
    ],
)
def test_each_lack_has_a_remedy(machine: Machine, missing: str, remedy: str) -> None:
    (advice,) = advise(machine)
    assert missing in advice.missing
    assert remedy in advice.remedy


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [(1, 16, 4.0), (2, 16, 8.0), (3, 16, 15.75), (4, 16, 31.5), (5, 16, 63.0), (5, 8, 31.5), (6, 16, 121.0)],
)
def test_a_link_carries_what_its_generation_and_width_allow(generation: int, width: int, gigabytes: float) -> None:
    assert limit_gigabytes(generation, width) == pytest.approx(gigabytes, rel=1e-3)


def test_a_generation_from_the_future_has_no_limit_rather_than_a_wrong_one() -> None:
    assert limit_gigabytes(9, 16) is None


def test_available_memory_and_huge_pages_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\nMemAvailable:    42 kB\n")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert available_memory(tmp_path / "meminfo") == 42 * 1024
    assert huge_pages(tmp_path / "enabled") == "madvise"


def test_a_system_that_does_not_tell_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none") is None
    assert huge_pages(tmp_path / "none") is None


@pytest.mark.gpu
def test_the_gpu_is_measured_and_matched_to_its_link(ask: Ask) -> None:
    said = ask("doctor")
    gpu = said["gpu"]
    assert said["driver"]
    assert gpu["name"] == torch.cuda.get_device_name()
    assert gpu["copy"]["to_device_gigabytes_per_second"] > 1
    assert gpu["copy_problem"] is None
    if gpu["link"] is None:
        assert gpu["link_problem"]
    else:
        assert 0.3 < gpu["copy"]["to_device_share_of_limit"] < 1.05
        assert 0.3 < gpu["copy"]["to_host_share_of_limit"] < 1.05
