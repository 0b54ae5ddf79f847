"""Every kind of store keeps the contract."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rowferry.stores import (
    ArrayStore,
    DeviceStore,
    MemmapStore,
    PinnedStore,
    SafetensorsStore,
    Store,
    ZarrStore,
    open_store,
)
from rowferry.stores._zarr_create import create_zarr
from rowferry.stores._zarr_decoded import Decoder
from rowferry.stores.testing import (
    EVERY_DTYPE,
    SAFETENSORS_NAMES,
    FailingStore,
    OracleStore,
    ReadOnlyContract,
    SlowStore,
    StoreContract,
    write_npy_file,
    write_safetensors_file,
)

IN_NUMPY = tuple(
    dtype for dtype in EVERY_DTYPE if not (dtype.is_floating_point and dtype.itemsize < 4 and dtype != torch.float16)
)


class TestOracleStore(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return OracleStore(values)


class TestSlowStore(StoreContract):
    dtypes = (torch.float32,)

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return SlowStore(OracleStore(values))


class TestFailingStoreThatHasHealed(StoreContract):
    dtypes = (torch.float32,)

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        store = FailingStore(OracleStore(values), OSError("bad sector"), broken=True)
        store.heal()
        return store


class TestArrayStoreOfATensor(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return ArrayStore(values.clone())


class TestArrayStoreOfAStridedTensor(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        padded = torch.zeros(2 * len(values), *values.shape[1:], dtype=values.dtype)
        padded[1::2] = values
        return ArrayStore(padded[1::2])


class TestArrayStoreOfAnArray(StoreContract):
    dtypes = IN_NUMPY

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return ArrayStore(values.numpy().copy())


class TestArrayStoreOfAFortranArray(StoreContract):
    dtypes = IN_NUMPY

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return ArrayStore(np.array(values.numpy(), order="F"))


class TestArrayStoreOfForeignByteOrder(StoreContract):
    dtypes = IN_NUMPY

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        array = values.numpy()
        return ArrayStore(array.astype(array.dtype.newbyteorder("S")))


class TestArrayStoreOfReversedRows(StoreContract):
    dtypes = IN_NUMPY

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return ArrayStore(values.numpy()[::-1].copy()[::-1])


class TestArrayStoreOfAReadOnlyArray(ReadOnlyContract):
    dtypes = IN_NUMPY

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        array = values.numpy().copy()
        array.flags.writeable = False
        return ArrayStore(array)


class TestMemmapStore(StoreContract):
    fortran = False
    big_endian = False
    offset: int | None = None

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        path = folder / "rows.npy"
        write_npy_file(path, values, fortran=self.fortran, big_endian=self.big_endian, offset=self.offset)
        return MemmapStore(path, "r+", dtype=values.dtype)

    def reopen(self, store: Store, folder: Path) -> Store:
        return MemmapStore(folder / "rows.npy", dtype=store.dtype)


class TestMemmapStoreThatDropsPages(TestMemmapStore):
    dtypes = (torch.float32, torch.bfloat16)

    def reopen(self, store: Store, folder: Path) -> Store:
        return MemmapStore(folder / "rows.npy", dtype=store.dtype, cache="drop")


class TestMemmapStoreAtomic(TestMemmapStore):
    dtypes = (torch.float32, torch.bfloat16, torch.bool)

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        path = write_npy_file(folder / "rows.npy", values, offset=131)
        return MemmapStore(path, "r+", dtype=values.dtype, durability="atomic")


class TestMemmapStoreUnaligned(TestMemmapStore):
    offset = 131


class TestMemmapStoreInFortranOrder(TestMemmapStore):
    fortran = True


class TestMemmapStoreBigEndian(TestMemmapStore):
    big_endian = True


class TestMemmapStoreBigEndianUnalignedInFortranOrder(TestMemmapStore):
    big_endian = True
    fortran = True
    offset = 131


class TestMemmapStoreReadOnly(ReadOnlyContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return MemmapStore(write_npy_file(folder / "rows.npy", values), dtype=values.dtype)


class TestSafetensorsStore(ReadOnlyContract):
    dtypes = tuple(dtype for dtype in EVERY_DTYPE if dtype in SAFETENSORS_NAMES)

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return SafetensorsStore(write_safetensors_file(folder / "rows.safetensors", {"a": values[:3], "rows": values}), "rows")


class TestPinnedStore(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return PinnedStore.from_array(values)


class TestDeviceStore(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        return DeviceStore(values.clone())


class TestZarrStoreInChunks(StoreContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        rows = max(len(values) // 3, 1)
        store = create_zarr(folder / "rows.zarr", tuple(values.shape), values.dtype, chunks=rows, shards=False)
        store.scatter(slice(None), values)
        return store

    def reopen(self, store: Store, folder: Path) -> Store:
        return ZarrStore(folder / "rows.zarr", dtype=store.dtype)


class TestZarrStoreInShards(TestZarrStoreInChunks):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        rows = max(len(values) // 6, 1)
        store = create_zarr(
            folder / "rows.zarr", tuple(values.shape), values.dtype, chunks=rows, shards=3 * rows, compressor="zstd"
        )
        store.scatter(slice(None), values)
        return store


class TestZarrStoreInRawShards(TestZarrStoreInChunks):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        rows = max(len(values) // 6, 1)
        store = create_zarr(folder / "rows.zarr", tuple(values.shape), values.dtype, chunks=rows, shards=3 * rows)
        store.scatter(slice(None), values)
        return store


class TestZarrStoreReadByByteRanges(ReadOnlyContract):
    shards: int | Literal[False] = False
    compressor: Literal["zstd"] | None = None
    decoder: Decoder = "auto"

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        rows = max(len(values) // 3, 1)
        layout: dict[str, Any] = {"chunks": rows, "shards": self.shards and 2 * rows, "compressor": self.compressor}
        with create_zarr(folder / "rows.zarr", tuple(values.shape), values.dtype, **layout) as store:
            store.scatter(slice(None), values)
        return ZarrStore(folder / "rows.zarr", dtype=values.dtype, decoder=self.decoder)


class TestZarrStoreReadByByteRangesOfShards(TestZarrStoreReadByByteRanges):
    shards = 1


class TestZarrStoreDecodedByTensorStore(TestZarrStoreReadByByteRanges):
    shards = 1
    compressor = "zstd"
    decoder = "tensorstore"


class TestZarrStoreDecodedByZarr(TestZarrStoreReadByByteRanges):
    shards = 1
    compressor = "zstd"
    decoder = "zarr"


class TestZarrStoreInAZip(ReadOnlyContract):
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        with create_zarr(folder / "rows.zarr", tuple(values.shape), values.dtype, shards=False) as store:
            store.scatter(slice(None), values)
        with zipfile.ZipFile(folder / "rows.zip", "w") as archive:
            for file in sorted((folder / "rows.zarr").rglob("*")):
                archive.write(file, file.relative_to(folder / "rows.zarr"))
        return ZarrStore(folder / "rows.zip", dtype=values.dtype)


class TestPartOfTheRowsOfAFile(ReadOnlyContract):
    fortran = False

    def make(self, values: torch.Tensor, folder: Path) -> Store:
        wider = torch.stack([values.flip(0), values], dim=1)
        write_npy_file(folder / "rows.npy", wider, fortran=self.fortran)
        return open_store(folder / "rows.npy", dtype=values.dtype, select=1)


class TestPartOfTheRowsOfAFortranFile(TestPartOfTheRowsOfAFile):
    fortran = True
