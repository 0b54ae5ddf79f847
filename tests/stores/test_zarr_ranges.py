"""Places of rows are told apart without sorting where they are close together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowferry.stores._zarr_ranges import distinct_places


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 1000]))
def test_distinct_places_are_those_sorted_close_together_or_far_apart(places: list[int], far: int) -> None:
    given_places = np.array(places, np.int64) * far
    distinct, which = distinct_places(given_places)
    assert distinct.tolist() == sorted(set(given_places.tolist()))
    assert distinct[which].tolist() == given_places.tolist()
