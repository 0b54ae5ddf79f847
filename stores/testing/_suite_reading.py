"""The part of the contract that every store keeps, read-only ones too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rowferry.stores import Store, open_store

from ._values import EVERY_DTYPE, bits, random_bits

ROWS = 10
ROW_SHAPES = [(), (1,), (3,), (2, 3), (0,), (1025,)]
INDEX_KINDS: list[Callable[[list[int]], Any]] = [
    list,
    *(lambda rows, code=code: np.array(rows, code) for code in ("i1", "i2", "i4", "i8", ">i4", ">i8")),
    *(
        lambda rows, dtype=dtype: torch.tensor(rows, dtype=dtype)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    ),
]
UNSIGNED_KINDS: list[Callable[[list[int]], Any]] = [
    *(lambda rows, code=code: np.array(rows, code) for code in ("u1", "u2", "u4", "u8")),
    *(
        lambda rows, dtype=dtype: torch.tensor(rows, dtype=dtype)
        for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    ),
]


def table(rows: int = ROWS, row_shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that count up, so that every element is another one."""
    return torch.arange(rows * int(np.prod(row_shape, dtype=np.int64))).to(dtype).view(rows, *row_shape)


class ReadingContract(ABC):
    """See ``StoreContract``."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = EVERY_DTYPE

    @abstractmethod
    def make(self, values: torch.Tensor, folder: Path) -> Store:
        """A new store of the kind under test that holds ``values``; ``folder`` is empty and the test's own."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Ten rows of ``table()``."""
        with self.make(table(), tmp_path) as store:
            yield store

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=str)

    # ---- what it is ------------------------------------------------------------------------------------------

    def test_tells_its_shape_dtype_and_sizes(self, tmp_path: Path) -> None:
        with self.make(table(5, (2, 3), torch.float64), tmp_path) as store:
            assert store.shape == (5, 2, 3)
            assert store.row_shape == (2, 3)
            assert store.dtype == torch.float64
            assert len(store) == 5
            assert store.row_nbytes == 48
            assert store.nbytes == 240

    def test_its_repr_tells_kind_shape_dtype_and_state(self, store: Store) -> None:
        text = repr(store)
        assert type(store).__name__ in text
        assert "10x4 float32, 16 bytes a row" in text
        store.close()
        assert "closed" in repr(store)

    def test_memory_where_there_is_one_is_all_rows(self, store: Store) -> None:
        if store.memory is not None:
            assert store.memory.is_contiguous()
            assert bits(store.memory) == bits(table())

    def test_a_store_is_itself_and_no_other(self, store: Store, tmp_path: Path) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        with self.make(table(), folder) as other:
            assert store.identity == store.identity
            assert hash(store.identity) == hash(store.identity)
            assert store.identity != other.identity

    # ---- gather ----------------------------------------------------------------------------------------------

    def test_rows_of_every_dtype_come_bit_for_bit(self, tmp_path: Path, dtype: torch.dtype) -> None:
        values = random_bits((ROWS, 5), dtype)
        with self.make(values, tmp_path) as store:
            rows = store.gather([7, 0, 7, 9])
            assert rows.dtype == dtype
            assert bits(rows) == bits(torch.stack([values[7], values[0], values[7], values[9]]))

    @pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)
    def test_rows_of_any_shape_come_in_the_order_asked_for(self, tmp_path: Path, row_shape: tuple[int, ...]) -> None:
        values = table(ROWS, row_shape)
        with self.make(values, tmp_path) as store:
            for index in ([9, 0, 9], [3, 4, 5], [0], [5, 4, 3], list(range(ROWS)), [-1, 0, -ROWS]):
                rows = store.gather(index)
                assert rows.shape == (len(index), *row_shape)
                assert rows.is_contiguous()
                assert rows.cpu().equal(values[index])

    @pytest.mark.parametrize("kind", INDEX_KINDS + UNSIGNED_KINDS)
    def test_every_kind_of_index_names_the_same_rows(self, store: Store, kind: Callable[[list[int]], Any]) -> None:
        index = kind([3, 1, 1, 9])
        assert store.gather(index).cpu().equal(table()[[3, 1, 1, 9]])
        assert list(index) == [3, 1, 1, 9]  # and it is as it was

    @pytest.mark.parametrize("kind", INDEX_KINDS)
    def test_negative_rows_count_from_the_end_in_every_kind_of_index(
        self, store: Store, kind: Callable[[list[int]], Any]
    ) -> None:
        index = kind([-1, -10, 2])
        assert store.gather(index).cpu().equal(table()[[9, 0, 2]])
        assert list(index) == [-1, -10, 2]

    @pytest.mark.parametrize(
        "index", [range(2, 9, 3), range(5, 0, -2), range(0), slice(None), slice(8, None), slice(None, None, -4)]
    )
    def test_ranges_and_slices_are_indices(self, store: Store, index: range | slice) -> None:
        wanted = list(index) if isinstance(index, range) else list(range(ROWS))[index]
        assert store.gather(index).cpu().equal(table()[wanted])

    def test_a_mask_names_the_rows_where_it_is_true(self, store: Store) -> None:
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[[2, 7]] = True
        for each in (mask, mask.numpy(), mask.tolist()):
            assert store.gather(each).cpu().equal(table()[[2, 7]])

    def test_the_shape_of_the_index_is_the_shape_of_the_answer(self, store: Store) -> None:
        index = torch.tensor([[1, 2, 1], [9, 9, 0]])
        assert store.gather(index).cpu().equal(table()[index])
        assert store.gather(4).cpu().equal(table()[4])
        assert store.gather(torch.tensor(4)).shape == (4,)
        assert store.gather(index.T[::2]).cpu().equal(table()[index.T[::2]])

    def test_an_empty_index_gives_no_rows(self, store: Store) -> None:
        for index in ([], np.empty((0,), np.int64), torch.empty((0,), dtype=torch.int32), [False] * ROWS):
            assert store.gather(index).shape == (0, 4)
        assert store.gather(np.empty((3, 0), np.int64)).shape == (3, 0, 4)

    @pytest.mark.parametrize("index", [[0, 4, 10], [-11], [2**40], np.array([2**63 + 1], np.uint64), [-(2**63)]], ids=str)
    def test_a_row_that_does_not_exist_is_an_index_error_and_nothing_is_read(self, store: Store, index: Any) -> None:
        out = torch.full((len(index), 4), 7.0, device=store.device)
        with pytest.raises(IndexError, match=r"out of range.*10 rows"):
            store.gather(index, out=out)
        assert bool((out == 7).all())
        assert store.gather([0]).cpu().equal(table()[[0]])  # and the store works on

    @pytest.mark.parametrize("index", [[True] * 9, np.zeros((ROWS, 4), bool)], ids=["too short", "of elements"])
    def test_a_mask_of_another_shape_is_an_index_error(self, store: Store, index: Any) -> None:
        with pytest.raises(IndexError, match="mask"):
            store.gather(index)

    @pytest.mark.parametrize("index", [[1.0], np.array([1.5]), torch.tensor([1.0], dtype=torch.bfloat16), ["1"], None, True])
    def test_what_is_no_row_number_is_a_type_error(self, store: Store, index: Any) -> None:
        with pytest.raises(TypeError):
            store.gather(index)

    def test_no_rows_at_all_is_a_store_too(self, tmp_path: Path) -> None:
        with self.make(table(0, (64,)), tmp_path) as store:
            assert len(store) == 0
            assert store.gather([]).shape == (0, 64)
            assert store.gather(slice(None)).shape == (0, 64)
            with pytest.raises(IndexError, match="no rows"):
                store.gather([0])

    def test_out_is_filled_and_returned(self, store: Store) -> None:
        out = torch.empty(2, 4, device=store.device)
        assert store.gather([6, 2], out=out) is out
        assert out.cpu().equal(table()[[6, 2]])

    def test_out_that_does_not_fit_is_a_type_error_that_says_what_would(self, store: Store) -> None:
        device = store.device
        for out in (
            torch.empty(3, 4, device=device),
            torch.empty(2, 4, dtype=torch.float64, device=device),
            torch.empty(4, 2, device=device).T,
        ):
            with pytest.raises(TypeError, match=r"\(2, 4\) torch.float32"):
                store.gather([6, 2], out=out)

    def test_rows_are_a_copy_that_changes_nothing(self, store: Store) -> None:
        for index in ([1, 2], slice(None), [0]):
            store.gather(index).add_(100)
        assert store.gather(slice(None)).cpu().equal(table())

    def test_many_threads_gather_at_once(self, tmp_path: Path) -> None:
        values = table(500, (16,))
        with self.make(values, tmp_path) as store, ThreadPoolExecutor(8) as pool:

            def right(seed: int) -> bool:
                index = np.random.default_rng(seed).integers(0, 500, 300)
                return store.gather(index).cpu().equal(values[torch.from_numpy(index)])

            assert all(pool.map(right, range(16)))

    # ---- the rest --------------------------------------------------------------------------------------------

    def test_spans_cover_all_rows_once(self, tmp_path: Path) -> None:
        with self.make(table(1000, (4,)), tmp_path) as store:
            spans = list(store.spans(limit=1600))
        assert [row for start, stop in spans for row in range(start, stop)] == list(range(1000))
        assert all(start % store.chunk_rows == 0 for start, _ in spans)

    def test_a_closed_store_says_so(self, store: Store) -> None:
        store.close()
        store.close()  # closing again is nothing
        assert store.closed
        for use in (lambda: store.gather([0]), lambda: store.flush(), lambda: store.save("never.npy"), lambda: store.read([0])):
            with pytest.raises(ValueError, match="closed"):
                use()

    def test_rows_outlive_the_store(self, store: Store) -> None:
        rows, memory = store.gather([1, 2]), store.memory
        store.close()
        assert rows.cpu().equal(table()[[1, 2]])
        if memory is not None:
            assert memory.cpu().equal(table())

    def test_saving_makes_a_file_with_the_same_rows(self, tmp_path: Path, dtype: torch.dtype) -> None:
        values = random_bits((ROWS, 3), dtype)
        with self.make(values, tmp_path) as store:
            store.save(tmp_path / "saved.npy")
        with open_store(tmp_path / "saved.npy", dtype=dtype) as saved:
            assert saved.dtype == dtype
            assert bits(saved.gather(slice(None))) == bits(values)
