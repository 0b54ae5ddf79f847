"""The .npy format: every kind that holds numbers is opened, every other is refused by name and reason."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry.stores import MemmapStore, open_store
from rowferry.stores._npy import MOST_HEADER_BYTES, header_bytes, parse_header
from rowferry.stores.testing import EVERY_DTYPE, bits, random_bits, write_npy_file

IN_NUMPY = [dtype for dtype in EVERY_DTYPE if dtype != torch.bfloat16 and "float8" not in str(dtype)]


def npy(**fields: Any) -> bytes:
    """A file of version 1.0 with this header and 64 bytes of elements."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (2, 3)} | fields) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1") + bytes(64)


def saved(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


# ---- what is opened ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("offset", [None, 131, 4096])
def test_rows_are_right_in_every_version_order_and_alignment(
    tmp_path: Path, version: tuple[int, int], fortran: bool, offset: int | None
) -> None:
    values = random_bits((6, 4, 3), torch.float32)
    path = write_npy_file(tmp_path / "x.npy", values, version=version, fortran=fortran, offset=offset)
    with open_store(path) as store:
        assert store.shape == (6, 4, 3)
        assert bits(store.gather([5, 0, 5])) == bits(values[[5, 0, 5]])


@pytest.mark.parametrize("dtype", IN_NUMPY, ids=str)
@pytest.mark.parametrize("big_endian", [False, True])
def test_a_file_is_read_as_numpy_reads_it(tmp_path: Path, dtype: torch.dtype, big_endian: bool) -> None:
    path = write_npy_file(tmp_path / "x.npy", random_bits((10, 8), dtype), big_endian=big_endian)
    theirs = np.load(path)
    with open_store(path) as store:
        rows = store.gather([7, 0])
        assert rows.numpy().tobytes() == theirs[[7, 0]].astype(theirs.dtype.newbyteorder("=")).tobytes()


@pytest.mark.parametrize("dtype", IN_NUMPY, ids=str)
def test_what_numpy_saves_is_opened(tmp_path: Path, dtype: torch.dtype) -> None:
    values = random_bits((10, 3), dtype)
    np.save(tmp_path / "c.npy", values.numpy())
    np.save(tmp_path / "f.npy", np.asfortranarray(values.numpy()))
    for name in ("c.npy", "f.npy"):
        with open_store(tmp_path / name) as store:
            assert store.dtype == dtype
            assert bits(store.gather(slice(None))) == bits(values)


@pytest.mark.parametrize(("code", "dtype"), [(">f4", torch.float32), (">i8", torch.int64), (">c8", torch.complex64)])
def test_write_back_keeps_a_file_big_endian(tmp_path: Path, code: str, dtype: torch.dtype) -> None:
    array = np.arange(80).reshape(10, 8).astype(code)
    np.save(tmp_path / "x.npy", array)
    before = (tmp_path / "x.npy").read_bytes()
    with open_store(tmp_path / "x.npy", "r+") as store:
        assert store.dtype == dtype
        assert store.gather([7, 0]).tolist() == array[[7, 0]].tolist()
        store.scatter([3], torch.full((1, 8), 258, dtype=dtype))
    array[3] = 258
    assert np.load(tmp_path / "x.npy").dtype == np.dtype(code)
    assert (tmp_path / "x.npy").read_bytes() == before[:128] + array.tobytes()


@pytest.mark.parametrize("shape", [(0, 64), (0,), (5, 0), (5, 0, 2), (7,), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_rows_of_any_rank_and_size_are_rows(tmp_path: Path, shape: tuple[int, ...], fortran: bool, mode: Any) -> None:
    path = write_npy_file(tmp_path / "x.npy", random_bits(shape, torch.float64), fortran=fortran)
    with open_store(path, mode) as store:
        assert store.shape == shape
        assert bits(store.gather(slice(None))) == np.load(path).tobytes()


def test_bytes_after_the_elements_are_not_rows_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(saved(np.zeros((2, 2))) + b"another array")
    with open_store(path, "r+") as store:
        store.scatter([0, 1], torch.ones(2, 2))
    assert np.load(path).tolist() == [[1, 1], [1, 1]]
    assert path.read_bytes().endswith(b"another array")


def test_long_integers_of_python_2_are_numbers(tmp_path: Path) -> None:
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }\n"
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(24))
    with open_store(path) as store:
        assert store.shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("big_endian", [False, True])
def test_raw_elements_need_a_dtype_and_have_it_then(tmp_path: Path, dtype: torch.dtype, big_endian: bool) -> None:
    values = random_bits((4, 3), dtype)
    path = write_npy_file(tmp_path / "x.npy", values, big_endian=big_endian)
    with pytest.raises(TypeError, match=rf"x\.npy has raw elements of {dtype.itemsize} bytes.*dtype="):
        open_store(path)
    with open_store(path, dtype=dtype) as store:
        assert bits(store.gather([2, 1])) == bits(values[[2, 1]])


def test_integers_can_hold_bfloat16(tmp_path: Path) -> None:
    values = random_bits((4, 3), torch.bfloat16)
    np.save(tmp_path / "x.npy", values.view(torch.uint16).numpy())
    with open_store(tmp_path / "x.npy", dtype=torch.bfloat16) as store:
        assert bits(store.gather(slice(None))) == bits(values)


# ---- what is refused -----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[bytes | Callable[[], bytes], type[Exception], str]] = {
    "object": (lambda: saved(np.array([[1, "a"]], object), allow_pickle=True), TypeError, "object.*unpickles nothing"),
    "structured": (lambda: saved(np.zeros(3, [("a", "<f4")])), TypeError, "structured"),
    "strings": (lambda: saved(np.array(["ab", "c"])), TypeError, "'<U2'"),
    "bytes": (lambda: saved(np.array([b"ab"])), TypeError, r"'\|S2'"),
    "long doubles": (lambda: saved(np.zeros((2, 2), np.longdouble)), TypeError, "no dtype for"),
    "complex long doubles": (lambda: saved(np.zeros((2, 2), np.clongdouble)), TypeError, "no dtype for"),
    "datetimes": (lambda: saved(np.zeros(2, "<M8[s]")), TypeError, "M8"),
    "raw of an odd size": (npy(descr="|V3"), TypeError, "3 bytes"),
    "raw of no size": (npy(descr="|V0"), TypeError, "V0"),
    "a type that is none": (npy(descr="<f1"), TypeError, "'<f1', which NumPy does not know"),
    "rank 0": (lambda: saved(np.float32(3)), ValueError, "rank 0"),
    "nothing": (b"", ValueError, "empty"),
    "an archive": (b"PK\x03\x04" + bytes(64), ValueError, "npz"),
    "another format": (b"\x89HDF\r\n\x1a\n" + bytes(64), ValueError, "not a .npy file"),
    "a start of the magic": (b"\x93NUM", ValueError, "not a .npy file"),
    "no version": (b"\x93NUMPY", ValueError, "version none"),
    "a later version": (b"\x93NUMPY\x04\x00" + bytes(64), ValueError, r"version 4\.0"),
    "cut off in the header": (npy()[:30], ValueError, "cut off inside its header"),
    "cut off in the rows": (npy()[: len(npy()) - 41], ValueError, "cut off"),
    "cut off after the header": (npy()[:-64], ValueError, "cut off"),
    "too long a header": (
        b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20),
        ValueError,
        "header of 1,048",
    ),
    "no dictionary": (npy().replace(b"{", b"["), ValueError, "broken"),
    "code in the header": (npy().replace(b"False", b"eval("), ValueError, "broken"),
    "a field too many": (npy(more=1), ValueError, "broken"),
    "a shape that is none": (npy(shape=(2, -3)), ValueError, "shape"),
    "a bool in the shape": (npy(shape=(True, 3)), ValueError, "shape"),
    "a list as shape": (npy(shape=[2, 3]), ValueError, "shape"),
    "an order that is none": (npy(fortran_order=0), ValueError, "broken"),
    "more than all memory": (npy(shape=(0, 2**62)), ValueError, "larger than any memory"),
    "rows without end": (npy(shape=(2**70,)), ValueError, "larger than any memory"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_what_cannot_be_rows_is_refused_by_file_and_reason_and_stays_as_it_is(tmp_path: Path, case: str, mode: Any) -> None:
    content, error, reason = REFUSED[case]
    data = content if isinstance(content, bytes) else content()
    path = tmp_path / "x.npy"
    path.write_bytes(data)
    with pytest.raises(error, match=re.escape(str(path)) + r"(?s:.*)" + reason):
        open_store(path, mode)
    assert path.read_bytes() == data


@pytest.mark.parametrize("names", [["ü"], [f"f{i}" for i in range(4000)]], ids=["not latin", "4,000 fields"])
def test_structures_of_later_versions_are_refused_too(tmp_path: Path, names: list[str]) -> None:
    text = repr({"descr": [(name, "<f4") for name in names], "fortran_order": False, "shape": (2,)}) + "\n"
    head = text.encode("utf-8")
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x03\x00" + len(head).to_bytes(4, "little") + head + bytes(8 * len(names)))
    with pytest.raises((TypeError, ValueError), match=r"structured|header of"):
        open_store(path)


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.float64), (torch.int16, torch.float16), (torch.int32, torch.bfloat16)]
)
def test_dtype_is_no_cast(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    path = write_npy_file(tmp_path / "x.npy", random_bits((2, 2), stored))
    with pytest.raises(TypeError, match=f"rows are {stored}, not {wanted}"):
        open_store(path, dtype=wanted)
    open_store(path, dtype=stored).close()


def test_a_folder_named_npy_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.npy").mkdir()
    with pytest.raises(ValueError, match="is not a file"):
        MemmapStore(tmp_path / "x.npy")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_header_is_an_error_of_ours_or_a_header(data: st.DataObject) -> None:
    head = bytearray(npy())
    for _ in range(data.draw(st.integers(1, 3))):
        head[data.draw(st.integers(0, len(head) - 65))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError, TypeError):
        header = parse_header(bytes(head), None, "x.npy")
        assert header.nbytes < 1 << 63
        assert min(header.shape) >= 0


# ---- what is written -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.sampled_from(EVERY_DTYPE))
def test_a_written_header_reads_back(shape: list[int], dtype: torch.dtype) -> None:
    if np.prod([n for n in shape if n], dtype=object) * dtype.itemsize >= 1 << 63:
        return
    head = header_bytes(tuple(shape), dtype)
    header = parse_header(head, dtype, "x.npy")
    assert (header.shape, header.dtype, header.offset) == (tuple(shape), dtype, len(head))
    assert not header.fortran
    assert header.stored.isnative
    assert len(head) % 64 == 0
    assert len(head) < MOST_HEADER_BYTES


def test_bfloat16_is_written_as_raw_elements_of_two_bytes() -> None:
    assert b"'<V2'" in header_bytes((2, 2), torch.bfloat16)
    with pytest.raises(TypeError, match=r"torch\.complex32"):
        header_bytes((2,), torch.complex32)
