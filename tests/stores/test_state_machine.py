"""Any sequence of calls leaves every store as it leaves the oracle, and a plain NumPy array."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rowferry.stores import ArrayStore, DeviceStore, MemmapStore, PinnedStore, Store, ZarrStore, create_store
from rowferry.stores.testing import OracleStore, bits, random_bits, write_npy_file

ROWS = 9
INDICES = st.one_of(
    st.lists(st.integers(-ROWS, ROWS - 1), max_size=12),
    st.lists(st.integers(-ROWS, ROWS - 1), min_size=6, max_size=6).map(lambda rows: np.array(rows, np.int8).reshape(2, 3)),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda ends: slice(*ends)),
    st.integers(-ROWS, ROWS - 1),
)
SEEDS = st.integers(0, 2**32)


class StoreMachine(RuleBasedStateMachine):
    """A store beside an oracle and an array; each rule does the same to all three."""

    def open(self, values: torch.Tensor) -> Store:
        """The store under test, with ``values``."""
        raise NotImplementedError

    def reopen(self) -> Store | None:
        """The same rows by a new store, the old one closed; None for a kind that lives in memory."""
        return None

    @initialize(
        dtype=st.sampled_from([torch.int32, torch.float16, torch.bool, torch.complex64]), wide=st.sampled_from([0, 1, 3])
    )
    def begin(self, dtype: torch.dtype, wide: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        values = random_bits((ROWS, wide), dtype)
        self.array = values.numpy().copy()
        self.oracle = OracleStore(values)
        self.store = self.open(values)

    @rule(index=INDICES)
    def gather(self, index: Any) -> None:
        rows = self.store.gather(index)
        assert bits(rows) == bits(self.oracle.gather(index)) == self.array[index].tobytes()
        assert tuple(rows.shape) == self.array[index].shape

    @rule(index=INDICES, seed=SEEDS)
    def scatter(self, index: Any, seed: int) -> None:
        shape = self.array[index].shape
        values = random_bits(shape, self.store.dtype, seed)
        self.store.scatter(index, values)
        self.oracle.scatter(index, values)
        rows = np.arange(ROWS)[index].reshape(-1)
        for row, value in zip(rows, values.numpy().reshape(rows.size, *self.array.shape[1:]), strict=True):
            self.array[row] = value

    @rule(row=st.one_of(st.integers(ROWS, 2**40), st.integers(-(2**40), -ROWS - 1)))
    def ask_for_a_row_that_is_not_there(self, row: int) -> None:
        for store in (self.store, self.oracle):
            with pytest.raises(IndexError):
                store.gather([0, row])
            with pytest.raises(IndexError):
                store.scatter([0, row], np.ones((2, *self.array.shape[1:])))

    @rule(sync=st.booleans())
    def flush(self, sync: bool) -> None:
        self.store.flush(sync=sync)

    @rule()
    def copy_from_the_other_way_round(self) -> None:
        self.array = self.array[::-1].copy()
        for store in (self.store, self.oracle):
            store.copy_from(ArrayStore(self.array))

    @rule()
    def open_again(self) -> None:
        again = self.reopen()
        if again is not None:
            self.store = again

    @invariant()
    def all_hold_the_same(self) -> None:
        if hasattr(self, "store"):
            assert bits(self.store.gather(slice(None))) == bits(self.oracle.values) == self.array.tobytes()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ArrayMachine(StoreMachine):
    def open(self, values: torch.Tensor) -> Store:
        return ArrayStore(values.clone())


class StridedMachine(StoreMachine):
    def open(self, values: torch.Tensor) -> Store:
        return ArrayStore(np.array(values.numpy(), order="F")[:, ::-1].copy("F")[:, ::-1])


class PinnedMachine(StoreMachine):
    def open(self, values: torch.Tensor) -> Store:
        return PinnedStore.from_array(values)


class DeviceMachine(StoreMachine):
    def open(self, values: torch.Tensor) -> Store:
        return DeviceStore(values.clone())


class MemmapMachine(StoreMachine):
    fortran = False
    big_endian = False

    def open(self, values: torch.Tensor) -> Store:
        write_npy_file(self.folder / "x.npy", values, fortran=self.fortran, big_endian=self.big_endian)
        return MemmapStore(self.folder / "x.npy", "r+")

    def reopen(self) -> Store:
        self.store.close()
        return MemmapStore(self.folder / "x.npy", "r+")


class BigEndianFortranMachine(MemmapMachine):
    fortran = True
    big_endian = True


class ZarrMachine(StoreMachine):
    def open(self, values: torch.Tensor) -> Store:
        shape = tuple(values.shape)
        return create_store(self.folder / "x.zarr", shape, values.dtype, chunks=2, shards=4).copy_from(ArrayStore(values))

    def reopen(self) -> Store:
        self.store.close()
        return ZarrStore(self.folder / "x.zarr", "r+")


MACHINES = [ArrayMachine, StridedMachine, PinnedMachine, DeviceMachine, MemmapMachine, BigEndianFortranMachine, ZarrMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_behaves_as_the_oracle(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=15, deadline=None))
