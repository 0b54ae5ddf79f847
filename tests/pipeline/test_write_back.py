"""Write-back: distinct rows go out, changed rows come back, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore
from rowferry.stores.testing import bits, random_bits

Make = Callable[..., Pipeline]


# ---- what a writable batch is -----------------------------------------------------------------------------------


def test_a_batch_has_its_distinct_rows_in_order_and_the_way_back(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(9), batch_sampler=[[[7, 2, 7], [-1, 2, 0]]], writable=True) as pipe:
        batch = next(iter(pipe))
    assert batch.rows.tolist() == [0, 2, 7, 8]
    assert batch.index.tolist() == [[7, 2, 7], [8, 2, 0]]
    assert batch.inverse.tolist() == [[2, 1, 2], [3, 1, 0]]
    assert torch.equal(batch.values, numbered(9)[[0, 2, 7, 8]])
    assert {batch.rows.dtype, batch.inverse.dtype, batch.index.dtype} == {torch.int64}


def test_a_writable_batch_has_no_data_and_says_what_it_has(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(9), batch_size=4, writable=True) as pipe:
        batch = next(iter(pipe))
        with pytest.raises(AttributeError, match=r"values.*lookup"):
            _ = batch.data
        assert repr(batch) == "<WritableBatch 0: (4, 3) float32 on cpu>"


def test_lookup_gives_a_row_an_id_cast_and_differentiable(pipeline: Make) -> None:
    source = {"w": torch.arange(12, dtype=torch.float64).view(6, 2), "n": torch.arange(6)}
    with pipeline(source, batch_sampler=[[[4, 1], [4, 4]]], writable=True, dtype=torch.float32) as pipe:
        batch = next(iter(pipe))
        weight = batch.values["w"].requires_grad_()
        found = batch.lookup()
        assert found["w"].shape == (2, 2, 2)
        assert found["w"].dtype == torch.float32
        assert weight.dtype == torch.float64
        assert found["n"].tolist() == [[4, 1], [4, 4]]
        found["w"].sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[1, 1], [3, 3]]  # gradients of a row's uses add up


def test_without_write_back_nothing_changes(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(20)
    with pipeline(values, batch_size=3, writable=True) as pipe:
        for batch in pipe:
            batch.values.fill_(7)
        pipe.flush()
    assert torch.equal(values, numbered(20))


# ---- what may be written ----------------------------------------------------------------------------------------


def test_values_changed_in_place_or_passed_new_reach_the_store(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(20)
    with pipeline(values, batch_size=4, writable=True) as pipe:
        for batch in pipe:
            if batch.number % 2:
                batch.values.add_(1)
                batch.write_back()
            else:
                batch.write_back(batch.values + 1)
    assert torch.equal(values, numbered(20) + 1)


def test_the_last_write_back_of_a_batch_stands(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    values = numbered(6)
    with pipeline(values, batch_sampler=[[1, 2], [2, 3]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(torch.full((2, 3), 7.0))
            pipe.flush()
            batch.write_back(torch.full((2, 3), 8.0 + batch.number))
    assert values[:, 0].tolist() == [0, 8, 9, 9, 400, 500]


def test_later_batches_see_what_was_written_and_earlier_ones_do_not(pipeline: Make) -> None:
    with pipeline(torch.zeros(4, 1), batch_sampler=[[0, 1], [1, 2], [1, 0]], writable=True) as pipe:
        kept = []
        for batch in pipe:
            kept.append(batch)
            batch.write_back(batch.values + 1)
        assert [batch.values.view(-1).tolist() for batch in kept] == [[0, 0], [1, 0], [1, 2]]


def test_what_was_passed_may_be_changed_at_once(pipeline: Make) -> None:
    memory = torch.zeros(8, 1)
    with pipeline(memory, batch_size=2, writable=True) as pipe:
        new = torch.empty(2, 1)
        for batch in pipe:
            new.fill_(batch.number + 1)
            batch.write_back(new)
            new.fill_(-1)
    assert memory.view(-1).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_some_columns_of_a_dict_may_be_written(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    source = {"w": numbered(9), "m": numbered(9), "v": numbered(9)}
    with pipeline(source, batch_size=2, writable=True) as pipe:
        for batch in pipe:
            batch.write_back({"m": batch.values["w"] + 1})
    assert torch.equal(source["m"], numbered(9) + 1)
    assert torch.equal(source["w"], numbered(9))
    assert torch.equal(source["v"], numbered(9))


def test_none_skips_a_column_of_a_tuple(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    w, m = numbered(9), numbered(9)
    with pipeline((w, m), batch_size=2, writable=True) as pipe:
        for batch in pipe:
            batch.write_back((None, batch.values[1] + 1))
    assert torch.equal(w, numbered(9))
    assert torch.equal(m, numbered(9) + 1)


def test_several_tables_are_written_by_name(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    users, films, years = numbered(5), numbered(9), torch.zeros(9)
    items = [([1, 1], [8, 0]), ([], [8]), ([4, 1], [])]
    with pipeline(
        {"u": users, "f": {"x": films, "y": years}}, batch_sampler=items, index={"u": 0, "f": 1}, writable=True
    ) as pipe:
        for batch in pipe:
            assert batch.rows["u"].tolist() == sorted(set(items[batch.number][0]))
            batch.values["u"].add_(1)
            if batch.number == 0:
                batch.write_back()
            else:
                batch.write_back({"u": batch.values["u"], "f": {"y": batch.values["f"]["y"] + 1}})
    assert (users - numbered(5))[:, 0].tolist() == [0, 2, 0, 0, 1]
    assert torch.equal(films, numbered(9))
    assert years.tolist() == [0] * 8 + [1]


def test_values_of_another_dtype_are_rounded_once_to_the_stores(pipeline: Make) -> None:
    memory = torch.zeros(3, 1, dtype=torch.float16)
    with pipeline(memory, batch_sampler=[[2]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(torch.tensor([[1 + 2**-11 + 2**-40]], dtype=torch.float64))
    assert memory.tolist() == [[0], [0], [1 + 2**-10]]


def test_small_updates_add_up_in_the_stores_dtype_though_batches_are_cast(pipeline: Make) -> None:
    memory, plain = torch.ones(1, 1), torch.ones(1, 1)
    for _ in range(100):
        plain.add_(1e-4)
    with pipeline(memory, batch_sampler=[[0]] * 100, writable=True, dtype=torch.float16) as pipe:
        for batch in pipe:
            assert batch.lookup().dtype == torch.float16
            batch.values.add_(1e-4)
            batch.write_back()
    assert torch.equal(memory, plain)
    assert abs(memory.item() - 1.01) < 2e-6


def test_values_with_a_gradient_are_written_without_it(pipeline: Make) -> None:
    memory = torch.zeros(3, 1)
    with pipeline(memory, batch_size=3, writable=True) as pipe:
        for batch in pipe:
            batch.write_back((batch.values.requires_grad_() + 1) * 2)
    assert memory.view(-1).tolist() == [2, 2, 2]
    assert not memory.requires_grad


def test_values_in_strides_are_written_by_their_elements(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = torch.zeros(4, 3)
    with pipeline(memory, batch_size=4, writable=True) as pipe:
        for batch in pipe:
            batch.write_back(numbered(4).T.contiguous().T)
    assert torch.equal(memory, numbered(4))


def test_an_empty_batch_may_be_written_back(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(4)
    with pipeline(memory, batch_sampler=[[], [1], []], writable=True) as pipe:
        for batch in pipe:
            assert batch.values.shape == (len(batch.rows), 3)
            batch.write_back()
            pipe.flush()
    assert torch.equal(memory, numbered(4))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=str
)
def test_every_dtype_comes_back_bit_for_bit(pipeline: Make, dtype: torch.dtype) -> None:
    memory, new = random_bits((9, 3), dtype, 0), random_bits((9, 3), dtype, 1)
    with pipeline(memory, batch_sampler=[[1, 5], [5, 8]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(new[batch.rows])
    for row in range(9):
        assert bits(memory[row]) == bits((new if row in (1, 5, 8) else random_bits((9, 3), dtype, 0))[row])


@given(
    asked=st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=10),
    lookahead=st.integers(0, 5),
    depth=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_only_rows_that_were_written_change(asked: list[list[int]], lookahead: int, depth: int, data: st.DataObject) -> None:
    written = data.draw(st.sets(st.integers(0, max(len(asked) - 1, 0))))
    memory = random_bits((7, 5), torch.uint8)
    before = memory.clone()
    with Pipeline(
        ArrayStore(memory), batch_sampler=asked, device="cpu", mover="copy", lookahead=lookahead, depth=depth, writable=True
    ) as pipe:
        for batch in pipe:
            if batch.number in written:
                batch.write_back(batch.values + 1)
    uses = [sum(row in asked[number] for number in written if number < len(asked)) for row in range(7)]
    assert torch.equal(memory, before + torch.tensor(uses, dtype=torch.uint8)[:, None])
