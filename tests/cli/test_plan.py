"""``rowferry plan`` counts bytes as the real optimizer does, and times as its formulas say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import Result

import rowferry as rf
from rowferry._commands._placements import Machine, Placement, Table, fastest, placements

Ask = Callable[..., dict[str, Any]]

GPU = (
    "--gpu-memory",
    100,
    "--host-memory",
    200,
    "--disk",
    1000,
    "--link",
    50,
    "--gpu-bandwidth",
    4000,
    "--host-bandwidth",
    100,
)
TABLE = Table(rows=1000, weight_bytes=512, state_bytes=1024, batch=100, distinct=0.5, trains=True)
MACHINE = Machine(
    gpu=True,
    device_free=10**9,
    host_free=10**10,
    disk_free=10**11,
    link_in=50.0,
    link_out=25.0,
    device_bandwidth=4000.0,
    host_bandwidth=40.0,
    disk_bandwidth=None,
)


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        (["adam"], {"exp_avg": 4, "exp_avg_sq": 4}),
        (["AdamW", "--optimizer-arg", "amsgrad=true"], {"exp_avg": 4, "exp_avg_sq": 4, "max_exp_avg_sq": 4}),
        (["sgd"], {}),
        (["sgd", "--optimizer-arg", "momentum=0.9"], {"momentum_buffer": 4}),
        (["adagrad", "--dtype", "bf16"], {"sum": 4}),  # half-precision rows are trained in float32
        (["sparseadam"], {"exp_avg": 4, "exp_avg_sq": 4}),
        (["none", "--dtype", "fp16"], {}),
    ],
)
def test_state_is_what_the_real_optimizer_keeps(ask: Ask, words: list[str], columns: dict[str, int]) -> None:
    said = ask("plan", "--rows", 1000, "--dim", 16, "--optimizer", *words, *GPU)
    assert said["state_bytes"] == {name: 1000 * 16 * each for name, each in columns.items()}
    itemsize = 2 if "--dtype" in words else 4
    assert said["weight_bytes"] == 1000 * 16 * itemsize
    assert said["bytes"] == said["weight_bytes"] + sum(said["state_bytes"].values())


def test_the_example_of_the_documentation_adds_up_by_hand(ask: Ask) -> None:
    said = ask("plan", "--rows", 26_800_000, "--dim", 128, "--batch", 1_048_576, "--distinct", 0.25, *GPU)
    assert said["bytes"] == 26_800_000 * 128 * 4 * 3
    moved = 0.25 * 1_048_576 * 128 * 4 * 3
    assert said["bytes_moved_a_step"] == 2 * moved
    by = {each["name"]: each for each in said["placements"]}
    assert by["pinned"]["ms"] == pytest.approx(1e3 * 2 * moved / 50e9)
    lookups = 1_048_576 * 512
    inside = 4 * lookups + 4 * moved + 2 * 0.25 * 1_048_576 * (1536 + 512)
    assert by["gpu"]["ms"] == pytest.approx(1e3 * inside / 4000e9)
    assert by["memmap"]["ms"] == pytest.approx(1e3 * 2 * moved / 50e9)  # 100 / 2 GB/s by host threads
    assert said["fastest"] == "gpu"


def test_times_follow_the_formulas_for_a_link_of_two_speeds() -> None:
    gpu, pinned, memmap = placements(TABLE, MACHINE)
    moved = 0.5 * 100 * 1536
    inside = 1e3 * (4 * 100 * 512 + 4 * moved + 2 * 50 * (1536 + 512)) / 4000e9
    assert gpu.ms == pytest.approx(inside)
    assert pinned.ms == pytest.approx(1e3 * (moved / 50e9 + moved / 25e9))
    assert memmap.ms == pytest.approx(1e3 * (moved / 20e9 + moved / 20e9))
    assert "link" in pinned.why


def test_reading_moves_rows_one_way_and_trains_nothing() -> None:
    table = TABLE._replace(state_bytes=0, trains=False)
    gpu, pinned, _ = placements(table, MACHINE)
    assert gpu.ms == pytest.approx(1e3 * (2 * 100 * 512 + 2 * 50 * 512) / 4000e9)
    assert pinned.ms == pytest.approx(1e3 * 50 * 512 / 50e9)


def test_a_transfer_that_is_shorter_than_the_work_on_the_device_is_hidden() -> None:
    slow = MACHINE._replace(device_bandwidth=1.0)
    gpu, pinned, _ = placements(TABLE, slow)
    assert pinned.ms == gpu.ms
    assert "hidden" in pinned.why


def test_without_a_gpu_rows_cross_nothing() -> None:
    alone = MACHINE._replace(gpu=False, device_free=None, link_in=None, link_out=None, device_bandwidth=None)
    gpu, pinned, memmap = placements(TABLE, alone)
    assert (gpu.fits, gpu.ms) == (False, None)
    assert pinned.ms == memmap.ms == pytest.approx(1e3 * (4 * 100 * 512 + 4 * 76_800 + 100 * 2048) / 40e9)


def test_a_file_larger_than_memory_is_as_fast_as_the_disk_or_unknown() -> None:
    small = MACHINE._replace(host_free=1000)
    unknown = placements(TABLE, small)[2]
    assert unknown.ms is None
    assert "--disk-bandwidth" in unknown.why
    known = placements(TABLE, small._replace(disk_bandwidth=2.0))[2]
    assert known.ms == pytest.approx(1e3 * 2 * 76_800 / 2e9)


def test_the_fastest_placement_fits() -> None:
    found = placements(TABLE, MACHINE._replace(device_free=1000))
    assert [each.fits for each in found] == [False, True, True]
    best = fastest(found)
    assert best is not None
    assert best.name == "pinned"
    assert fastest([each._replace(fits=False) for each in found]) is None
    untimed: list[Placement] = [each._replace(ms=None) for each in found]
    assert fastest(untimed) == untimed[1]


@pytest.mark.parametrize("optimizer", ["adam", "none"])
def test_the_calls_it_prints_can_be_typed(ask: Ask, tmp_path: Path, optimizer: str) -> None:
    path = tmp_path / "table.npy"
    words = ("--optimizer", optimizer, "--path", path, "--batch", 4)
    said = ask("plan", "--rows", 10, "--dim", 3, *words, *GPU)
    if optimizer == "none":
        np.save(path, np.zeros((10, 3), np.float32))
    for each in said["placements"]:
        made = eval(each["call"].replace('"cuda"', '"cpu"').replace("DeviceStore", "ArrayStore"), {"rf": rf, "torch": torch})
        assert isinstance(made, rf.Pipeline if optimizer == "none" else rf.RowTable)
        if isinstance(made, rf.RowTable):
            assert made.weights.shape == (10, 3)
            for batch in made.batches([[1, 2]], device="cpu"):
                batch.lookup().sum().backward()
                batch.step()
            state = {name: store.nbytes for name, store in made.state.items()}
            assert state == said["state_bytes"]
            made.weights.close()
        else:
            made.close()


def test_this_machine_is_measured_where_nothing_is_given(ask: Ask) -> None:
    said = ask("plan", "--rows", 100, "--dim", 4)
    machine = said["machine"]
    assert machine["host_free"] > 0
    assert machine["disk_free"] > 0
    assert machine["host_bandwidth"] > 0
    by = {each["name"]: each for each in said["placements"]}
    assert by["pinned"]["fits"]
    assert math.isfinite(by["pinned"]["ms"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this one is about machines without a GPU")
def test_without_a_gpu_it_says_so_and_how_to_plan_for_one(run: Callable[..., Result]) -> None:
    result = run("plan", "--rows", 100, "--dim", 4)
    assert result.exit_code == 0
    assert "none here; pass --gpu-memory, --link and --gpu-bandwidth" in result.stdout
    assert "rf.RowTable(rf.PinnedStore.zeros((100, 4), torch.float32), optimizer=torch.optim.Adam)" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optimizer", "muon"], "Muon"),
        (["--optimizer", "adamm"], "'adamm'"),
        (["--optimizer-arg", "momentum"], "'momentum'"),
        (["--optimizer-arg", "momentum=0.9"], "momentum"),
        (["--dtype", "floaty"], "'floaty'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(refused: Callable[..., str], words: list[str], said: str) -> None:
    assert said in refused("plan", "--rows", 10, "--dim", 2, *words, *GPU)


@pytest.mark.gpu
def test_a_gpu_is_measured(ask: Ask) -> None:
    said = ask("plan", "--rows", 1000, "--dim", 16)
    assert said["measured_gpu"]
    assert said["fastest"] == "gpu"
    machine = said["machine"]
    assert machine["device_bandwidth"] > machine["link_in"] > 1
    assert machine["device_free"] > 1 << 30
