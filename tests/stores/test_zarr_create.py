"""Creating a zarr array: its layout, its fill, what is refused, and the disk space that it holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rowferry.stores import ZarrStore
from rowferry.stores._zarr_create import create_zarr


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex64]
)
@pytest.mark.parametrize("compressor", [None, "zstd", "blosc"])
def test_a_created_array_opens_with_its_dtype_and_reads_as_fill(tmp_path: Path, dtype: torch.dtype, compressor: Any) -> None:
    with create_zarr(tmp_path / "a.zarr", (np.int64(5), 3), dtype, fill=1, compressor=compressor) as store:
        assert store.writable
        assert store.dtype == dtype
        assert store.describe()["compressor"] == ([compressor] if compressor else [])
        store.scatter([4], torch.zeros(1, 3, dtype=dtype))
    fresh = ZarrStore(tmp_path / "a.zarr")
    assert fresh.dtype == dtype
    assert fresh.gather(range(5)).to(torch.complex64).real[:, 0].tolist() == [1, 1, 1, 1, 0]


def test_the_layout_is_made_for_random_rows(tmp_path: Path) -> None:
    wide = create_zarr(tmp_path / "a.zarr", (10**6, 128), torch.float32, compressor="zstd")
    assert (wide.describe()["chunks"], wide.describe()["shards"]) == ([128, 128], [131072, 128])
    plain = create_zarr(tmp_path / "b.zarr", (1000, 128), torch.float32, shards=False)
    assert (plain.describe()["chunks"], plain.describe()["shards"], plain.chunk_rows) == ([128, 128], None, 128)
    own = create_zarr(tmp_path / "c.zarr", (1000, 4, 6), torch.float32, chunks=(10, 2, 6), shards=50)
    assert (own.describe()["chunks"], own.describe()["shards"], own.chunk_rows) == ([10, 2, 6], [50, 4, 6], 50)
    empty = create_zarr(tmp_path / "d.zarr", (0, 8), torch.float32)
    assert empty.gather([]).shape == (0, 8)


def test_a_bad_creation_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    with pytest.raises(ValueError, match="shape is"):
        create_zarr(path, (), torch.float32)
    with pytest.raises(ValueError, match=r"shards of \(7, 4\) are not whole chunks of \(2, 4\)"):
        create_zarr(path, (10, 4), torch.float32, chunks=2, shards=7)
    with pytest.raises(ValueError, match="chunks is 0"):
        create_zarr(path, (10, 4), torch.float32, chunks=0)
    with pytest.raises(ValueError, match="compressor is 'lz4'"):
        create_zarr(path, (10, 4), torch.float32, compressor="lz4")  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes of disk .*; [\d,]+ are free"):
        create_zarr(path, (10**9, 10**6), torch.float32)
    assert not os.listdir(tmp_path)
    create_zarr(path, (10, 4), torch.float32).close()
    with pytest.raises(FileExistsError, match=r"a\.zarr exists"):
        create_zarr(path, (10, 4), torch.float32)


@pytest.mark.parametrize("shards", [False, 64])
def test_the_space_of_raw_chunks_is_held_until_they_are_written(tmp_path: Path, shards: Any) -> None:
    with create_zarr(tmp_path / "a.zarr", (256, 1024), torch.float32, chunks=16, shards=shards) as store:
        lock = tmp_path / "a.zarr/.rowferry.lock"
        chunk = 64 * 4096 + 4 * 16 + 4 if shards else 16 * 4096
        chunks = 4 if shards else 16
        assert lock.stat().st_blocks * 512 >= chunks * chunk
        store.scatter([3, 7], torch.ones(2, 1024))
        assert lock.stat().st_size == 64 + (chunks - 1) * chunk
        assert [file.stat().st_size for file in (tmp_path / "a.zarr/c").rglob("*") if file.is_file()] == [chunk]
        store.scatter([5], torch.ones(1, 1024))
        assert lock.stat().st_size == 64 + (chunks - 1) * chunk
        store.scatter(range(256), torch.ones(256, 1024))
        assert lock.stat().st_size == 64
    assert not lock.exists()
    with ZarrStore(tmp_path / "a.zarr", "r+"):
        assert lock.stat().st_size == 64
