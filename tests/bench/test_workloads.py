"""What is asked for: batches that are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowferry._bench.workloads import Batches, apart, ring_length, truncated_zipf, uniform


def test_a_sampler_goes_round_its_ring_as_often_as_it_is_told() -> None:
    ring = uniform(10, 3, 2)
    sampler = Batches(ring, 5)
    assert len(sampler) == 5
    assert [each is ring[number % 2] for number, each in enumerate(sampler)] == [True] * 5
    sampler.count = 1
    assert len(list(sampler)) == 1


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5000), batch=st.integers(1, 200))
def test_every_workload_asks_for_rows_that_exist(rows: int, batch: int) -> None:
    for ring in (uniform(rows, batch, 3), truncated_zipf(rows, batch, 3), apart(rows, batch, 3)):
        ids = np.concatenate(ring)
        assert ids.dtype == np.int64
        assert ids.min() >= 0
        assert ids.max() < rows


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 500), batch=st.integers(1, 200), most=st.integers(1, 5))
def test_batches_that_are_written_share_no_row(rows: int, batch: int, most: int) -> None:
    ids = np.concatenate(ring := apart(rows, batch, most))
    assert len(np.unique(ids)) == len(ids)
    assert len(ring) <= most
    assert {len(index) for index in ring} == {min(batch, rows)}


def test_zipf_ids_follow_the_power_law_between_the_first_rank_and_the_last() -> None:
    rows, exponent = 1000, 1.05
    ids = np.concatenate(truncated_zipf(rows, 200_000, 2, exponent))
    counts = np.sort(np.bincount(ids, minlength=rows))[::-1] / len(ids)
    edges = np.arange(1, rows + 1, dtype=float)
    cumulated = (edges ** (1 - exponent) - 1) / (rows ** (1 - exponent) - 1)  # of the continuous law, at each rank
    expected = np.diff(cumulated)
    assert counts[:20] == pytest.approx(expected[:20], rel=0.05)
    assert counts[0] / counts[9] == pytest.approx(expected[0] / expected[9], rel=0.1)


def test_zipf_ids_lie_apart_in_the_table_and_hardly_any_repeat_is_a_neighbour() -> None:
    ids = truncated_zipf(1_000_000, 100_000, 1)[0]
    frequent = np.sort(np.argsort(np.bincount(ids, minlength=1_000_000))[-100:])
    assert np.diff(frequent).min() > 1


def test_the_ring_is_long_for_small_batches_and_never_short() -> None:
    assert (ring_length(10), ring_length(8192), ring_length(10_000_000)) == (1024, 1024, 64)
