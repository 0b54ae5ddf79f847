"""The requests for many ranges: all bytes, few of any other, of bounded length."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowferry.stores._byte_ranges import GAP, REQUEST_BYTES, REQUESTS_OF_A_CALL, Records, calls_of, copy_records


def records(starts: list[int], width: int, objects: list[int] | None = None) -> Records:
    owner = np.zeros(len(starts), np.int64) if objects is None else np.array(objects)
    return Records(owner, np.array(starts, np.int64), np.zeros((len(starts), width), np.uint8))


def requests(wanted: Records) -> list[tuple[int, int]]:
    return [pair for call in calls_of(wanted) for pair in zip(call.starts, call.stops, strict=True)]


def test_ranges_that_touch_or_lie_close_are_one_request() -> None:
    assert requests(records([0, 100, 200], 100)) == [(0, 300)]
    assert requests(records([0, 100 + GAP], 100)) == [(0, 200 + GAP)]
    assert requests(records([0, 101 + GAP], 100)) == [(0, 100), (101 + GAP, 201 + GAP)]


def test_a_long_run_is_cut_between_ranges_so_that_its_parts_come_side_by_side() -> None:
    found = requests(records([row * 1000 for row in range(10_000)], 1000))
    assert found[0][0] == 0
    assert found[-1][1] == 10_000_000
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(found))
    assert all(stop - start <= REQUEST_BYTES + 1000 for start, stop in found)
    assert len(found) == 5


def test_a_range_longer_than_a_request_is_narrowed() -> None:
    width = 2 * REQUEST_BYTES + 5
    parts = list(records([7], width).narrow())
    assert [part.width for part in parts] == [REQUEST_BYTES, REQUEST_BYTES, 5]
    assert [requests(part)[0][0] for part in parts] == [7, 7 + REQUEST_BYTES, 7 + 2 * REQUEST_BYTES]


def test_nothing_to_read_is_no_request() -> None:
    assert requests(records([], 10)) == []
    assert requests(records([3, 4], 0)) == []


@settings(max_examples=150, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**22)), min_size=1, max_size=60, unique=True),
    width=st.sampled_from([1, 3, 100, 1000, 5000]),
    dense=st.booleans(),
)
def test_every_range_gets_its_bytes_and_calls_stay_small(places: list[tuple[int, int]], width: int, dense: bool) -> None:
    if dense:
        places = [(owner, at % 4000) for owner, at in places]
    places = sorted(set(places))
    wanted = records([at for _, at in places], width, [owner for owner, _ in places])
    rng = np.random.default_rng(0)
    objects: list[NDArray[np.uint8]] = [rng.integers(0, 256, 2**22 + 5000, np.uint8) for _ in range(4)]
    covered = 0
    for call in calls_of(wanted):
        assert len(call.starts) <= REQUESTS_OF_A_CALL
        assert call.nbytes <= REQUEST_BYTES + width
        assert all(b > a for a, b in zip(call.starts, call.stops, strict=True))
        data = b"".join(objects[call.object][a:b].tobytes() for a, b in zip(call.starts, call.stops, strict=True))
        copy_records(data, call.places, wanted.out[call.records])
        assert call.records.start == covered
        covered = call.records.stop
    assert covered == len(places)
    for (owner, at), found in zip(places, wanted.out, strict=True):
        assert np.array_equal(found, objects[owner][at : at + width])
