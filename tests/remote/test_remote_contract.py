"""Stores behind URLs keep the contract, over HTTP and from S3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rowferry.stores import RemoteStore, Store, ZarrStore, open_store
from rowferry.stores._zarr_create import create_zarr
from rowferry.stores.testing import SAFETENSORS_NAMES, ReadOnlyContract, write_npy_file, write_safetensors_file

Publish = Callable[[Path], str]


class TestNpyOverHttp(ReadOnlyContract):
    big_endian = False
    offset: int | None = None

    @pytest.fixture(autouse=True)
    def _published(self, over_http: Publish) -> None:
        self.publish = over_http

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        path = write_npy_file(folder / "rows.npy", values, big_endian=self.big_endian, offset=self.offset)
        store = open_store(self.publish(path), dtype=values.dtype)
        assert isinstance(store, RemoteStore)
        return store


class TestNpyOverHttpBigEndianUnaligned(TestNpyOverHttp):
    big_endian = True
    offset = 131


class TestNpyFromS3(TestNpyOverHttp):
    @pytest.fixture(autouse=True)
    def _published(self, over_s3: Publish) -> None:
        self.publish = over_s3


class TestSafetensorsOverHttp(ReadOnlyContract):
    dtypes = tuple(SAFETENSORS_NAMES)

    @pytest.fixture(autouse=True)
    def _published(self, over_http: Publish) -> None:
        self.publish = over_http

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        tensors = {"before": torch.zeros(3, dtype=torch.uint8), "rows": values}
        path = write_safetensors_file(folder / "model.safetensors", tensors)
        store = open_store(self.publish(path), array="rows")
        assert isinstance(store, RemoteStore)
        return store


class TestZarrInChunksOverHttp(ReadOnlyContract):
    shards: int | Literal[False] = False
    compressor: Literal["zstd"] | None = None

    @pytest.fixture(autouse=True)
    def _published(self, over_http: Publish) -> None:
        self.publish = over_http

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        rows = max(len(values) // 3, 1)
        layout: dict[str, Any] = {"chunks": rows, "shards": self.shards and 2 * rows, "compressor": self.compressor}
        with create_zarr(folder / "rows.zarr", tuple(values.shape), values.dtype, **layout) as local:
            local.scatter(slice(None), values)
        store = open_store(self.publish(folder / "rows.zarr"), dtype=values.dtype)
        assert isinstance(store, ZarrStore)
        assert store.remote
        assert (store.chunk_rows == 1) == (self.compressor is None) or not values.numel() or rows == 1
        return store


class TestZarrInShardsOverHttp(TestZarrInChunksOverHttp):
    shards = 1


class TestZarrInShardsFromS3(TestZarrInShardsOverHttp):
    @pytest.fixture(autouse=True)
    def _published(self, over_s3: Publish) -> None:
        self.publish = over_s3


class TestCompressedZarrFromS3(TestZarrInShardsFromS3):
    compressor = "zstd"
    dtypes = (torch.float32, torch.bfloat16)
