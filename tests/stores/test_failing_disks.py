"""Disks that are full or fail while rows are written: nothing is torn, and writing goes on afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from rowferry.stores import create_store, open_store


def held(path: Path) -> list[float]:
    """The first element of each row, as a new reader sees it."""
    with open_store(path) as store:
        return store.gather(slice(None))[:, 0].tolist()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a traceback may keep a mapping alive


def test_on_a_full_disk_rows_stay_as_they_were_and_writing_goes_on_after_a_flush(small_disk: Path) -> None:
    path = small_disk / "x.npy"
    rows, old = 2000, torch.arange(2000.0).unsqueeze(1).expand(-1, 256)  # 2 MB
    with create_store(path, (rows, 256), torch.float32) as store:
        store.scatter(slice(None), old)
    with open_store(path, "r+", durability="atomic") as store:
        store.scatter(range(1000), -old[:1000])
        (small_disk / "other").write_bytes(bytes(500 << 10))
        with pytest.raises(OSError, match="No space left") as caught:
            store.scatter(range(900, 2000), -old[900:])
        assert "x.npy.undo" in caught.value.__notes__[0]
        assert torch.equal(store.gather(slice(None)), torch.cat([-old[:1000], old[1000:]]))
        store.flush()
        store.scatter(range(900, 2000), -old[900:])
    assert held(path) == [-float(row) for row in range(rows)]


def test_without_room_beside_a_file_its_rows_stay_as_they_were(small_disk: Path) -> None:
    path = small_disk / "x.npy"
    with create_store(path, (3000, 256), torch.float32) as store:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "other").write_bytes(bytes(3 << 20))
        with pytest.raises(OSError, match="No space left"):
            store.scatter([1], torch.ones(1, 256))
        assert store.gather([1]).sum() == 0
        (small_disk / "other").unlink()
        store.scatter([1], torch.ones(1, 256))
    assert held(path)[1] == 1


def test_a_flush_that_fails_commits_nothing_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "sector 37")

    path = tmp_path / "x.npy"
    store = create_store(path, (10, 4), torch.float32, durability="atomic")
    store.scatter([1], torch.full((1, 4), -1.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="sector 37"):
            store.flush()
    assert store.durable is not None
    assert store.durable.undo.dirty
    store.flush()
    del store
    assert held(path)[1] == -1


@pytest.mark.parametrize("shards", [False, 50])
def test_on_a_full_disk_each_chunk_of_a_zarr_is_old_or_new_and_writing_goes_on(
    small_disk: Path, shards: int | Literal[False]
) -> None:
    path, rows = small_disk / "x.zarr", 500
    old = torch.rand(rows, 512, generator=torch.Generator().manual_seed(0))  # 1 MB, which hardly compresses
    with create_store(path, old.shape, torch.float32, chunks=10, shards=shards, compressor="zstd") as store:
        store.scatter(slice(None), old)
    with open_store(path, "r+") as store:
        (small_disk / "other").write_bytes(bytes(2 << 20))
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "rest").write_bytes(bytes(4 << 20))
        with pytest.raises(OSError, match="No space left"):
            store.scatter(slice(None), -old)
        found = store.gather(slice(None))
        for part, before in zip(found.split(shards or 10), old.split(shards or 10), strict=True):
            assert torch.equal(part, before) or torch.equal(part, -before)
        (small_disk / "rest").unlink()
        store.scatter(slice(None), -old)
        store.flush(sync=True)
    with open_store(path) as store:
        assert torch.equal(store.gather(slice(None)), -old)
    assert not [each for each in path.rglob("*") if each.suffix == ".partial"]
