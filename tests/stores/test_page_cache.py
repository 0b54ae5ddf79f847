"""Files page-locked where they lie in the page cache: when it is done, what it shares, and when it ends."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rowferry.stores import MemmapStore, _page_cache
from rowferry.stores._page_cache import PageCache
from rowferry.stores._pinning import available_memory

ROWS = 4_096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """16 MiB of random rows, written through to the disk."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((ROWS, 1_024), np.float32))
    with open(tmp_path / "rows.npy", "rb+") as file:
        os.fsync(file.fileno())
    return tmp_path / "rows.npy"


def cache_of(store: MemmapStore) -> PageCache:
    assert store.page_cache is not None
    return store.page_cache


def forget(path: Path, start: int = 0, length: int = 0) -> None:
    """Ask the kernel to drop a part of the file from memory."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_only_a_file_that_is_read_as_it_lies_can_be_locked(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "foreign.npy", np.arange(6, dtype=">f4").reshape(3, 2))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.arange(6.0).reshape(3, 2)))
    np.save(tmp_path / "empty.npy", np.empty((0, 3)))
    with MemmapStore(path) as store:
        assert cache_of(store).nbytes == path.stat().st_size
    assert store.page_cache is None
    for name in ("foreign", "fortran", "empty"):
        with MemmapStore(tmp_path / f"{name}.npy") as store:
            assert store.page_cache is None
    with MemmapStore(path, "r+") as store:
        assert store.page_cache is None


def test_the_share_in_memory_is_what_was_read(path: Path) -> None:
    with MemmapStore(path) as store:
        store.gather(range(ROWS))
        assert cache_of(store).resident() == 1.0


def test_a_share_that_was_dropped_is_seen(path: Path) -> None:
    size = path.stat().st_size
    with MemmapStore(path) as store:
        store.gather(range(ROWS))
    forget(path, 0, size // 2)
    with MemmapStore(path) as store:
        share = cache_of(store).resident()
    if share == 1.0:
        pytest.skip("this file system keeps what it was asked to drop")
    assert share == pytest.approx(0.5, abs=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no GPU")
def test_without_cuda_a_file_is_not_locked_and_the_reason_is_told(path: Path) -> None:
    with MemmapStore(path) as store:
        assert "no CUDA" in cache_of(store).why_not(read_before=True)
        with pytest.raises(RuntimeError, match="no CUDA"):
            cache_of(store).lock()
    assert not torch.cuda.is_initialized()


def test_a_file_that_is_large_or_not_in_memory_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # nothing is locked here, only asked about
    with MemmapStore(path) as store:
        cache = cache_of(store)
        assert cache.why_not(read_before=False) == ""
        monkeypatch.setattr(_page_cache, "SMALL", 0)
        monkeypatch.setattr(_page_cache.PageCache, "resident", lambda self: 0.25)
        assert "25% of it is in memory; it is looked at again at the next epoch" in cache.why_not(read_before=True)
        monkeypatch.setattr(_page_cache.PageCache, "resident", lambda self: None)
        assert "an unknown share of it" in cache.why_not(read_before=False)
        assert cache.why_not(read_before=True) == ""
        monkeypatch.setattr(_page_cache, "available_memory", lambda: 20 << 20)
        assert cache.why_not(read_before=True).startswith("its 16,777,344 bytes are more than 50% of the 20,971,520 bytes")


class Lock:
    """Stands for the driver, which only a GPU has."""

    def __init__(self, locked: list[int], pointer: int, nbytes: int) -> None:
        self._locked, self._pointer = locked, pointer
        assert nbytes > 0
        locked.append(pointer)

    def release(self, *, wait: bool = False) -> None:
        self._locked.remove(self._pointer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stores_over_one_file_share_a_lock_that_ends_with_its_last_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(_page_cache, "can_lock", lambda: True)
    monkeypatch.setattr(_page_cache, "lock_read_only", lambda pointer, nbytes: Lock(locked, pointer, nbytes))
    bits = np.arange(30, dtype=np.uint16 if dtype == torch.bfloat16 else np.float32).reshape(10, 3)
    np.save(tmp_path / "x.npy", bits)
    wanted = dtype if dtype == torch.bfloat16 else None
    with MemmapStore(tmp_path / "x.npy", dtype=wanted) as one, MemmapStore(tmp_path / "x.npy", dtype=wanted) as other:
        first, second = cache_of(one).lock(), cache_of(other).lock()
        assert cache_of(other).why_not(read_before=False) == ""  # locked already
        assert one.memory is not None
        assert torch.equal(first.view(torch.int16), one.memory.view(torch.int16))
    assert (first.dtype, first.shape, first.data_ptr()) == (dtype, (10, 3), second.data_ptr())
    assert len(locked) == 1
    part = second[4]
    del first, second
    gc.collect()
    assert len(locked) == 1
    del part
    gc.collect()
    assert locked == []
    assert len(_page_cache._locked) == 0


def test_memory_that_is_available_is_some_of_the_machine() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


# ---- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_locked_file_is_read_by_the_gpu_and_shared_by_all_who_lock_it(path: Path) -> None:
    expected = torch.from_numpy(np.load(path))
    with MemmapStore(path) as one, MemmapStore(path) as other:
        first, second = cache_of(one).lock(), cache_of(other).lock()
        assert first.data_ptr() == second.data_ptr()
        assert first.is_pinned()
        assert torch.equal(first.cuda().cpu(), expected)
        with MemmapStore(path, "r+") as writer:
            writer.scatter([5], torch.ones(1, 1_024))
        assert bool((first[5].cuda() == 1).all())  # the file itself, not a copy
    assert torch.equal(second[7].cuda().cpu(), expected[7])  # also when the stores are closed


@pytest.mark.gpu
def test_a_lock_ends_with_the_last_tensor(path: Path) -> None:
    with MemmapStore(path) as store:
        memory = cache_of(store).lock()
        part = memory[3]
        del memory
        gc.collect()
        assert part.is_pinned()
        assert len(_page_cache._locked) == 1
        del part
        gc.collect()
        assert len(_page_cache._locked) == 0
        assert str(path) in Path("/proc/self/maps").read_text()  # the store's own mapping


@pytest.mark.gpu
def test_a_locked_file_is_not_inherited_by_a_fork(path: Path) -> None:
    with MemmapStore(path) as store:
        memory = cache_of(store).lock()
        start, here, flags = memory.data_ptr() & -mmap.PAGESIZE, False, ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(edge, 16) for edge in head.split("-"))
                here = low <= start < high
            elif here and line.startswith("VmFlags:"):
                flags = line
        assert "dc" in flags.split(), "the kernel's name for MADV_DONTFORK"
