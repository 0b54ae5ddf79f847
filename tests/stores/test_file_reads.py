"""Where rows of a .npy are read: from the disk without growing, from memory once all of them are there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import rowferry as rf
from rowferry.stores import MemmapStore, _ring, create_store, open_store
from rowferry.stores._file_reads import FileReads
from rowferry.stores.testing import bits, random_bits, write_npy_file

ROWS = 1 << 16  # of 1 KiB: 64 MiB, 16,385 pages


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that hold their own number, durable."""
    path = tmp_path_factory.mktemp("rows") / "x.npy"
    with create_store(path, (ROWS, 256), torch.float32) as store:
        store.scatter(slice(None), torch.arange(float(ROWS)).unsqueeze(1).expand(-1, 256))
        store.flush(sync=True)
    return path


def drop(path: Path) -> None:
    """Drop the file's pages from memory."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def reads_of(store: MemmapStore) -> FileReads:
    assert store._rows is not None
    assert store._rows._reads is not None
    return store._rows._reads


def resident_file_bytes() -> int:
    """Bytes of mapped files that count as this process's memory."""
    return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) * 1024


def random_rows(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, ROWS, count)


def test_rows_that_were_on_the_disk_are_right_and_map_nothing(path: Path) -> None:
    drop(path)
    with MemmapStore(path, cache="drop") as store:
        store.gather([0])
        before = resident_file_bytes()
        for seed in range(8):
            rows = random_rows(4000, seed)
            assert torch.equal(store.gather(rows)[:, 255], torch.from_numpy(rows).float())
        assert torch.equal(store.gather(range(100, 40_000))[:, 0], torch.arange(100.0, 40_000.0))
        assert store.from_disk()
        assert resident_file_bytes() - before < 4 << 20


def test_with_cache_drop_the_pages_are_given_up_and_with_keep_they_stay(path: Path) -> None:
    for cache in ("drop", "keep"):
        drop(path)
        with MemmapStore(path, cache=cache) as store:
            store.gather(range(ROWS // 2))
            assert reads_of(store).resident(16, np.arange(ROWS // 2)) == (cache == "keep")


def test_a_file_that_is_all_in_memory_is_mapped_after_a_while_and_read_there(path: Path) -> None:
    path.read_bytes()
    with MemmapStore(path) as store:
        reads = reads_of(store)
        for seed in range(5):
            rows = random_rows(4000, seed)
            assert torch.equal(store.gather(rows)[:, 7], torch.from_numpy(rows).float())
            assert not store.from_disk()
        assert reads.in_memory


def test_a_file_that_is_driven_out_of_memory_is_read_from_the_disk_again(path: Path) -> None:
    path.read_bytes()
    with MemmapStore(path) as store:
        reads = reads_of(store)
        while not reads.in_memory:
            store.gather(random_rows(4000, 0))
        reads._mapped.madvise(21)  # MADV_PAGEOUT, as the kernel does when memory is short
        rows = random_rows(4000, 1)
        assert torch.equal(store.gather(rows)[:, 7], torch.from_numpy(rows).float())
        assert not reads.in_memory
        assert store.from_disk()
        assert torch.equal(store.gather(rows)[:, 9], torch.from_numpy(rows).float())


def test_runs_of_rows_to_come_are_asked_for_and_none_of_a_file_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    path.read_bytes()
    with MemmapStore(path) as store, open_store(path, select=np.s_[:7]) as part:
        monkeypatch.setattr(os, "posix_fadvise", lambda _, *place: asked.append(place))
        some = np.array([5, 6, 7, 100, 9, 10])
        store.expect(some)
        part.expect(some)
        assert not part.from_disk()  # it is gathered from the mapping, which tells nobody
        store.expect(np.arange(0, 64, 2))  # more runs than are worth a call each
        store.expect(np.empty(0, np.int64))
        start = store.header.offset
        runs = [(start + first * 1024, count * 1024, os.POSIX_FADV_WILLNEED) for first, count in ((5, 3), (100, 1), (9, 2))]
        assert asked == [*runs, *runs]
        while not reads_of(store).in_memory:
            store.gather(random_rows(4000, 0))
        del asked[:]
        store.expect(some)
        assert not asked


def test_a_file_half_of_which_is_in_memory_is_not_mapped(path: Path) -> None:
    drop(path)
    with path.open("rb") as file:
        file.read(32 << 20)
    with MemmapStore(path) as store:
        for seed in range(8):
            store.gather(random_rows(4000, seed) // 2)
        assert not reads_of(store).in_memory


def test_without_io_uring_the_same_rows_come(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ring, "available", lambda: False)
    drop(path)
    rows = random_rows(3000, 3)
    with MemmapStore(path) as store:
        assert torch.equal(store.gather(rows)[:, 7], torch.from_numpy(rows).float())
    values = random_bits((700, 70), torch.float64)
    foreign = write_npy_file(tmp_path / "x.npy", values, big_endian=True, offset=131)
    with MemmapStore(foreign, "r+") as store:
        odd = list(range(0, 700, 2))
        assert bits(store.gather(odd)) == bits(values[odd])
        assert bits(store.gather([5, 6])) == bits(values[[5, 6]])


@pytest.mark.parametrize("big_endian", [False, True])
def test_scattered_and_wide_rows_in_any_byte_order_are_right(tmp_path: Path, big_endian: bool) -> None:
    values = random_bits((40, 70_000), torch.float64)
    path = write_npy_file(tmp_path / "x.npy", values, big_endian=big_endian, offset=131)
    rows = [*range(39, 0, -2), 3, 3, *range(10)]
    with MemmapStore(path) as store:
        assert bits(store.gather(rows)) == bits(values[rows])


def test_scattered_rows_of_a_file_that_was_cut_off_are_an_error_and_no_crash(tmp_path: Path) -> None:
    path = write_npy_file(tmp_path / "x.npy", random_bits((1000, 100), torch.float32))
    with MemmapStore(path, "r+") as store:
        rows = list(range(0, 1000, 3))
        store.gather(rows)
        os.truncate(path, 200_000)
        with pytest.raises(OSError, match="cut off at byte 200,000"):
            store.gather(rows)
        with pytest.raises(OSError, match="cut off at byte 200,000"):
            store.scatter(rows, torch.zeros(len(rows), 100))
        assert store.gather([0, 2, 4]).shape == (3, 100)


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = write_npy_file(tmp_path / "x.npy", torch.zeros(1000, 100))
    with MemmapStore(path) as store:
        os.replace(write_npy_file(tmp_path / "y.npy", torch.ones(1000, 100)), path)
        assert store.gather(range(0, 1000, 3)).sum() == 0
    with MemmapStore(path) as store:
        assert store.gather([3]).sum() == 100


def test_rows_written_where_nothing_is_in_memory_are_right(path: Path) -> None:
    drop(path)
    rows = np.unique(random_rows(2000, 5))
    with MemmapStore(path, "r+") as store:
        store.scatter(rows, -torch.from_numpy(rows).float().unsqueeze(1).expand(-1, 256))
        assert torch.equal(store.gather(rows)[:, 3], -torch.from_numpy(rows).float())
        around = (rows + 1)[~np.isin(rows + 1, rows) & (rows + 1 < ROWS)]
        assert torch.equal(store.gather(around)[:, 3], torch.from_numpy(around).float())
        store.scatter(rows, torch.from_numpy(rows).float().unsqueeze(1).expand(-1, 256))
        store.flush(sync=True)


def test_rows_of_a_new_large_file_begin_at_a_page(path: Path) -> None:
    with MemmapStore(path) as store:
        assert store.header.offset == 4096
    assert np.load(path, mmap_mode="r").shape == (ROWS, 256)


def test_cache_is_checked_and_is_of_npy(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cache is 'no'.*'keep'.*'drop'"):
        open_store(path, cache="no")  # type: ignore[arg-type]
    create_store(tmp_path / "x.zarr", (2, 2), torch.float32).close()
    with pytest.raises(ValueError, match="zarr"):
        open_store(tmp_path / "x.zarr", cache="drop")


def test_on_a_cpu_a_file_on_the_disk_is_fetched_ahead_and_one_in_memory_is_read_where_it_lies(
    path: Path, tmp_path: Path
) -> None:
    large = create_store(tmp_path / "large.npy", (ROWS + ROWS // 4, 256), torch.float32, fill=1)
    large.flush(sync=True)
    large.close()
    name = tmp_path / "large.npy"
    drop(name)
    movers = []
    for _ in range(2):
        with rf.Pipeline(name, batch_size=1000, device="cpu", staging_bytes=8 << 20) as pipe:
            assert next(iter(pipe)).data.sum() == 256_000
            movers.append(pipe.stats().mover)
        name.read_bytes()
    drop(path)
    with rf.Pipeline(path, batch_size=10, device="cpu") as pipe:  # small: read in at once
        movers.append(pipe.stats().mover)
    assert movers == ["copy", "local", "local"]
