"""Arrays and tensors as stores: used where they lie, in whatever layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowferry.stores import ArrayStore
from rowferry.stores._bytes import gather_rows, scatter_rows
from rowferry.stores._views import gather_array, scatter_array, tensor_over
from rowferry.stores.testing import bits, random_bits


def unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts at an odd address."""
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw[1:].view(array.dtype).reshape(array.shape)


LAYOUTS: dict[str, Any] = {
    "as it is": lambda array: array.copy(),
    "Fortran order": lambda array: np.array(array, order="F"),
    "every other row": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "a window of columns": lambda array: np.pad(array, [(0, 0), (1, 2), (0, 0)])[:, 1:-2],
    "transposed": lambda array: array.transpose(1, 0, 2).copy().transpose(1, 0, 2),
    "other byte order": lambda array: array.astype(array.dtype.newbyteorder("S")),
    "unaligned": unaligned,
    "unaligned in other byte order": lambda array: unaligned(array.astype(array.dtype.newbyteorder("S"))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", ["f4", "i2", "c16", "?"])
def test_every_layout_is_read_and_written_where_it_lies(layout: str, code: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if code == "?" else 9999, (8, 3, 2)).astype(code)
    array = LAYOUTS[layout](values)
    store = ArrayStore(array)
    assert store.writable
    for index in ([7, 0, 7], [2, 3, 4], [5]):
        assert store.gather(index).numpy().tobytes() == values[index].tobytes()
    new = np.zeros((2, 3, 2), code)
    for index in ([6, 1], [3, 4]):
        store.scatter(index, new)
        values[index] = new
    assert np.array_equal(array, values)


def test_a_contiguous_array_is_the_memory_of_its_store() -> None:
    array = np.zeros((4, 3), np.float32)
    store = ArrayStore(array)
    assert store.memory is not None
    store.memory[2] = 5
    assert array[2].tolist() == [5, 5, 5]
    array[1] = 7
    assert store.gather([1]).tolist() == [[7, 7, 7]]
    assert store.identity == ArrayStore(array).identity == ArrayStore(torch.from_numpy(array)).identity


@pytest.mark.parametrize("layout", ["Fortran order", "every other row", "other byte order"])
def test_a_layout_that_torch_does_not_have_gives_no_memory(layout: str) -> None:
    assert ArrayStore(LAYOUTS[layout](np.zeros((4, 3, 2)))).memory is None


def test_a_parameter_is_written_without_a_trace_in_its_graph() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    store = ArrayStore(weight)
    store.scatter([1], torch.ones(1, 2))
    assert weight[1].tolist() == [1, 1]
    assert not store.gather([1]).requires_grad


def test_a_read_only_array_is_a_read_only_store_without_a_warning() -> None:
    array = np.frombuffer(bytes(range(12)), np.uint8).reshape(4, 3)
    store = ArrayStore(array, writable=True)
    assert not store.writable
    assert store.memory is not None
    assert store.gather([3]).tolist() == [[9, 10, 11]]
    with pytest.raises(PermissionError, match="read-only"):
        store.scatter([0], torch.zeros(1, 3))


def test_a_writable_array_can_be_protected() -> None:
    with pytest.raises(PermissionError, match="mine is read-only"):
        ArrayStore(np.zeros(3), writable=False, name="mine").scatter([0], torch.zeros(1))


def test_a_tensor_expanded_over_one_row_is_read_only() -> None:
    store = ArrayStore(torch.arange(3.0).expand(5, 3))
    assert not store.writable
    assert store.gather([4, 0]).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_memory_stays_while_a_store_or_its_memory_is_in_use() -> None:
    store = ArrayStore(np.frombuffer(np.arange(1000.0).tobytes()))
    memory = store.memory
    del store
    assert memory is not None
    assert float(memory.sum()) == 499500


@pytest.mark.parametrize(
    ("array", "error", "reason"),
    [
        ([1, 2], TypeError, "list"),
        (np.array(["a"]), TypeError, "U1"),
        (np.array([1, None], object), TypeError, "object"),
        (np.zeros(2, np.longdouble), TypeError, r"float128|longdouble"),
        (np.zeros(2, [("a", "f4")]), TypeError, "a"),
        (np.zeros(2, "<M8[s]"), TypeError, "datetime64"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), TypeError, "mask"),
        (np.array(3.0), ValueError, "dimension"),
        (torch.tensor(3.0), ValueError, "dimension"),
        (torch.zeros(2, 2).to_sparse(), TypeError, "sparse"),
        (torch.zeros(2, 2, device="meta"), TypeError, "meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), TypeError, "resolve_conj"),
    ],
    ids=str,
)
def test_what_cannot_be_rows_is_refused_with_the_reason(array: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        ArrayStore(array)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 70), st.lists(st.integers(0, 11), max_size=15), st.integers(0, 3))
def test_rows_move_as_bytes_at_any_width_and_alignment(n: int, width: int, rows: list[int], skew: int) -> None:
    values = random_bits((n * width + skew,), torch.uint8)[skew:].view(n, width)
    index = np.array([row % n for row in rows], np.int64)
    out = torch.zeros(len(rows), width, dtype=torch.uint8)
    gather_rows(values, index, out)
    assert bits(out) == b"".join(bits(values[row]) for row in index)

    distinct = np.array(list(dict.fromkeys(index.tolist())), np.int64)
    new = random_bits((len(distinct), width), torch.uint8, seed=1)
    wanted = values.clone()
    wanted[torch.from_numpy(distinct)] = new
    scatter_rows(values, distinct, new)
    assert bits(values) == bits(wanted)


def test_rows_of_more_than_a_megabyte_move_too() -> None:
    values = random_bits((3, (1 << 20) + 1), torch.uint8)
    out = torch.empty_like(values)
    gather_rows(values, np.array([2, 0, 2]), out)
    assert bits(out) == bits(values[[2, 0, 2]])
    old = values.clone()
    scatter_rows(values, np.array([1, 0]), old[[2, 1]])
    assert bits(values) == bits(old[[1, 2, 2]])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.lists(st.integers(0, 7), max_size=9, unique=True))
def test_strided_rows_equal_numpys(layout: str, rows: list[int]) -> None:
    values = np.random.default_rng(1).random((8, 3, 2), np.float32)
    array, index = LAYOUTS[layout](values), np.array(rows, np.int64)
    out = torch.zeros(len(rows), 3, 2)
    gather_array(array, index, out)
    assert np.array_equal(out.numpy(), values[index])
    scatter_array(array, index, -out)
    values[index] *= -1
    assert np.array_equal(array, values)


def test_a_tensor_over_an_array_is_the_same_memory() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert tensor_over(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert tensor_over(array).data_ptr() == array.ctypes.data
    assert not array.flags.writeable
    one_column = np.zeros((5, 3))[:, ::-1][:, :1].copy("K")[:, ::-1]
    assert one_column.flags.c_contiguous
    assert tensor_over(one_column).data_ptr() == one_column.ctypes.data
    assert tensor_over(np.zeros((0, 3), np.uint16)).shape == (0, 3)
