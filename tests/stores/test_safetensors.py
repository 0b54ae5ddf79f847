"""Tensors of .safetensors files: which one is opened, and which files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rowferry as rf
from rowferry.stores import SafetensorsStore, open_store
from rowferry.stores._safetensors_header import header_length, parse_header
from rowferry.stores.testing import bits, random_bits, write_safetensors_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two tables and a single value."""
    tensors = {
        "model.embed": random_bits((40, 8), torch.bfloat16),
        "model.norm": torch.arange(6.0),
        "scale": torch.tensor(2.0),
    }
    return write_safetensors_file(tmp_path / "m.safetensors", tensors)


def write(path: Path, fields: Any, data: int = 64) -> Path:
    """A file with this header and ``data`` bytes behind it."""
    head = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(data))
    return path


def tensor(start: int, stop: int, **more: Any) -> dict[str, Any]:
    """Float32 values of the bytes from ``start`` to ``stop``."""
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]} | more


def test_a_tensor_is_opened_by_name_and_keeps_its_bits(path: Path) -> None:
    with open_store(path, array="model.embed") as store:
        assert isinstance(store, SafetensorsStore)
        assert (store.shape, store.dtype, store.writable) == ((40, 8), torch.bfloat16, False)
        assert bits(store.gather([39, 0])) == bits(random_bits((40, 8), torch.bfloat16)[[39, 0]])
        assert "m.safetensors[model.embed]" in repr(store)
    with open_store(path, array="model.norm", dtype=torch.float32) as store:
        assert store.gather(slice(None)).tolist() == [0, 1, 2, 3, 4, 5]


def test_rows_go_through_a_pipeline(path: Path) -> None:
    with rf.Pipeline(open_store(path, array="model.norm"), batch_size=4, device="cpu") as pipe:
        assert [batch.data.tolist() for batch in pipe] == [[0, 1, 2, 3], [4, 5]]


def test_without_a_name_only_a_lone_tensor_is_opened(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"array=.*'model\.embed', 'model\.norm', 'scale'"):
        open_store(path)
    with open_store(write_safetensors_file(tmp_path / "one.safetensors", {"w": torch.ones(3, 2)})) as store:
        assert store.shape == (3, 2)


def test_a_name_that_is_not_there_is_an_error_that_lists_the_names(path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor 'embed'; it has 'model\.embed', 'model\.norm', 'scale'"):
        open_store(path, array="embed")
    many = write_safetensors_file(path.with_name("many.safetensors"), {f"w{n:03}": torch.ones(1) for n in range(150)})
    with pytest.raises(ValueError, match=r"'w019', and 130 more"):
        open_store(many, array="embed")


def test_a_single_value_has_no_rows_and_other_dtypes_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 0"):
        open_store(path, array="scale")
    with pytest.raises(TypeError, match=r"'F4'; known are .*BF16"):
        open_store(write(tmp_path / "x.safetensors", {"w": tensor(0, 8, dtype="F4")}))
    with pytest.raises(TypeError, match=r"torch\.bfloat16, not torch\.float32"):
        open_store(path, array="model.embed", dtype=torch.float32)


def test_two_tensors_of_a_file_are_two_stores_and_two_names_of_one_are_one(path: Path) -> None:
    link = path.with_name("l.safetensors")
    link.symlink_to(path)
    one, other, again = (
        open_store(name, array=array) for name, array in ((path, "model.embed"), (path, "model.norm"), (link, "model.embed"))
    )
    assert one.identity == again.identity != other.identity


def test_it_is_not_written(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        open_store(path, "r+", array="model.norm")
    with pytest.raises(ValueError, match="read-only"):
        rf.create_store(tmp_path / "new.safetensors", (2, 2), torch.float32)
    store = open_store(path, array="model.norm")
    with pytest.raises(PermissionError):
        store.scatter([0], torch.ones(1))
    with pytest.raises(ValueError, match="write"):
        store.save(tmp_path / "new.safetensors")
    store.save(tmp_path / "new.npy")
    assert open_store(tmp_path / "new.npy").gather([5]).tolist() == [5]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"a": tensor(0, 128)}, "the file has"),
        ({"a": tensor(64, 68)}, "the file has"),
        ({"a": tensor(0, 16), "b": tensor(12, 20)}, "'b' overlaps 'a'"),
        ({"a": tensor(0, 16), "b": tensor(0, 16)}, "overlaps"),
        ({"a": tensor(8, 4, shape=[0])}, "lies from"),
        ({"a": tensor(-4, 4)}, "data_offsets"),
        ({"a": tensor(0, 16, shape=[5])}, "16 bytes, which a shape of"),
        ({"a": tensor(0, 16, shape=[1 << 62, 1 << 62])}, "which a shape of"),
        ({"a": tensor(0, 16, shape=[-4])}, "shape"),
        ({"a": tensor(0, 16, shape=[True, 4])}, "shape"),
        ({"a": tensor(0, 16, shape="4")}, "shape"),
        ({"a": tensor(0, 16, data_offsets=[0, 8, 16])}, "data_offsets"),
        ({"a": tensor(0, 16, dtype=4)}, "dtype"),
        ({"a": 5}, "a tensor has"),
        ([], "no object"),
        (b"{" * 100_000, "broken"),
        (b"\xff{}", "broken"),
        (b'{"a": {}, "a": {}}', "twice"),
        (b"", "cut off"),
    ],
)
def test_a_header_that_lies_is_refused_whatever_is_asked_for(tmp_path: Path, fields: Any, reason: str) -> None:
    path = write(tmp_path / "x.safetensors", fields)
    with pytest.raises(ValueError, match=reason):
        open_store(path, array="a")


@pytest.mark.parametrize("content", [b"", b"\x07", struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 200) + b"{}"])
def test_a_file_that_is_cut_off_or_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cut off"):
        open_store(path)


def test_a_header_larger_than_the_format_allows_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="cut off"):
        header_length(struct.pack("<Q", 100_000_001), 1 << 40, "x")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(json.dumps))
def test_bytes_that_are_no_header_are_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError, match="x has a broken"):
        parse_header(text.encode() if isinstance(text, str) else text, 1000, "x")


# ---- a model that is split over several files ------------------------------------------------------------------


def test_a_tensor_of_a_split_model_is_found_by_its_index(path: Path) -> None:
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm": path.name, "lost": "other.safetensors"}}))
    with open_store(index, array="model.norm") as store:
        assert store.gather([3]).tolist() == [3]
    with pytest.raises(ValueError, match=r"'lost', 'model\.norm'"):
        open_store(index)
    with pytest.raises(ValueError, match=r"no tensor 'model\.embed'"):
        open_store(index, array="model.embed")
    with pytest.raises(FileNotFoundError, match=r"other\.safetensors"):
        open_store(index, array="lost")


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "x.npy", "", 5])
def test_an_index_leads_to_no_other_folder_and_to_no_other_kind(path: Path, name: Any) -> None:
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="beside it"):
        open_store(index, array="w")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '"weight_map"'])
def test_a_broken_index_is_refused(path: Path, text: str) -> None:
    index = path.with_name("model.safetensors.index.json")
    index.write_text(text)
    with pytest.raises(ValueError, match="no index"):
        open_store(index, array="w")
