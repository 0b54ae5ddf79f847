"""Writing a zarr array: only the rows named change, one writer at a time, and nothing is torn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import TransposeCodec
from zarr.storage import MemoryStore

from rowferry.stores import ZarrStore, _zarr_touched

LAYOUTS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2, "chunks": (4, 2)},
    "v2 compressed": {"zarr_format": 2, "chunks": (4, 2), "compressors": numcodecs.Zstd()},
    "v2 in Fortran order": {"zarr_format": 2, "chunks": (4, 3), "order": "F"},
    "v3": {"chunks": (4, 2)},
    "v3 transposed": {"chunks": (4, 3), "filters": [TransposeCodec(order=(1, 0))]},
    "v3 sharded": {"chunks": (2, 3), "shards": (4, 3)},
    "v3 sharded along a row, compressed": {"chunks": (2, 1), "shards": (4, 2), "compressors": "auto"},
}


def create(home: Any, shape: tuple[int, ...], dtype: str = "f4", **layout: Any) -> zarr.Array[Any]:
    return zarr.create_array(home, shape=shape, dtype=dtype, **{"compressors": None, "fill_value": -1, **layout})


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_only_the_rows_written_change(tmp_path: Path, layout: dict[str, Any], dtype: str) -> None:
    create(tmp_path / "a.zarr", (10, 3), dtype, **layout)
    expected = np.full((10, 3), -1, "f4")
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        for rows in ([9], [8, 0, 3], [1, 2], range(10), [4, 5, 6, 7], [6, 6, 1]):
            new = torch.randn(len(rows), 3)
            store.scatter(rows, new)
            for row, value in zip(rows, new, strict=True):
                expected[row] = value
            assert np.array_equal(store.gather(range(10)).numpy(), expected)
    fresh = zarr.open_array(tmp_path / "a.zarr", mode="r")
    assert np.array_equal(np.asarray(fresh[...]), expected)
    assert fresh.dtype == np.dtype(dtype) or layout.get("zarr_format") != 2
    assert not [name for name in os.listdir(tmp_path / "a.zarr") if "lock" in name]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_writes_to_any_chunking_equal_numpys(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="shape"))
    chunks = tuple(data.draw(st.integers(1, n), label="chunk") for n in shape)
    shards = (
        tuple(c * data.draw(st.integers(1, 3), label="chunks in shard") for c in chunks) if data.draw(st.booleans()) else None
    )
    store = ZarrStore(create(MemoryStore(), shape, "i4", chunks=chunks, shards=shards), "r+")
    expected = np.full(shape, -1, "i4")
    for step in range(data.draw(st.integers(1, 4), label="writes")):
        rows = np.asarray(data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, unique=True), label="rows"))
        new = np.arange(rows.size * expected[0].size, dtype="i4").reshape(rows.size, *shape[1:]) + 1000 * step
        store.scatter(rows, new)
        expected[rows] = new
    assert np.array_equal(store.gather(range(shape[0])).numpy(), expected)


def test_rows_written_back_to_the_fill_value_keep_their_chunk(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", (4, 2), chunks=(2, 2))
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        store.scatter(range(4), torch.full((4, 2), -1.0))
    assert (ZarrStore(tmp_path / "a.zarr", strict=True).gather(range(4)) == -1).all()


def test_two_threads_that_write_different_rows_of_one_shard_lose_nothing(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", (100, 8), chunks=(25, 8), shards=(50, 8))
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        store.scatter(range(100), torch.zeros(100, 8))
        torn: list[int] = []

        def write(start: int) -> None:
            for round_ in range(1, 101):
                store.scatter(range(start, start + 25), torch.full((25, 8), float(round_)))
                if not (store.gather(range(start, start + 25)) == round_).all():
                    torn.append(round_)

        def read() -> None:
            torn.extend(-1 for _ in range(50) if store.gather([49, 25, 49]).any() and not store.gather([25]).any())

        threads = [
            threading.Thread(target=write, args=(0,)),
            threading.Thread(target=write, args=(25,)),
            threading.Thread(target=read),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not torn
        assert (store.gather(range(50)) == 100).all()
        assert not store.gather(range(50, 100)).any()


class Pausing(MemoryStore):
    """Once ``armed``: after the first read of a piece of a shard, lets a writer replace the shard before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.first_read = threading.Event()  # set when the shard's index was read
        self.replaced = threading.Event()  # set when a scatter has returned

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        if self.armed and byte_range is not None:
            if self.first_read.is_set():
                # Where writers wait for readers nothing comes, so the wait must end by itself.
                await asyncio.to_thread(self.replaced.wait, 0.5)
            self.first_read.set()
        return await super().get(key, prototype, byte_range)


def test_a_reader_of_other_rows_never_sees_half_of_a_replaced_shard() -> None:
    memory = Pausing()
    create(memory, (64, 8), chunks=(4, 8), shards=(64, 8), compressors="auto")
    store = ZarrStore(zarr.open_array(memory), "r+")
    still = torch.randn(64, 8)
    store.scatter(range(64), still)

    def write() -> None:
        memory.first_read.wait()
        store.scatter(range(32), torch.zeros(32, 8))  # compresses to less, so all later chunks move
        memory.replaced.set()

    writer = threading.Thread(target=write)
    writer.start()
    memory.armed = True
    rows = store.gather([40, 60])
    memory.armed = False
    writer.join()
    assert torch.equal(rows, still[[40, 60]])
    assert not store.gather(range(32)).any()


class Breaking(MemoryStore):
    """Fails at chunk 0 and is slow at chunk 1: what zarr leaves behind when one chunk of a write fails."""

    broken = False
    under_way = 0

    async def set(self, key: str, value: Any, byte_interval: Any = None) -> None:
        if self.broken and key == "c/0/0":
            raise OSError(f"no room for {key}")
        type(self).under_way += 1
        if self.broken:
            await asyncio.sleep(0.2)  # a slow disk, so that the failure comes first
        await super().set(key, value)
        type(self).under_way -= 1


def test_after_a_failed_write_no_chunk_of_it_lands_later_and_a_retry_holds() -> None:
    memory = Breaking()
    create(memory, (4, 2), chunks=(2, 2))
    store = ZarrStore(zarr.open_array(memory), "r+")
    memory.broken = True
    with pytest.raises(OSError, match="no room") as failure:
        store.scatter([0, 2], torch.ones(2, 2))
    assert memory.under_way == 0
    assert any("2 rows from 0 to 2" in note for note in failure.value.__notes__)
    memory.broken = False
    store.scatter([0, 2], torch.full((2, 2), 7.0))
    assert store.gather([0, 1, 2, 3])[:, 0].tolist() == [7, -1, 7, -1]


def test_a_second_writer_of_a_directory_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", (4, 2))
    first = ZarrStore(tmp_path / "a.zarr", "r+")
    with pytest.raises(BlockingIOError, match=rf"a\.zarr is open for writing in process {os.getpid()}"):
        ZarrStore(tmp_path / "a.zarr", "r+")
    with pytest.raises(BlockingIOError):
        ZarrStore(zarr.open_array(tmp_path / "a.zarr"), "r+")
    ZarrStore(tmp_path / "a.zarr").close()
    first.close()
    second = ZarrStore(tmp_path / "a.zarr", "r+")
    del second  # dropped without close: not locked for ever
    ZarrStore(tmp_path / "a.zarr", "r+").close()


def test_rows_appended_by_another_handle_survive_a_write_to_their_chunk(tmp_path: Path) -> None:
    array = create(tmp_path / "a.zarr", (6, 2), chunks=(4, 2))
    array[...] = 1
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        array.append(np.full((2, 2), 2, "f4"))
        store.scatter([4, 5], torch.full((2, 2), 3.0))
    assert np.asarray(zarr.open_array(tmp_path / "a.zarr")[:, 0]).tolist() == [1, 1, 1, 1, 3, 3, 2, 2]


def test_a_read_only_store_refuses_rows(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", (4, 2))
    with pytest.raises(PermissionError, match=r"mode='r\+'"):
        ZarrStore(tmp_path / "a.zarr").scatter([0], torch.zeros(1, 2))


def test_flush_with_sync_returns_and_another_process_reads_the_rows(tmp_path: Path) -> None:
    create(tmp_path / "a.zarr", (4, 2))
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        store.scatter([1], torch.full((1, 2), 5.0))
        store.flush()
        store.flush(sync=True)
        code = "import sys, zarr; print(zarr.open_array(sys.argv[1], mode='r')[1].tolist())"
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a.zarr")], capture_output=True, text=True, check=True
        )
        assert done.stdout == "[5.0, 5.0]\n"


WRITER = """
import sys, itertools, torch
from rowferry.stores import ZarrStore, _zarr_touched
store = ZarrStore(sys.argv[1], "r+")
for round_ in itertools.count(1):
    store.scatter(range(512), torch.full((512, 64), float(round_)))
    print(round_, flush=True)
"""


def kill_a_writer(path: Path, rounds: int) -> None:
    """Start a process that writes all rows again and again, and kill it in the midst after ``rounds`` rounds."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=env, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(rounds):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("layout", [{"chunks": (64, 64)}, {"chunks": (16, 64), "shards": (64, 64), "compressors": "auto"}])
def test_a_kill_leaves_every_chunk_wholly_old_or_new(tmp_path: Path, kills: int, layout: dict[str, Any]) -> None:
    create(tmp_path / "a.zarr", (512, 64), **layout)
    for kill in range(kills):
        kill_a_writer(tmp_path / "a.zarr", 1 + kill * 7 % 5)
        with ZarrStore(tmp_path / "a.zarr", "r+", strict=True) as store:
            for chunk in store.gather(range(512)).reshape(8, -1):
                assert (chunk == chunk[0]).all()


def test_a_scatter_over_many_chunks_holds_few_of_them_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def noted(self: Any, values: Any, replace: Any = _zarr_touched.TouchedChunks.replace) -> None:
        sizes.append(self.view.nbytes)
        replace(self, values)

    monkeypatch.setattr(_zarr_touched.TouchedChunks, "replace", noted)
    create(tmp_path / "a.zarr", (40, 1 << 18), chunks=(1, 1 << 18))  # 40 MiB
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        store.scatter(range(40), torch.ones(40, 1).expand(-1, 1 << 18))
        assert bool((store.gather(range(40)) == 1).all())
    assert sizes == [32 << 20, 8 << 20]
