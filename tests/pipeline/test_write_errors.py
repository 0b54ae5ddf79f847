"""What write-back refuses, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, MemmapStore
from rowferry.stores.testing import write_npy_file

Make = Callable[..., Pipeline]


class DiskError(OSError):
    """A kind of its own, to see that it arrives as it was raised."""


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


def test_a_batch_cannot_be_written_after_the_next_was_taken(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(8)
    with pipeline(values, batch_size=2, writable=True) as pipe:
        batches = iter(pipe)
        first = next(batches)
        next(batches)
        with pytest.raises(RuntimeError, match=r"batch 0.*accelerate"):
            first.write_back(torch.zeros(2, 3))
    assert torch.equal(values, numbered(8))


@pytest.mark.parametrize("ending", ["end", "close", "iter", "failed next"])
def test_a_batch_cannot_be_written_after_its_epoch(pipeline: Make, numbered: Callable[..., Tensor], ending: str) -> None:
    values = numbered(4)
    asked = [[0, 1, 2, 3], *([[99]] if ending == "failed next" else [])]
    pipe = pipeline(values, batch_sampler=asked, writable=True)
    batches = iter(pipe)
    last = next(batches)
    if ending == "close":
        pipe.close()
    elif ending == "iter":
        iter(pipe)
    else:
        with pytest.raises((StopIteration, IndexError)):
            next(batches)
    with pytest.raises(RuntimeError, match="batch 0"):
        last.write_back(torch.zeros(4, 3))
    pipe.close()
    assert torch.equal(values, numbered(4))


MISFITS: dict[str, tuple[Any, type[Exception], str]] = {
    "too many rows": (torch.zeros(3, 3), ValueError, r"\(3, 3\).*\(2, 3\)"),
    "no row shape": (torch.zeros(2), ValueError, r"\(2, 3\)"),
    "one dimension more": (torch.zeros(2, 3, 1), ValueError, r"\(2, 3\)"),
    "no rows": (torch.zeros(0, 3), ValueError, r"\(2, 3\)"),
    "one row for all": (torch.zeros(1, 3), ValueError, r"\(2, 3\)"),
    "complex": (torch.zeros(2, 3, dtype=torch.complex64), TypeError, "complex64"),
    "numpy": (np.zeros((2, 3), np.float32), TypeError, "ndarray"),
    "list": ([[0.0] * 3] * 2, TypeError, "list"),
    "elsewhere": (torch.zeros(2, 3, device="meta"), ValueError, "meta"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_values_that_do_not_fit_are_refused(pipeline: Make, numbered: Callable[..., Tensor], misfit: str) -> None:
    values, error, said = MISFITS[misfit]
    memory = numbered(8)
    with pipeline(memory, batch_size=2, writable=True) as pipe:
        for batch in pipe:
            with pytest.raises(error, match=said):
                batch.write_back(values)
    assert torch.equal(memory, numbered(8))


def test_floating_values_are_refused_for_an_integer_store(pipeline: Make) -> None:
    memory = torch.zeros(4, 1, dtype=torch.int64)
    with pipeline(memory, batch_size=2, writable=True) as pipe, pytest.raises(TypeError, match="int64"):
        next(iter(pipe)).write_back(torch.full((2, 1), 1.5))
    assert memory.sum() == 0


def test_when_one_column_does_not_fit_none_is_written(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    source = {"w": numbered(4), "m": numbered(4)}
    with pipeline(source, batch_size=2, writable=True) as pipe:
        for batch in pipe:
            with pytest.raises(ValueError, match="m"):
                batch.write_back({"w": torch.zeros(2, 3), "m": torch.zeros(1, 3)})
    assert torch.equal(source["w"], numbered(4))


def test_a_column_or_table_that_is_not_there_is_named_with_those_that_are(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    with pipeline({"w": numbered(4), "m": numbered(4)}, batch_size=2, writable=True) as pipe:
        batch = next(iter(pipe))
        with pytest.raises(KeyError, match=r"'v'.*'w', 'm'"):
            batch.write_back({"v": batch.values["w"]})
        with pytest.raises(TypeError, match="dict"):
            batch.write_back(batch.values["w"])
    with pipeline({"a": numbered(4)}, batch_sampler=[([1],)], index={"a": 0}, writable=True) as pipe:
        batch = next(iter(pipe))
        with pytest.raises(KeyError, match=r"'b'.*'a'"):
            batch.write_back({"b": batch.values["a"]})
    with pipeline((numbered(4), torch.zeros(4)), batch_size=2, writable=True) as pipe:
        batch = next(iter(pipe))
        with pytest.raises(TypeError, match="2 tensors"):
            batch.write_back((batch.values[0],))


def test_without_fetch_values_must_be_passed(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(4)
    with pipeline(memory, batch_size=2, writable=True, fetch=False) as pipe:
        for batch in pipe:
            with pytest.raises(ValueError, match="fetch=False"):
                batch.write_back()
    assert torch.equal(memory, numbered(4))


def test_a_read_only_store_is_refused_when_the_pipeline_is_made(
    ahead: Make, tmp_path: Path, numbered: Callable[..., Tensor]
) -> None:
    array = numbered(4).numpy()
    array.flags.writeable = False
    with MemmapStore(write_npy_file(tmp_path / "x.npy", numbered(4))) as mapped:
        for source in (mapped, array, ArrayStore(numbered(4), writable=False)):
            with pytest.raises(PermissionError, match="read-only"):
                ahead(source, batch_size=2, writable=True)
    with pytest.raises(PermissionError, match="read-only"):
        ahead(tmp_path / "x.npy", batch_size=2, writable=True)
