"""The store contract as a pytest suite."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rowferry.stores import ArrayStore, Store

from ._suite_reading import ROW_SHAPES, ROWS, ReadingContract, table
from ._values import bits, random_bits


class StoreContract(ReadingContract):
    """All that ``Store`` promises. Subclass it in a test file, name the class ``Test...`` and supply ``make``::

        class TestMyStore(StoreContract):
            def make(self, values: torch.Tensor, folder: Path) -> Store:
                return MyStore(values)

    For a kind that is never writable subclass ``ReadOnlyContract``. Set ``dtypes`` where a kind can't hold all of
    ``EVERY_DTYPE``. A kind that lives in files overrides ``reopen``.
    """

    def reopen(self, store: Store, folder: Path) -> Store | None:
        """What a fresh process would open after ``store.flush()``; None for memory. ``store`` may be open still."""
        del store, folder
        return None

    def test_it_says_that_it_is_writable(self, store: Store) -> None:
        assert store.writable
        assert "read-write" in repr(store)

    def test_written_rows_change_and_no_other_byte_does(self, tmp_path: Path, dtype: torch.dtype) -> None:
        values, new = random_bits((ROWS, 5), dtype), random_bits((3, 5), dtype, seed=1)
        with self.make(values, tmp_path) as store:
            store.scatter([8, 0, 3], new)
            wanted = values.clone()
            for place, row in enumerate((8, 0, 3)):
                wanted[row] = new[place]
            assert bits(store.gather(slice(None))) == bits(wanted)

    @pytest.mark.parametrize("row_shape", ROW_SHAPES, ids=str)
    @pytest.mark.parametrize("index", [[7], [2, 3, 4], [4, 3], [-1, 0], slice(None), slice(1, 1)], ids=str)
    def test_rows_of_any_shape_are_written(self, tmp_path: Path, row_shape: tuple[int, ...], index: Any) -> None:
        values = table(ROWS, row_shape)
        with self.make(values, tmp_path) as store:
            new = -1 - values[index]
            store.scatter(index, new)
            values[index] = new
            assert store.gather(slice(None)).cpu().equal(values)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
    def test_of_a_row_that_occurs_twice_the_last_value_stays(self, store: Store, kind: Any) -> None:
        for _ in range(20):
            store.scatter(kind([0, 1, 0, -9, 0, 1]), torch.arange(2.0, 8.0).view(6, 1).expand(6, 4))
            assert store.gather([0, 1])[:, 0].tolist() == [6, 7]

    def test_an_index_of_any_shape_takes_values_of_that_shape(self, store: Store) -> None:
        index, new = torch.tensor([[5, 1], [2, 5]]), -torch.arange(16.0).view(2, 2, 4)
        store.scatter(index, new)
        assert store.gather([1, 2, 5]).cpu().equal(torch.stack([new[0, 1], new[1, 0], new[1, 1]]))
        store.scatter(3, torch.full((4,), 0.5))
        assert store.gather(3).tolist() == [0.5] * 4

    def test_a_mask_names_the_rows_to_write(self, store: Store) -> None:
        mask = np.zeros(ROWS, bool)
        mask[[4, 6]] = True
        store.scatter(mask, -torch.ones(2, 4))
        assert (store.gather(slice(None))[:, 0] < 0).nonzero().flatten().tolist() == [4, 6]

    @pytest.mark.parametrize(
        "values",
        [
            torch.tensor([[1.5, 2, 3, 4]], dtype=torch.float64),
            torch.tensor([[1.5, 2, 3, 4]], requires_grad=True),
            torch.tensor([[1.5], [2], [3], [4]]).T,
            np.array([[1.5, 2, 3, 4]], ">f8"),
            np.broadcast_to(np.array([1.5, 2, 3, 4], np.float16), (1, 4)),
        ],
        ids=["another dtype", "with gradient", "strided", "other byte order", "read-only"],
    )
    def test_values_of_any_dtype_and_layout_are_cast(self, store: Store, values: torch.Tensor | NDArray[Any]) -> None:
        store.scatter([5], values)
        assert store.gather([5]).tolist() == [[1.5, 2, 3, 4]]

    def test_the_callers_index_and_values_stay_as_they_are(self, store: Store) -> None:
        index, values = np.array([3, -1, 3]), torch.ones(3, 4)
        store.scatter(index, values)
        store.scatter([3], torch.zeros(1, 4))
        assert index.tolist() == [3, -1, 3]
        assert bool((values == 1).all())

    @pytest.mark.parametrize(
        ("index", "shape", "error"),
        [
            ([0, 10], (2, 4), IndexError),
            ([-11], (1, 4), IndexError),
            ([0.0], (1, 4), TypeError),
            ([0, 1], (1, 4), ValueError),
            ([0, 1], (2, 3), ValueError),
            ([0, 1], (4,), ValueError),
            ([], (4,), ValueError),
        ],
    )
    def test_a_write_that_does_not_fit_is_refused_and_nothing_is_written(
        self, store: Store, index: list[Any], shape: tuple[int, ...], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            store.scatter(index, torch.ones(shape))
        assert store.gather(slice(None)).cpu().equal(table())

    def test_complex_values_are_no_values_of_a_real_store(self, store: Store) -> None:
        with pytest.raises(TypeError, match="imaginary"):
            store.scatter([0], torch.ones(1, 4, dtype=torch.complex64))
        with pytest.raises(TypeError, match="imaginary"):
            store.copy_from(ArrayStore(torch.ones(10, 4, dtype=torch.complex64)))
        assert store.gather(slice(None)).cpu().equal(table())

    def test_flushed_rows_are_there_when_it_is_opened_again(self, tmp_path: Path) -> None:
        store = self.make(table(), tmp_path)
        store.scatter([2, 9], -torch.ones(2, 4))
        wanted = table()
        wanted[[2, 9]] = -1
        for sync in (False, True):
            store.flush(sync=sync)
            again = self.reopen(store, tmp_path)
            if again is not None:
                with again:
                    assert again.gather(slice(None)).equal(wanted)
        store.close()

    def test_init_draws_by_its_seed_and_leaves_the_callers_generator(self, tmp_path: Path) -> None:
        with self.make(torch.zeros(1000, 7), tmp_path) as store:
            torch.manual_seed(5)
            before = torch.get_rng_state()
            assert store.init_(torch.nn.init.normal_, seed=3, std=0.02) is store
            first = store.gather(slice(None))
            assert bool((torch.get_rng_state() == before).all())
            assert 0.018 < float(first.std()) < 0.022
            store.init_(torch.nn.init.normal_, seed=3, std=0.02)
            assert store.gather(slice(None)).equal(first)
            store.init_(torch.nn.init.normal_, seed=4, std=0.02)
            assert not store.gather(slice(None)).equal(first)

    def test_init_without_a_seed_draws_from_the_callers_generator(self, store: Store) -> None:
        torch.manual_seed(5)
        store.init_(torch.nn.init.uniform_)
        first = store.gather(slice(None))
        store.init_(torch.nn.init.uniform_)
        assert not store.gather(slice(None)).equal(first)

    def test_copying_from_another_store_casts(self, store: Store) -> None:
        other = ArrayStore(np.arange(40, dtype=np.int64).reshape(10, 4)[::-1])
        assert store.copy_from(other) is store
        assert store.gather(slice(None)).cpu().equal(table().flip(0))

    def test_copying_from_a_store_of_another_shape_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="shapes must be equal"):
            store.copy_from(ArrayStore(torch.zeros(10, 5)))
        assert store.gather(slice(None)).cpu().equal(table())

    def test_others_gather_while_other_rows_are_written(self, tmp_path: Path) -> None:
        values = table(400, (16,))
        with self.make(values, tmp_path) as store, ThreadPoolExecutor(4) as pool:
            odd, even = torch.arange(1, 400, 2), torch.arange(0, 400, 2)
            readers = [pool.submit(lambda: store.gather(even).cpu().equal(values[even])) for _ in range(20)]
            for round_number in range(10):
                store.scatter(odd, torch.full((200, 16), float(round_number)))
            assert all(reader.result() for reader in readers)
            assert bool((store.gather(odd) == 9).all())

    def test_a_closed_store_is_not_written(self, store: Store) -> None:
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.scatter([0], torch.zeros(1, 4))


class ReadOnlyContract(ReadingContract):
    """For kinds, or ways to open them, that are never written."""

    def test_every_way_to_write_is_refused(self, store: Store) -> None:
        assert not store.writable
        assert "read-only" in repr(store)
        for write in (
            lambda: store.scatter([0], torch.zeros(1, 4)),
            lambda: store.init_(torch.nn.init.zeros_),
            lambda: store.copy_from(ArrayStore(torch.zeros(10, 4))),
        ):
            with pytest.raises(PermissionError, match="read-only"):
                write()
        assert store.gather(slice(None)).cpu().equal(table())
