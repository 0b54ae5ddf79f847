"""Sizes: what does not fit is made smaller and said, or refused with what would fit."""

from __future__ import annotations

import numpy as np
import pytest

import rowferry as rf
from rowferry._bench.reading import stamped
from rowferry._bench.sizes import Room, Sizes, filling, fit, pace

GIB = 1 << 30
ROOM = Room(host_free=100 * GIB, device_free=100 * GIB, on_gpu=True, filled=16 * GIB, seconds=300, quick=False)


def test_the_usual_sizes_on_a_large_machine() -> None:
    assert fit(None, 512, None, ROOM) == Sizes(16 * GIB // 512, 512, 131_072, ())
    assert fit(None, 512, None, ROOM._replace(quick=True)).rows == 2 * GIB // 512
    assert fit(None, 512, None, ROOM._replace(on_gpu=False)).batch == 8192


def test_what_was_not_asked_for_is_made_to_fit_and_said() -> None:
    sizes = fit(None, 512, None, ROOM._replace(host_free=GIB, device_free=1 << 20))
    assert sizes.rows * 512 == GIB // 4
    assert sizes.batch * 512 * 8 <= 1 << 20
    assert len(sizes.notes) == 2
    assert f"{sizes.rows:,} rows in place of 33,554,432" in sizes.notes[0]
    assert f"{sizes.batch:,} rows in place of 131,072" in sizes.notes[1]


def test_a_table_that_would_take_long_to_make_is_smaller_or_refused() -> None:
    slow = ROOM._replace(filled=1 << 20)  # 30 MiB in a tenth of the time
    sizes = fit(None, 512, None, slow)
    assert sizes.rows * 512 == 30 << 20
    assert "are made in the time" in sizes.notes[0]
    with pytest.raises(ValueError, match=r"pass --rows 245760 or fewer, or --seconds") as refused:
        fit(1 << 20, 512, None, slow)
    seconds = float(str(refused.value).split("--seconds ")[1].split()[0])
    assert fit(1 << 20, 512, None, slow._replace(seconds=seconds)).rows == 1 << 20


def test_what_was_asked_for_and_does_not_fit_is_refused_with_what_would() -> None:
    small = ROOM._replace(host_free=GIB, device_free=1 << 20)
    with pytest.raises(MemoryError, match=r"pass --rows (\d+) or fewer") as refused:
        fit(10**9, 512, None, small)
    most = int(str(refused.value).split("--rows ")[1].split()[0])
    assert fit(most, 512, None, small).rows == most
    with pytest.raises(MemoryError, match="pass --batch 256 or fewer"):
        fit(None, 512, 257, small)


@pytest.mark.parametrize(("words", "said"), [((0, 4, 1), "--rows"), ((1, 0, 1), "--row-bytes"), ((1, 4, 0), "--batch")])
def test_sizes_start_at_one(words: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} is 0"):
        fit(*words, ROOM)


def test_how_fast_a_table_is_made_is_measured() -> None:
    assert filling(lambda rows: stamped(rows, 64), 64, GIB) > 1 << 20


def test_a_batch_larger_than_the_default_slot_gets_staging_of_its_own() -> None:
    assert Sizes(1, 512, 131_072, ()).staging() == {}
    assert Sizes(1, 1 << 20, 1024, ()).staging() == {"staging_bytes": 16 << 30}


def test_rings_are_short_where_batches_are_huge() -> None:
    assert Sizes(1, 4, 100_000_000, ()).ring() == 4
    assert Sizes(1, 4, 1000, ()).ring() == 1024
    assert Sizes(1, 4, 1000, ()).ring(200) == 200


def test_a_fast_store_keeps_its_batch() -> None:
    assert pace(rf.as_store(np.zeros((100, 4), np.float32)), 64, 10.0) == (64, ())


def test_a_store_that_is_too_slow_for_its_batch_gets_a_smaller_one_and_a_line() -> None:
    store = rf.as_store(np.zeros((100_000, 128), np.float32))
    batch, (note,) = pace(store, 100_000, 1e-4)
    assert 1 <= batch < 100_000
    assert f"batches of {batch:,} rows" in note
