"""What an epoch of a reading pipeline gives: rows, order, epochs, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import bits, random_bits

Make = Callable[..., Pipeline]


def rows_seen(pipe: Pipeline) -> list[list[int]]:
    """Row numbers of each batch of an epoch, told by the rows themselves."""
    return [(batch.data[:, 0] // 100).long().tolist() for batch in pipe]


# ---- rows and order ---------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_asked_for_with_duplicates_kept(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(10)
    asked = [[0, 1, 2, 3, 1], [9, 0, 9], [5], [9, 8, 7]]
    with pipeline(values, batch_sampler=asked) as pipe:
        for index, batch in zip(asked, pipe, strict=True):
            assert torch.equal(batch.data, values[index])
            assert batch.data.is_contiguous()
            assert batch.index.tolist() == index
            assert batch.index.dtype == torch.int64


@given(
    asked=st.lists(st.lists(st.integers(-7, 6), max_size=9), max_size=12), lookahead=st.integers(0, 5), depth=st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_any_list_of_batches_is_served_as_plain_indexing_would(asked: list[list[int]], lookahead: int, depth: int) -> None:
    values = torch.arange(14).view(7, 2)
    with Pipeline(
        ArrayStore(values),
        batch_sampler=asked,
        device="cpu",
        mover="copy",
        lookahead=lookahead,
        depth=depth,
        staging_bytes=4096,
    ) as pipe:
        found = [batch.data for batch in pipe]
    assert len(found) == len(asked)
    for index, rows in zip(asked, found, strict=True):
        assert torch.equal(rows, values[torch.tensor(index, dtype=torch.int64)])


def test_batches_that_are_kept_stay_right(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(40), batch_size=4) as pipe:
        kept = [batch.data for batch in list(pipe)]
    assert [(rows[:, 0] // 100).long().tolist() for rows in kept] == [list(range(k, k + 4)) for k in range(0, 40, 4)]
    assert len({rows.data_ptr() for rows in kept}) == len(kept)


def test_changing_a_batch_changes_neither_the_store_nor_other_batches(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(6)
    with pipeline(values, batch_sampler=[[1, 2], [2, 1], [1]]) as pipe:
        for batch in pipe:
            assert torch.equal(batch.data, numbered(6)[batch.index])
            batch.data.add_(1)
            batch.index.zero_()
    assert torch.equal(values, numbered(6))


def test_a_batch_size_runs_over_every_row_and_the_last_batch_is_smaller(
    pipeline: Make, numbered: Callable[..., Tensor]
) -> None:
    with pipeline(numbered(10), batch_size=4) as pipe:
        assert len(pipe) == 3
        assert rows_seen(pipe) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_drop_last_leaves_the_smaller_batch_out(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(10), batch_size=4, drop_last=True) as pipe:
        assert len(pipe) == 2
        assert rows_seen(pipe) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_larger_than_the_table_is_the_table(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(3), batch_size=100) as pipe:
        assert rows_seen(pipe) == [[0, 1, 2]]


def test_a_table_without_rows_ends_at_once(pipeline: Make) -> None:
    with pipeline(torch.empty(0, 64), batch_size=4) as pipe:
        assert len(pipe) == 0
        assert list(pipe) == []


def test_rows_without_bytes_are_served_with_their_shape(pipeline: Make) -> None:
    with pipeline(torch.empty(5, 0), batch_size=2) as pipe:
        assert [tuple(batch.data.shape) for batch in pipe] == [(2, 0), (2, 0), (1, 0)]


def test_rows_of_rank_zero_and_rank_three_keep_their_shape(pipeline: Make) -> None:
    for values in (torch.arange(6), torch.arange(6 * 24).view(6, 2, 3, 4)):
        with pipeline(values, batch_sampler=[[5, 0], [[1, 2], [3, 3]]]) as pipe:
            first, second = [batch.data for batch in pipe]
        assert torch.equal(first, values[[5, 0]])
        assert torch.equal(second, values[torch.tensor([[1, 2], [3, 3]])])


def test_a_sampler_of_row_numbers_is_grouped_by_batch_size(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(10), sampler=[9, 7, 5, 3, 1], batch_size=2) as pipe:
        assert len(pipe) == 3
        assert rows_seen(pipe) == [[9, 7], [5, 3], [1]]


# ---- epochs and shuffle -----------------------------------------------------------------------------------------


def test_a_shuffled_epoch_has_every_row_once(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(50), batch_size=8, shuffle=True) as pipe:
        seen = [row for rows in rows_seen(pipe) for row in rows]
    assert seen != sorted(seen)
    assert sorted(seen) == list(range(50))


def test_shuffle_depends_on_seed_and_epoch_and_on_nothing_else(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(50)
    with Pipeline(values, batch_size=8, shuffle=True, seed=3, device="cpu") as plain:
        wanted = [rows_seen(plain) for _ in range(3)]
    with pipeline(values, batch_size=8, shuffle=True, seed=3) as pipe:
        assert [rows_seen(pipe) for _ in range(3)] == wanted
    with pipeline(values, batch_size=8, shuffle=True, seed=4) as other:
        assert rows_seen(other) != wanted[0]
    assert wanted[0] != wanted[1] != wanted[2]


def test_set_epoch_gives_that_epoch_and_the_ones_after_it(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(30), batch_size=7, shuffle=True) as pipe:
        epochs = [rows_seen(pipe) for _ in range(4)]
        pipe.set_epoch(2)
        assert [rows_seen(pipe) for _ in range(2)] == epochs[2:]
        pipe.set_epoch(0)
        assert rows_seen(pipe) == epochs[0]


def test_set_epoch_reaches_a_sampler_that_knows_it(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Any:
            return iter([[self.epochs[-1]]])

    sampler = Sampler()
    with ahead(numbered(10), batch_sampler=sampler) as pipe:
        assert [rows_seen(pipe), rows_seen(pipe)] == [[[0]], [[1]]]
        pipe.set_epoch(7)
        assert rows_seen(pipe) == [[7]]


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "3"])
def test_an_epoch_that_is_no_number_from_zero_is_refused(ahead: Make, numbered: Callable[..., Tensor], epoch: Any) -> None:
    with ahead(numbered(4), batch_size=2) as pipe, pytest.raises(ValueError, match="epoch"):
        pipe.set_epoch(epoch)


def test_epochs_repeat_and_enumerate_starts_with_the_first_batch(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(9), batch_size=4) as pipe:
        for _ in range(3):
            counted = [(number, batch.number, batch.index[0].item()) for number, batch in enumerate(pipe)]
            assert counted == [(0, 0, 0), (1, 1, 4), (2, 2, 8)]


def test_a_sampler_without_a_length_gives_a_pipeline_without_one(ahead: Make, numbered: Callable[..., Tensor]) -> None:
    with ahead(numbered(4), batch_sampler=(batch for batch in [[0], [1]])) as pipe, pytest.raises(TypeError, match="length"):
        len(pipe)


def test_a_one_shot_iterator_serves_one_epoch_and_refuses_the_second(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_sampler=iter([[0], [3]])) as pipe:
        assert rows_seen(pipe) == [[0], [3]]
        with pytest.raises(RuntimeError, match="once"):
            iter(pipe)


# ---- casts ------------------------------------------------------------------------------------------------------


def test_a_bare_dtype_casts_floating_columns_and_leaves_integers(pipeline: Make) -> None:
    values = torch.tensor([65504, 65519.996, 65520, 2**-24, 2**-25, 1 + 2**-11, 1 + 3 * 2**-11], dtype=torch.float32)
    with pipeline({"x": values, "y": torch.arange(7)}, batch_size=7, dtype=torch.float16) as pipe:
        batch = next(iter(pipe))
    wanted = [65504, 65504, float("inf"), 2**-24, 0, 1, 1 + 2**-9]
    assert batch.data["x"].tolist() == wanted
    assert batch.data["x"].dtype == torch.float16
    assert batch.data["y"].dtype == torch.int64


def test_a_dict_of_dtypes_casts_those_columns_integers_too(pipeline: Make) -> None:
    source = {"x": torch.rand(5, 2), "y": torch.arange(5), "z": torch.rand(5)}
    with pipeline(source, batch_size=5, dtype={"y": torch.float16, "z": torch.bfloat16}) as pipe:
        data = next(iter(pipe)).data
    assert torch.equal(data["x"], source["x"])
    assert torch.equal(data["y"], source["y"].to(torch.float16))
    assert torch.equal(data["z"], source["z"].to(torch.bfloat16))


def test_float64_is_rounded_once(pipeline: Make) -> None:
    with pipeline(torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64), batch_size=1, dtype=torch.float16) as pipe:
        assert next(iter(pipe)).data.item() == 1 + 2**-10


def test_nan_stays_nan(pipeline: Make) -> None:
    with pipeline(torch.tensor([float("nan"), 1.0]), batch_size=2, dtype=torch.bfloat16) as pipe:
        assert next(iter(pipe)).data.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("dtype", "error", "said"),
    [
        ({"q": torch.float16}, ValueError, "'q'"),
        ("float16", TypeError, "dtype"),
        ({"x": "float16"}, TypeError, "'x'"),
        ({"x": torch.int32}, TypeError, "cast"),
    ],
)
def test_a_cast_that_cannot_be_is_refused_when_the_pipeline_is_made(
    ahead: Make, dtype: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ahead({"x": torch.rand(3)}, batch_size=1, dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.uint32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_every_dtype_crosses_bit_for_bit(pipeline: Make, dtype: torch.dtype) -> None:
    values = random_bits((20, 3), dtype)
    index = [3, 3, 19, 0]
    with pipeline(ArrayStore(values), batch_sampler=[index, index]) as pipe:
        for batch in pipe:
            assert batch.data.dtype == dtype
            assert bits(batch.data) == b"".join(bits(values[row]) for row in index)


# ---- on a CPU, rows of files in order ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_batches_in_order_stay_as_they_are_when_others_are_changed_and_windows_go_on(
    numbered: Callable[..., Tensor], dtype: torch.dtype | None
) -> None:
    values = numbered(101)
    wanted = values if dtype is None else values.to(dtype)
    with Pipeline(ArrayStore(values), batch_size=7, device="cpu", mover="copy", dtype=dtype, staging_bytes=4096) as pipe:
        for _ in range(2):
            kept = list(pipe)
            assert torch.equal(torch.cat([batch.data for batch in kept]), wanted)
            for batch in kept[::2]:
                batch.data.fill_(-1)
            for number, batch in enumerate(kept):
                rows = wanted[7 * number : 7 * number + 7]
                assert torch.equal(batch.data, rows if number % 2 else torch.full_like(rows, -1))
    assert torch.equal(values, numbered(101))


def test_a_graph_over_one_batch_in_order_outlives_a_change_of_its_neighbour(numbered: Callable[..., Tensor]) -> None:
    values = numbered(20)
    with Pipeline(ArrayStore(values), batch_size=5, device="cpu", mover="copy") as pipe:
        batches = list(pipe)
    weight = torch.ones_like(batches[1].data, requires_grad=True)
    loss = (weight * batches[1].data).sum()
    batches[2].data.zero_()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, values[5:10])


def test_batches_in_order_are_parts_of_what_their_window_was_read_into(numbered: Callable[..., Tensor]) -> None:
    with Pipeline(ArrayStore(numbered(64)), batch_size=4, device="cpu", mover="copy") as pipe:
        batches = list(pipe)
    memories = [batch.data.untyped_storage().data_ptr() for batch in batches]
    assert len(set(memories)) < len(batches)
    assert len({batch.data.data_ptr() for batch in batches}) == len(batches)
