"""CUDA sources of the stores, run by the host without a GPU: the row kernels for every vector width, index type, place and
mark; and the kernels that find the last of several values for a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowferry.stores import _last_kernels
from rowferry.stores._kernel_sources import FUNCTIONS, SOURCES, VECTORS

POISON = 0xA5

Launch = Callable[..., None]


@pytest.fixture(scope="module")
def rows_kernels(kernels_on_host: Callable[..., dict[str, Launch]]) -> dict[str, Launch]:
    return kernels_on_host(SOURCES["rows"], FUNCTIONS["rows"])


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def aligned(rows: int, nbytes: int) -> Tensor:
    """Poisoned rows of ``nbytes`` bytes at an address that 16 divides."""
    memory = torch.full((rows * nbytes + 16,), POISON, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    return memory[start : start + rows * nbytes].view(rows, nbytes)


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_go_where_the_arguments_say_and_nowhere_else(
    rows_kernels: dict[str, Launch], vector: int, index: torch.dtype
) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 5), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 99))
    def check(width: int, count: int, placed: bool, marked: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = aligned(50, width * vector)
        table.copy_(torch.randint(0, 256, table.shape, dtype=torch.uint8, generator=generator))
        rows = torch.randperm(50, generator=generator)[:count].to(index)
        places = torch.randperm(60, generator=generator)[:count] if placed else None
        marks = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator) if marked else None
        at = torch.arange(count) if places is None else places
        chosen = torch.ones(count, dtype=torch.bool) if marks is None else marks.bool()
        for kind in ("gather", "scatter"):
            values = aligned(60, width * vector)
            source, target = (table, values) if kind == "gather" else (values, table)
            if kind == "scatter":
                values.copy_(torch.randint(0, 256, values.shape, dtype=torch.uint8, generator=generator))
            wanted = target.clone()
            read, write = (rows.long(), at) if kind == "gather" else (at, rows.long())
            wanted[write[chosen]] = source[read[chosen]]
            name = f"{kind}_{vector}_{str(index).removeprefix('torch.')}"
            arguments = (source, target, rows, places, marks)
            rows_kernels[name](1, *map(pointer, arguments), count, width)
            assert torch.equal(target, wanted)

    check()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_last_place_of_each_row_wins(kernels_on_host: Callable[..., dict[str, Launch]], index: torch.dtype) -> None:
    launch = kernels_on_host(_last_kernels.CUDA_SOURCE, _last_kernels.FUNCTIONS)
    kind = str(index).removeprefix("torch.")

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, 19), min_size=1, max_size=60))
    def check(asked: list[int]) -> None:
        rows = torch.tensor(asked, dtype=index)
        claims, marks = torch.zeros(20, dtype=torch.int32), torch.full((len(asked) + 1,), POISON, dtype=torch.uint8)
        launch[f"claim_{kind}"](1, rows.data_ptr(), claims.data_ptr(), len(asked))
        launch[f"winners_{kind}"](1, rows.data_ptr(), claims.data_ptr(), marks.data_ptr(), len(asked))
        last = {row: place for place, row in enumerate(asked)}
        assert marks.tolist() == [int(last[row] == place) for place, row in enumerate(asked)] + [POISON]

    check()
