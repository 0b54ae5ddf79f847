"""The fakes do what they say: tests of everything else stand on them."""

from __future__ import annotations

import threading

import pytest
import torch

from rowferry.stores.testing import FailingStore, OracleStore, SlowStore


def test_a_slow_store_reads_when_it_is_let() -> None:
    store = SlowStore(OracleStore(torch.arange(4.0)))
    found: list[list[float]] = []
    store.reads.clear()
    reader = threading.Thread(target=lambda: found.append(store.gather([3]).tolist()))
    reader.start()
    assert store.blocked.wait(10)
    assert not found
    store.scatter([3], torch.tensor([9.0]))  # writes are another matter
    store.reads.set()
    reader.join()
    assert found == [[9.0]]


def test_a_slow_store_writes_when_it_is_let() -> None:
    store = SlowStore(OracleStore(torch.arange(4.0)))
    store.writes.clear()
    writer = threading.Thread(target=lambda: store.scatter([0], torch.tensor([9.0])))
    writer.start()
    assert store.blocked.wait(10)
    assert store.gather([0]).tolist() == [0]
    store.writes.set()
    writer.join()
    assert store.gather([0]).tolist() == [9]


def test_a_failing_store_fails_for_its_rows_only_and_touches_nothing() -> None:
    oracle = OracleStore(torch.arange(4.0))
    store = FailingStore(oracle, PermissionError(13, "sector 37"), rows=[2])
    assert store.gather([0, 3]).tolist() == [0, 3]
    for use in (lambda: store.gather([0, 2]), lambda: store.scatter([1, 2], torch.zeros(2))):
        with pytest.raises(PermissionError, match="sector 37") as caught:
            use()
        assert caught.value.errno == 13
    assert oracle.values.tolist() == [0, 1, 2, 3]


def test_a_failing_store_fails_at_the_calls_it_was_told() -> None:
    store = FailingStore(OracleStore(torch.arange(4.0)), OSError("now"), reads=[2], writes=[1, 2])
    outcomes = []
    for _ in range(3):
        for use in (lambda: store.gather([0]), lambda: store.scatter([0], torch.zeros(1))):
            try:
                use()
                outcomes.append(True)
            except OSError:
                outcomes.append(False)
    assert outcomes == [True, False, False, False, True, True]
    assert (store.read_count, store.write_count) == (3, 3)


def test_a_broken_store_fails_until_it_is_healed() -> None:
    store = FailingStore(OracleStore(torch.arange(4.0)), OSError("gone"), broken=True)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            store.gather([0])
    store.heal()
    assert store.gather([1]).tolist() == [1]


def test_an_oracle_does_not_keep_the_callers_tensor() -> None:
    values = torch.zeros(3)
    oracle = OracleStore(values)
    values[0] = 5
    oracle.scatter([1], torch.ones(1))
    assert oracle.values.tolist() == [0, 1, 0]
    assert values.tolist() == [5, 0, 0]
