"""How rows of zarr are read: any layout equals what zarr reads, by byte ranges or decoded; caches stay bounded and right."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.storage import ZipStore

from rowferry.stores import ZarrStore, _zarr_files, _zarr_runs
from rowferry.stores._zarr_decoded import ChunkCache

DATA = np.arange(40 * 6, dtype="f4").reshape(40, 6)
RAW: dict[str, Any] = {"chunks": (4, 6), "compressors": None}
SHARDED: dict[str, Any] = {"chunks": (4, 6), "shards": (20, 6), "compressors": None}


def put(home: Any, data: NDArray[Any] = DATA, **layout: Any) -> Any:
    zarr.create_array(home, shape=data.shape, dtype=data.dtype, **layout)[...] = data
    return home


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> dict[str, Any]:
    """Chunks, shards, codecs, order and fill value of an array of this shape."""
    chunks = tuple(draw(st.integers(1, n + 1)) for n in shape)
    fill = draw(st.sampled_from([0, 7]))
    if draw(st.booleans()):
        packed = draw(st.sampled_from([None, numcodecs.Zlib(1)]))
        order = draw(st.sampled_from("CF"))
        return {"zarr_format": 2, "chunks": chunks, "compressors": packed, "order": order, "fill_value": fill}
    axes = draw(st.permutations(range(len(shape))))
    before = [TransposeCodec(order=tuple(axes))] if draw(st.booleans()) else []
    after: list[Any] = draw(st.sampled_from([[], [], [Crc32cCodec()], [GzipCodec(level=1)], [ZstdCodec()]]))
    to_bytes = BytesCodec(endian=draw(st.sampled_from(["little", "big"])))
    layout = {"chunks": chunks, "filters": before, "serializer": to_bytes, "compressors": after, "fill_value": fill}
    if draw(st.booleans()):
        location = draw(st.sampled_from(["start", "end"]))
        index: list[Any] = [BytesCodec(), Crc32cCodec()] if draw(st.booleans()) else [BytesCodec()]
        shard = tuple(n * draw(st.integers(1, 3)) for n in chunks)
        codecs = [*before, to_bytes, *after]
        sharding = ShardingCodec(chunk_shape=chunks, codecs=codecs, index_codecs=index, index_location=location)
        layout |= {"chunks": shard, "filters": [], "serializer": sharding, "compressors": None}
    return layout


@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_of_any_layout_equal_zarrs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="shape"))
    layout = data.draw(layouts(shape), label="layout")
    dtype = data.draw(st.sampled_from(["i4", ">f8", "u1", "f2"]), label="dtype")
    path = tmp_path_factory.mktemp("any") / ("a.zip" if data.draw(st.booleans(), label="zip") else "a.zarr")
    home = ZipStore(path, mode="w") if path.suffix == ".zip" else path
    array = zarr.create_array(home, shape=shape, dtype=dtype, **layout)
    full = data.draw(st.integers(0, shape[0]), label="rows written")  # chunks after them do not exist
    if full:
        array[:full] = (np.arange(np.prod(shape)) % 100 + 1).reshape(shape)[:full]
    content = np.asarray(array[...])
    if isinstance(home, ZipStore):
        home.close()
    select: Any = tuple(
        data.draw(st.sampled_from([slice(None), slice(1, None), slice(0, 1), 0]), label="part") for _ in shape[1:]
    )
    index = np.asarray(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=20), label="index"), int)
    decoder: Any = data.draw(st.sampled_from(["auto", "zarr"]), label="decoder")
    runs = data.draw(st.sampled_from([1, _zarr_runs.LEAST_BYTES]), label="bytes of a run that is read by a call")
    with (
        pytest.MonkeyPatch.context() as patch,
        ZarrStore(path, select=select, decoder=decoder, cache_bytes=data.draw(st.sampled_from([0, 1 << 20]))) as store,
    ):
        patch.setattr(_zarr_runs, "LEAST_BYTES", runs)
        for _ in range(2):  # the second time from whatever was kept
            assert np.array_equal(store.gather(index).numpy(), content[(slice(None), *select)][index])


# ---- byte ranges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [RAW, SHARDED], ids=["chunks", "shards"])
def test_more_files_than_may_be_mapped_are_read_in_turn(
    tmp_path: Path, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_zarr_files, "MOST_FILES", 2)
    data = np.arange(4000 * 6, dtype="f4").reshape(4000, 6)
    store = ZarrStore(put(tmp_path / "a.zarr", data, **layout))

    def right(seed: int) -> bool:
        rows = np.random.default_rng(seed).integers(0, 4000, 300)
        return np.array_equal(store.gather(rows).numpy(), data[rows])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(8)))


@pytest.mark.parametrize("layout", [RAW, SHARDED], ids=["chunks", "shards"])
def test_a_file_that_was_cut_off_is_an_error_that_names_it(tmp_path: Path, layout: dict[str, Any]) -> None:
    store = ZarrStore(put(tmp_path / "a.zarr", **layout))
    os.truncate(tmp_path / "a.zarr/c/1/0", 50)
    assert np.array_equal(store.gather([2]).numpy(), DATA[[2]])
    with pytest.raises(OSError, match=r"c/1/0.*(cut off|broken)") as failure:
        store.gather([0, layout.get("shards", layout["chunks"])[0]])
    assert any("2 rows from 0" in note for note in failure.value.__notes__)


def test_a_shard_with_a_damaged_index_is_never_read(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zarr", **SHARDED)
    with open(path / "c/0/0", "r+b") as shard:
        shard.seek(-30, os.SEEK_END)
        shard.write(b"\x01")
    with pytest.raises(OSError, match=r"c/0/0.*checksum"):
        ZarrStore(path).gather([0])


def test_without_a_checksum_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    sharding = ShardingCodec(chunk_shape=(4, 6), codecs=[BytesCodec()], index_codecs=[BytesCodec()])
    path = put(tmp_path / "a.zarr", chunks=(20, 6), serializer=sharding, compressors=None, filters=[])
    with open(path / "c/0/0", "r+b") as shard:
        shard.seek(-16, os.SEEK_END)
        shard.write((1 << 40).to_bytes(8, "little"))
    with pytest.raises(OSError, match=r"c/0/0.*not inside"):
        ZarrStore(path).gather([0])


def test_a_shard_whose_chunks_lie_anywhere_is_read_all_the_same(tmp_path: Path) -> None:
    """As other programs may write them: in another order, with gaps that are no whole rows."""
    sharding = ShardingCodec(chunk_shape=(4, 6), codecs=[BytesCodec()], index_codecs=[BytesCodec()])
    path = put(tmp_path / "a.zarr", chunks=(8, 6), serializer=sharding, compressors=None, filters=[])
    for shard in sorted((path / "c").glob("*/0")):
        body = shard.read_bytes()
        first, second = body[:96], body[96:192]
        index = np.array([110, 96, 7, 96], "<u8").tobytes()
        shard.write_bytes(b"-" * 7 + second + b"-" * 7 + first + b"-" * 3 + index)
    with ZarrStore(path) as store:
        rows = [39, 0, 5, 22, 5]
        assert np.array_equal(store.gather(rows).numpy(), DATA[rows])


def test_only_the_pages_of_the_rows_come_from_the_disk(tmp_path: Path) -> None:
    data = np.ones((64_000, 64), "f4")  # 16 MB
    path = put(tmp_path / "a.zarr", data, chunks=(64, 64), shards=(64_000, 64), compressors=None)
    shard = path / "c/0/0"
    with open(shard, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(shard):
        pytest.skip("this file system keeps its files in memory")
    with ZarrStore(path) as store:
        store.gather(range(0, 64_000, 1000))
    assert 64 <= resident_pages(shard) <= 64 + 32  # and the index


def resident_pages(path: Path) -> int:
    import ctypes
    import mmap

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found, here = (ctypes.c_uint8 * pages)(), ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(here)), ctypes.c_size_t(len(mapped)), found) == 0
        del here
        return sum(each & 1 for each in found)


def test_members_of_a_zip_that_are_packed_are_decoded_by_zarr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ZipStore(tmp_path / "a.zip", mode="w", compression=zipfile.ZIP_DEFLATED) as archive:
        put(archive, **RAW)
    with caplog.at_level(logging.INFO, "rowferry"), ZarrStore(tmp_path / "a.zip") as store:
        assert np.array_equal(store.gather([39, 0, 5]).numpy(), DATA[[39, 0, 5]])
    assert "is compressed" in caplog.text


# ---- decoding -------------------------------------------------------------------------------------------------------


def test_decoded_chunks_are_kept_within_their_bytes() -> None:
    cache, chunk = ChunkCache(1000), np.zeros(100, "f4")
    for number in range(5):
        cache.put(number, chunk, cache.generation)
        assert cache.get(0) is not None or number > 1
    assert cache.nbytes == 800
    assert [number for number in range(5) if cache.get(number) is not None] == [0, 4]
    before = cache.generation
    cache.drop([4])
    cache.put(4, chunk, before)  # read before it was dropped
    assert cache.get(4) is None
    cache.put(9, np.zeros(1000), cache.generation)
    assert cache.nbytes <= 1000
    cache.drop(None)
    assert cache.nbytes == 0


def test_what_tensorstore_cannot_read_is_decoded_by_zarr_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path / "a.zarr", zarr_format=2, chunks=(4, 6), compressors=numcodecs.LZMA())
    with caplog.at_level(logging.INFO, "rowferry"), ZarrStore(path) as store:
        assert np.array_equal(store.gather([39, 0, 5]).numpy(), DATA[[39, 0, 5]])
    assert "decoded by zarr" in caplog.text
    with pytest.raises(ValueError, match="tensorstore cannot read"):
        ZarrStore(path, decoder="tensorstore")
    with pytest.raises(ValueError, match="decoder is 'turbo'"):
        ZarrStore(path, decoder="turbo")  # type: ignore[arg-type]


def test_without_tensorstore_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.zarr", chunks=(4, 6))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rowferry\[tensorstore\]"):
        ZarrStore(path, decoder="tensorstore")
    with ZarrStore(path) as store:
        assert np.array_equal(store.gather([39, 0, 5]).numpy(), DATA[[39, 0, 5]])


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_bfloat16_as_tensorstore_writes_it_is_read_and_written(tmp_path: Path, compressors: Any) -> None:
    ts = pytest.importorskip("tensorstore")
    codecs = ["bytes"] if compressors is None else ["bytes", "zstd"]
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/a.zarr/"},
        "metadata": {
            "shape": [10, 3],
            "data_type": "bfloat16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 3]}},
            "codecs": [{"name": name} for name in codecs],
            "fill_value": 1.5,
        },
    }
    exact = torch.randn(8, 3).to(torch.bfloat16)
    opened = ts.open(spec, create=True).result()
    opened[:8] = exact.view(torch.int16).numpy().view(opened.dtype.numpy_dtype)
    with ZarrStore(tmp_path / "a.zarr", "r+") as store:
        assert store.dtype == torch.bfloat16
        assert torch.equal(store.gather([7, 0, 7]), exact[[7, 0, 7]])
        assert torch.equal(store.gather([9]), torch.full((1, 3), 1.5, dtype=torch.bfloat16)) or compressors is None
        store.scatter([9], exact[:1])
        assert torch.equal(store.gather([9]), exact[:1])
    again = ts.open({**spec, "open": True, "recheck_cached_data": True}).result()
    assert again[9].read().result().tobytes() == exact[0].view(torch.int16).numpy().tobytes()


# ---- files that change ----------------------------------------------------------------------------------------------

LAYOUTS = [RAW, SHARDED, {"chunks": (4, 6)}, {"chunks": (4, 6), "shards": (20, 6)}]


@pytest.mark.parametrize("decoder", ["auto", "zarr"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["raw", "raw shards", "packed", "packed shards"])
def test_an_open_reader_sees_what_a_writer_has_written(tmp_path: Path, layout: dict[str, Any], decoder: Any) -> None:
    reader = ZarrStore(put(tmp_path / "a.zarr", **layout), decoder=decoder)
    assert np.array_equal(reader.gather(range(40)).numpy(), DATA)
    with ZarrStore(tmp_path / "a.zarr", "r+", decoder=decoder) as writer:
        for value in (1.0, 2.0):
            writer.scatter([3, 30], torch.full((2, 6), value))
            assert (writer.gather([30, 3]) == value).all()
            assert (reader.gather([30, 3]) == value).all()
        writer.scatter([3], torch.full((1, 6), 5.0))
    assert (reader.gather([3]) == 5).all()
    assert np.array_equal(reader.gather([4]).numpy(), DATA[[4]])


def test_an_open_reader_sees_what_another_process_has_written(tmp_path: Path) -> None:
    reader = ZarrStore(put(tmp_path / "a.zarr", **SHARDED))
    reader.gather(range(40))
    code = "import sys, torch\nfrom rowferry.stores import ZarrStore\n"
    code += "with ZarrStore(sys.argv[1], 'r+') as store: store.scatter([3], torch.full((1, 6), 9.0))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.zarr")], env=env, check=True, timeout=60)
    assert (reader.gather([3]) == 9).all()


def test_a_chunk_that_is_replaced_while_it_is_mapped_is_read_whole_old_or_new(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zarr", **RAW)
    with ZarrStore(path) as store:
        store.gather([0])
        (tmp_path / "new").write_bytes(np.full((4, 6), 8, "f4").tobytes())
        os.replace(tmp_path / "new", path / "c/0/0")
        rows = store.gather([0, 1]).numpy()
        assert np.array_equal(rows, DATA[:2]) or (rows == 8).all()
    assert (ZarrStore(path).gather([0]) == 8).all()
