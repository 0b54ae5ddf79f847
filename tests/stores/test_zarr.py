"""Reading a zarr array: every layout gives the right rows, in one call, and what cannot be rows is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.abc import Codec
from numpy.typing import NDArray
from zarr.codecs import TransposeCodec
from zarr.storage import MemoryStore

from rowferry.stores import ZarrStore

SHUFFLED = [9, 3, 4, 8, 3, 0, 9]


class CountingCodec(Codec):  # type: ignore[misc]
    """Leaves bytes as they are, and counts the chunks that were decoded."""

    codec_id = "rowferry_counting"
    decoded = 0

    def encode(self, buf: Any) -> bytes:
        return bytes(numcodecs.compat.ensure_bytes(buf))

    def decode(self, buf: Any, out: Any = None) -> Any:
        type(self).decoded += 1
        return numcodecs.compat.ndarray_copy(buf, out) if out is not None else buf


@pytest.fixture
def counting() -> Iterator[type[CountingCodec]]:
    numcodecs.register_codec(CountingCodec)
    CountingCodec.decoded = 0
    yield CountingCodec
    numcodecs.registry.codec_registry.pop(CountingCodec.codec_id)


def values(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return (np.arange(int(np.prod(shape))) * 7 % 113).reshape(shape).astype(dtype)


def put(path: Path, data: NDArray[Any], **layout: Any) -> Path:
    layout = {"zarr_format": 3, "compressors": None, **layout}
    array = zarr.create_array(path, shape=data.shape, dtype=data.dtype, **layout)
    if data.size:
        array[...] = data
    return path


V2, V3 = {"zarr_format": 2}, {"zarr_format": 3}
LAYOUTS = {
    "v2": V2 | {"chunks": (4, 2)},
    "v2 in Fortran order": V2 | {"chunks": (4, 3), "order": "F"},
    "v2 with nested keys": V2 | {"chunks": (4, 2), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2 compressed": V2 | {"chunks": (3, 3), "compressors": numcodecs.Zstd()},
    "v2 filtered": V2 | {"chunks": (3, 3), "filters": [numcodecs.Shuffle(4)]},
    "v3": V3 | {"chunks": (4, 2)},
    "v3 transposed": V3 | {"chunks": (4, 3), "filters": [TransposeCodec(order=(1, 0))]},
    "v3 with keys of v2": V3 | {"chunks": (4, 2), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v3 compressed": V3 | {"chunks": (4, 3), "compressors": "auto"},
    "v3 sharded": V3 | {"chunks": (2, 3), "shards": (4, 3)},
    "v3 sharded along a row too": V3 | {"chunks": (2, 1), "shards": (4, 2), "compressors": "auto"},
    "one chunk": V3 | {"chunks": (10, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_every_layout_gives_the_rows_in_the_order_asked_for(tmp_path: Path, layout: dict[str, Any], dtype: str) -> None:
    data = values((10, 3), dtype)
    with ZarrStore(put(tmp_path / "a.zarr", data, **layout)) as store:
        assert store.shape == (10, 3)
        assert store.dtype == torch.float32
        assert not store.writable
        assert store.memory is None
        for index in (SHUFFLED, [5], range(10), range(2, 9), [[1, 8], [8, 0]], np.arange(10) % 2 == 0, []):
            assert np.array_equal(store.gather(index).numpy(), data[np.asarray(index, dtype=None if len(index) else int)])


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", ">i2", "u2", "u4", ">i8", "u8", "f2", ">f8", "c8", ">c16"])
def test_every_number_type_comes_in_native_byte_order(tmp_path: Path, dtype: str) -> None:
    data = values((10, 3), dtype)
    store = ZarrStore(put(tmp_path / "a.zarr", data, zarr_format=2, chunks=(4, 3)))
    rows = store.gather(SHUFFLED)
    assert np.array_equal(rows.numpy(), data[SHUFFLED])
    assert rows.numpy().dtype.isnative


@pytest.mark.parametrize("shape", [(7,), (7, 2), (7, 2, 3, 1), (0, 8), (0,), (5, 0), (5, 0, 3)])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_any_rank_and_empty_axes_work(tmp_path: Path, shape: tuple[int, ...], zarr_format: int) -> None:
    data = values(shape, "f4")
    store = ZarrStore(put(tmp_path / "a.zarr", data, zarr_format=zarr_format, chunks=tuple(min(2, max(n, 1)) for n in shape)))
    assert len(store) == shape[0]
    assert np.array_equal(store.gather(range(shape[0])).numpy(), data)
    assert store.gather([]).shape == (0, *shape[1:])


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_rows_of_any_chunking_equal_numpys(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="shape"))
    chunks = tuple(data.draw(st.integers(1, n), label="chunk") for n in shape)
    shards = (
        tuple(c * data.draw(st.integers(1, 3), label="chunks in shard") for c in chunks) if data.draw(st.booleans()) else None
    )
    content = values(shape, "i4")
    array = zarr.create_array(MemoryStore(), shape=shape, dtype="i4", chunks=chunks, shards=shards, fill_value=-1)
    array[...] = content
    index = data.draw(st.lists(st.integers(-shape[0], shape[0] - 1), max_size=20), label="index")
    assert np.array_equal(ZarrStore(array).gather(index).numpy(), content[np.asarray(index, int)])


def test_a_missing_chunk_reads_as_fill_value_and_is_an_error_when_strict(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zarr", values((8, 3), "f4"), chunks=(2, 3), fill_value=5)
    (path / "c/2/0").unlink()
    rows = ZarrStore(path).gather([4, 5, 6])
    assert (rows[:2] == 5).all()
    assert np.array_equal(rows[2].numpy(), values((8, 3), "f4")[6])
    strict = ZarrStore(path, strict=True)
    assert strict.gather([0, 7]).shape == (2, 3)
    with pytest.raises(FileNotFoundError, match="c/2/0"):
        strict.gather([0, 5])


def test_a_missing_chunk_without_fill_value_reads_as_zeros_every_time(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zarr", values((8, 3), "f4") + 1, zarr_format=2, chunks=(2, 3), fill_value=None)
    (path / "1.0").unlink()
    store = ZarrStore(path)
    for _ in range(3):
        assert not store.gather([2, 3]).any()


def test_each_chunk_is_decoded_once_a_request_and_the_order_kept(tmp_path: Path, counting: type[CountingCodec]) -> None:
    data = values((1000, 2), "f4")
    path = put(tmp_path / "a.zarr", data, zarr_format=2, chunks=(100, 2), compressors=counting())
    store = ZarrStore(path, cache_bytes=0)
    rows = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(store.gather(rows).numpy(), data[rows])
    assert counting.decoded == 10
    store.gather([150, 950, 150, 199])
    assert counting.decoded == 12


def test_few_rows_of_a_billion_chunks_take_little_memory(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(10**9, 2), dtype="f4", chunks=(1, 2), fill_value=3)
    store = ZarrStore(tmp_path / "a.zarr")
    tracemalloc.start()
    try:
        assert (store.gather([10**9 - 1, 0, 123_456_789, 5, 77]) == 3).all()
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stored", ["uint16", "int16", ">u2", "V2"])
def test_two_byte_elements_are_bfloat16_on_request(tmp_path: Path, stored: str) -> None:
    exact = torch.randn(6, 3).to(torch.bfloat16)
    bits = exact.view(torch.int16).numpy()
    bits = bits.view(stored) if stored == "V2" else bits.astype(stored)
    path = put(tmp_path / "a.zarr", bits, zarr_format=2, chunks=(2, 3))
    store = ZarrStore(path, dtype=torch.bfloat16)
    assert store.dtype == torch.bfloat16
    assert torch.equal(store.gather([5, 0, 5]), exact[[5, 0, 5]])


def test_chunk_rows_is_what_is_decoded_or_replaced_together(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zarr", values((10, 3), "f4"), chunks=(2, 3), shards=(4, 3))
    assert (ZarrStore(path).chunk_rows, ZarrStore(path).block_rows) == (1, 2)
    with ZarrStore(path, "r+") as store:
        assert (store.chunk_rows, store.block_rows) == (4, 2)
    packed = put(tmp_path / "b.zarr", values((10, 3), "f4"), chunks=(2, 3), shards=(4, 3), compressors="auto")
    assert ZarrStore(packed).chunk_rows == 2
