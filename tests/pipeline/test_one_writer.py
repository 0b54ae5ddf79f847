"""One writable pipeline over a store at a time; readers beside it see what it has written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, PinnedStore, open_store
from rowferry.stores.testing import write_npy_file

Make = Callable[..., Pipeline]


def test_a_second_writable_pipeline_is_refused_until_the_first_is_closed(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    store = ArrayStore(numbered(4), name="weights")
    first = pipeline(store, batch_size=2, writable=True)
    with pytest.raises(RuntimeError, match=r"weights.*written.*close"):
        pipeline(store, batch_size=2, writable=True)
    first.close()
    pipeline(store, batch_size=2, writable=True).close()


def test_a_dropped_pipeline_no_longer_holds_its_store(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    store = ArrayStore(numbered(4))
    pipe = pipeline(store, batch_size=2, writable=True)
    list(pipe)
    del pipe
    gc.collect()
    pipeline(store, batch_size=2, writable=True).close()


def test_a_pipeline_that_could_not_be_made_holds_no_store(ahead: Make) -> None:
    store = ArrayStore(torch.zeros(100, 256))
    for _ in range(2):
        with pytest.raises(ValueError, match="staging_bytes"):
            ahead(store, batch_size=50, staging_bytes=4096, writable=True)


def test_other_stores_over_the_same_memory_count_as_the_same(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(4)
    pinned = PinnedStore.from_array(memory)
    for first, second in ((ArrayStore(memory), ArrayStore(memory.numpy())), (pinned, ArrayStore(pinned.torch()))):
        with pipeline(first, batch_size=2, writable=True), pytest.raises(RuntimeError, match="already written"):
            pipeline(second, batch_size=2, writable=True)


def test_the_same_memory_twice_in_one_pipeline_is_refused(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(4)
    for source in ((memory, memory), {"a": ArrayStore(memory), "b": ArrayStore(memory)}):
        with pytest.raises(ValueError, match="twice"):
            pipeline(source, batch_size=2, writable=True)
    store = ArrayStore(memory)
    with pytest.raises(ValueError, match="twice"):
        pipeline({"a": store, "b": store}, batch_sampler=[([0], [1])], index={"a": 0, "b": 1}, writable=True)
    with pipeline((memory, memory), batch_size=2) as pipe:  # reading it twice is fine
        assert all(torch.equal(first, second) for first, second in pipe)


def test_overlapping_memory_is_refused_too(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(8)
    with pytest.raises(ValueError, match="twice"):
        pipeline((memory[:6], memory[2:]), batch_size=2, writable=True)


def test_the_same_file_cannot_be_opened_for_writing_twice(tmp_path: Path, numbered: Callable[..., Tensor]) -> None:
    path = write_npy_file(tmp_path / "x.npy", numbered(4))
    with open_store(path, "r+"), pytest.raises(OSError, match=str(path)):
        open_store(path, "r+")


def test_a_reader_that_begins_sees_what_a_live_writer_has_written(pipeline: Make) -> None:
    memory = torch.zeros(8, 1)
    writer = pipeline(ArrayStore(memory), batch_size=2, writable=True)
    reader = pipeline(ArrayStore(memory), batch_size=8)
    for batch in writer:
        batch.write_back(batch.values + 1)
        seen = next(iter(reader)).data.view(-1).tolist()
        assert seen == [1.0] * (2 * batch.number + 2) + [0.0] * (6 - 2 * batch.number)
    writer.close()
    reader.close()


def test_a_reader_of_a_file_beside_its_writer_sees_its_writes(windowed: Make, tmp_path: Path) -> None:
    path = write_npy_file(tmp_path / "x.npy", torch.zeros(8, 1))
    with (
        open_store(path, "r+") as writable,
        open_store(path) as readable,
        windowed(writable, batch_size=2, writable=True) as writer,
        windowed(readable, batch_size=8) as reader,
    ):
        for batch in writer:
            batch.write_back(batch.values + 1)
            assert next(iter(reader)).data.sum() == 2 * batch.number + 2


def test_the_writer_goes_on_after_a_reader_had_it_drain(pipeline: Make) -> None:
    memory = torch.zeros(4, 1)
    with (
        pipeline(memory, batch_sampler=[[0, 1], [1, 2], [1]], writable=True) as writer,
        pipeline(memory, batch_size=4) as reader,
    ):
        for batch in writer:
            list(reader)
            batch.write_back(batch.values + 1)
            list(reader)
    assert memory.view(-1).tolist() == [1, 3, 1, 0]


def test_memory_that_a_closed_store_gave_up_may_be_written_by_others(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(4)
    first = ArrayStore(memory)
    earlier = pipeline(first, batch_size=2, writable=True)
    first.close()  # its pipeline is still there, as one that waits to be collected is
    with pipeline(ArrayStore(memory), batch_size=2, writable=True) as pipe:
        assert len(list(pipe)) == 2
    del earlier
