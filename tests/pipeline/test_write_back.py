"""Write-back: distinct rows go out, changed rows come back, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.pipeline import Pipeline
from rowferry.stores import ArrayStore, MemmapStore, PinnedStore, Store, ZarrStore, create_store
from rowferry.stores.testing import OracleStore, bits, random_bits, write_npy_file

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


# ---- flush ------------------------------------------------------------------------------------------------------


def test_when_flush_returns_every_row_written_is_in_its_store(pipeline: Make) -> None:
    memory = torch.zeros(6, 1)
    with pipeline(memory, batch_sampler=[[0, 1], [1, 2], [5], [1]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
            pipe.flush()
            written = torch.zeros(6, 1)
            for index in [[0, 1], [1, 2], [5], [1]][: batch.number + 1]:
                written[index] += 1
            assert torch.equal(memory, written)


def test_flush_before_and_after_an_epoch_is_fine(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    with pipeline(numbered(4), batch_size=2, writable=True) as pipe:
        pipe.flush()
        list(pipe)
        pipe.flush(sync=True)


def test_flush_does_not_end_the_window(ahead: Make) -> None:
    """A batch that was flushed may be written again, and its window goes on."""
    memory = torch.zeros(4, 1)
    with ahead(memory, batch_sampler=[[0], [1], [2], [0, 1, 2, 3]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
            pipe.flush()
            batch.write_back(batch.values + 2)
    assert memory.view(-1).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize("ending", ["end", "break", "close", "with", "iter", "error", "del"])
def test_every_ending_drains_first(windowed: Make, ending: str) -> None:
    values = torch.zeros(12, 1)
    store = OracleStore(values)
    pipe = windowed(store, batch_size=2, writable=True)
    batches: Any = iter(pipe)
    for _ in range(6 if ending == "end" else 3):
        batch = next(batches)
        batch.write_back(batch.values + 1)
    taken = 12 if ending == "end" else 6
    if ending == "end":
        assert next(batches, None) is None
    elif ending == "close":
        pipe.close()
    elif ending == "with":
        with pipe:
            pass
    elif ending == "iter":
        iter(pipe)
    elif ending == "error":
        with pytest.raises(ZeroDivisionError), pipe:
            raise ZeroDivisionError
    elif ending == "del":
        del batches, batch
    if ending == "break":
        for batch in pipe:
            batch.write_back(batch.values)
            break
    assert store.values.view(-1).tolist() == [1] * taken + [0] * (12 - taken)
    pipe.close()


def test_without_lookahead_rows_have_landed_when_the_next_call_returns(numbered: Callable[..., Tensor]) -> None:
    memory = torch.zeros(6, 1)
    with Pipeline(ArrayStore(memory), batch_size=2, device="cpu", mover="copy", lookahead=0, writable=True) as pipe:
        for batch in pipe:
            assert memory.sum() == 2 * batch.number
            batch.write_back(batch.values + 1)
    assert memory.sum() == 6


# ---- fetch=False ------------------------------------------------------------------------------------------------


def test_a_store_is_filled_without_being_read(windowed: Make, numbered: Callable[..., Tensor]) -> None:
    store = OracleStore(torch.zeros(20, 3))
    with windowed(store, batch_size=3, shuffle=True, writable=True, fetch=False) as pipe:
        for batch in pipe:
            assert batch.values.shape == (len(batch.rows), 3)
            batch.write_back(numbered(20)[batch.rows])
        assert pipe.stats().rows_fetched == 0
    assert torch.equal(store.values, numbered(20))


def test_there_rows_that_are_not_passed_stay_as_they_are(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    memory = numbered(12)
    with pipeline(memory, batch_size=3, writable=True, fetch=False) as pipe:
        for batch in pipe:
            if batch.number % 2:
                batch.write_back(torch.full((3, 3), -1.0))
    assert memory[:, 0].tolist() == [0, 100, 200, -1, -1, -1, 600, 700, 800, -1, -1, -1]


def test_there_the_same_rows_again_keep_what_was_passed_last(pipeline: Make) -> None:
    memory = torch.zeros(4, 1)
    with pipeline(memory, batch_sampler=[[0, 1], [1, 2], [3], [1]], writable=True, fetch=False) as pipe:
        for batch in pipe:
            if batch.number != 3:
                batch.write_back(torch.full((len(batch.rows), 1), batch.number + 1.0))
    assert memory.view(-1).tolist() == [1, 2, 2, 3]


# ---- stores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [{}, {"fortran": True}, {"big_endian": True}, {"offset": 201}], ids=lambda layout: str(layout)
)
def test_an_npy_file_of_any_layout_keeps_it_and_changes_in_its_written_rows_only(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor], layout: dict[str, Any]
) -> None:
    path = write_npy_file(tmp_path / "x.npy", numbered(30), **layout)
    wanted = numbered(30)
    wanted[[3, 4, 29]] += 1
    with MemmapStore(path, "r+") as store, windowed(store, batch_sampler=[[3, 4], [5], [29]], writable=True) as pipe:
        for batch in pipe:
            if batch.number != 1:
                batch.write_back(batch.values + 1)
        pipe.flush()
        program = f"import numpy; print(numpy.load({str(path)!r}).sum())"  # a fresh process sees it
        assert float(subprocess.check_output([sys.executable, "-c", program])) == wanted.sum().item()
    assert path.read_bytes() == write_npy_file(tmp_path / "wanted.npy", wanted, **layout).read_bytes()


@pytest.mark.parametrize("layout", [{}, {"chunks": 4}, {"chunks": 4, "shards": 16}], ids=str)
def test_a_zarr_is_trained_through_its_chunks(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor], layout: dict[str, int]
) -> None:
    path = tmp_path / "x.zarr"
    with create_store(path, (30, 3), torch.float32, **layout) as store:  # type: ignore[arg-type]
        store.scatter(range(30), numbered(30))
        with windowed(store, batch_sampler=[[3, 4, 29], [5, 3], [29]], writable=True) as pipe:
            for batch in pipe:
                batch.write_back(batch.values + 1)
    wanted = numbered(30)
    for rows in ([3, 4, 29], [5, 3], [29]):
        wanted[rows] += 1
    with ZarrStore(path) as again:
        assert torch.equal(again.gather(range(30)), wanted)


def test_a_pinned_store_is_written_in_place(pipeline: Make, numbered: Callable[..., Tensor]) -> None:
    store = PinnedStore.from_array(numbered(10))
    with pipeline(store, batch_sampler=[[1, 2], [2]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
    assert (store.numpy() - numbered(10).numpy())[:, 0].tolist() == [0, 1, 2, *[0] * 7]


def test_columns_in_stores_of_different_kinds_are_written_together(
    windowed: Make, tmp_path: Path, numbered: Callable[..., Tensor]
) -> None:
    with create_store(tmp_path / "m.npy", (9, 3), torch.float32) as moments:
        source: dict[str, Store] = {"w": ArrayStore(numbered(9)), "m": moments}
        with windowed(source, batch_size=2, writable=True) as pipe:
            for batch in pipe:
                batch.write_back({"w": batch.values["w"] + 1, "m": batch.values["w"]})
        assert torch.equal(moments.gather(range(9)), numbered(9))
        assert torch.equal(source["w"].gather(range(9)), numbered(9) + 1)


def test_an_array_in_strides_of_its_own_is_written_where_it_is(windowed: Make) -> None:
    array = np.zeros((3, 10), np.float32).T
    with windowed(array, batch_sampler=[[1, 9], [9]], writable=True) as pipe:
        for batch in pipe:
            batch.write_back(batch.values + 1)
    assert array.sum(1).tolist() == [0, 3, 0, 0, 0, 0, 0, 0, 0, 6]
