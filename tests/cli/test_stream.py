"""``rowferry stream`` goes through a file in random batches and tells how fast they came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from typer.testing import Result

Ask = Callable[..., dict[str, float]]


def test_an_epoch_of_an_npy_delivers_every_row_once(ask: Ask, npy: Path) -> None:
    said = ask("stream", npy, "--batch-size", 64, "--device", "cpu")
    assert (said["rows"], said["batches"], said["epochs"]) == (1000, 16, 1)
    assert said["rows_per_second"] == pytest.approx(1000 / said["seconds"])
    assert said["gigabytes_per_second"] == pytest.approx(1000 * 512 / said["seconds"] / 1e9)


def test_an_epoch_of_a_zarr_array_in_a_group_tells_what_the_consumer_waited_for(
    ask: Callable[..., dict[str, object]], tmp_path: Path, rows: NDArray[np.float32]
) -> None:
    zarr.create_group(tmp_path / "g.zarr").create_array("x", data=rows, chunks=(50, 128))
    said = ask("stream", tmp_path / "g.zarr", "--array", "x", "--device", "cpu")
    assert (said["rows"], said["mover"]) == (1000, "copy")
    causes = said["waited_for"]
    assert isinstance(causes, dict)
    assert sum(causes.values()) == pytest.approx(said["waited_seconds"])
    assert isinstance(said["waited_share"], float)
    assert 0 <= said["waited_share"] <= 1


def test_epochs_are_repeated_and_ended_early_when_asked(ask: Ask, npy: Path) -> None:
    said = ask("stream", npy, "--batch-size", 10, "--epochs", 3, "--limit-batches", 4, "--device", "cpu")
    assert (said["batches"], said["rows"], said["epochs"]) == (12, 120, 3)


def test_a_limit_past_the_end_changes_nothing(ask: Ask, npy: Path) -> None:
    assert ask("stream", npy, "--limit-batches", 99, "--device", "cpu")["rows"] == 1000


def test_rows_are_cast_when_asked(ask: Callable[..., dict[str, object]], npy: Path) -> None:
    assert ask("stream", npy, "--dtype", "float16", "--device", "cpu")["dtype"] == "float16"


def test_a_person_reads_speed_and_waiting_in_a_table(run: Callable[..., Result], npy: Path) -> None:
    result = run("stream", npy, "--device", "cpu")
    assert result.exit_code == 0
    assert "1,000 rows in 1 batches" in result.stdout
    for part in ("rows/s", "GB/s", "the consumer waited"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "tpu"),
        (["--device", "no device"], "no device"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--dtype", "floaty"], "'floaty'"),
        (["--array", "x"], "array"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    refused: Callable[..., str], npy: Path, words: list[str], said: str
) -> None:
    assert said in refused("stream", npy, *words)


@pytest.mark.parametrize("option", ["--batch-size", "--epochs", "--limit-batches"])
def test_counts_start_at_one(run: Callable[..., Result], npy: Path, option: str) -> None:
    result = run("stream", npy, option, 0)
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.gpu
def test_an_epoch_reaches_the_gpu(ask: Callable[..., dict[str, object]], npy: Path) -> None:
    said = ask("stream", npy, "--batch-size", 64)
    assert (said["device"], said["rows"]) == ("cuda:0", 1000)
