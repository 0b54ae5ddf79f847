"""The row kernels: they compile everywhere, refuse what does not fit, and on a GPU move the rows that torch moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rowferry.stores import _last_kernels
from rowferry.stores._kernel_arguments import check_launch, vector_bytes
from rowferry.stores._kernel_sources import FUNCTIONS, OPTIONS, SOURCES, THREADS
from rowferry.stores._kernels import RowKernels, available, why_unavailable
from rowferry.stores._pinning import pinned_bytes

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
WIDTHS = (0, 1, 2, 3, 4, 7, 8, 12, 16, 31, 64, 100, 512, 1000, 4096, 65_536, 602_112)  # bytes a row
CPU = torch.device("cpu")
POISON = 0xA5
MARGIN = 64  # bytes before and behind every output, which nobody may write
REGISTERS = 65_536  # of a multiprocessor
SPILLED = 64  # bytes that a thread may keep outside its registers


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_compiles_without_a_warning_and_a_block_of_it_fits(
    architecture: str, name: str, compile_cuda: Callable[..., str]
) -> None:
    report = compile_cuda(SOURCES[name], architecture, *OPTIONS, "--ptxas-options=-v")
    assert [line for line in report.splitlines() if not re.match(r"ptxas (info|  ) ", line)] == []
    assert sorted(re.findall(r"Compiling entry function '(\w+)'", report)) == sorted(FUNCTIONS[name])
    assert max(int(each) for each in re.findall(r"Used (\d+) registers", report)) * THREADS <= REGISTERS
    assert max(int(each) for each in re.findall(r"(\d+) bytes spill", report)) <= SPILLED


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_that_find_the_last_value_compile(architecture: str, compile_cuda: Callable[..., str]) -> None:
    assert compile_cuda(_last_kernels.CUDA_SOURCE, architecture, *OPTIONS) == ""


def test_places_claim_rows_where_the_table_is_not_far_larger() -> None:
    assert _last_kernels.pays(1, _last_kernels.ROWS_A_CLAIM)
    assert not _last_kernels.pays(1, _last_kernels.ROWS_A_CLAIM + 1)
    assert not _last_kernels.pays(2**31 - 1, 4)  # a claim would not hold the place


@pytest.mark.parametrize(
    ("divided", "width"),
    [((16, 32, 48), 16), ((0, 0, 0), 16), ((16, 8), 8), ((16, 32, 12), 4), ((64, 2, 6), 2), ((1, 16, 16), 1), ((4096, 7), 1)],
)
def test_the_vector_is_the_widest_that_divides_addresses_and_rows(divided: tuple[int, ...], width: int) -> None:
    assert vector_bytes(*divided) == width


def test_no_kernels_run_on_the_cpu() -> None:
    assert not available(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing where there is no GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    assert not available(torch.device("cuda", 0))
    assert "no CUDA device" in why_unavailable()
    with pytest.raises(ImportError, match="no CUDA device"):
        RowKernels(torch.device("cuda", 0))


TABLE, VALUES = torch.zeros(9, 4), torch.zeros(3, 4)
ROWS, PLACES, MARKS = torch.tensor([1, 5, 2]), torch.tensor([2, 0, 1]), torch.ones(3, dtype=torch.uint8)


def call(**changed: Any) -> None:
    given = {"table": TABLE, "values": VALUES, "rows": ROWS, "places": None, "marks": None, "blocks": 8}
    check_launch(CPU, **(given | changed))


@pytest.mark.parametrize(
    "fits",
    [
        {},
        {"rows": ROWS.int()},
        {"places": PLACES},
        {"places": PLACES, "values": torch.zeros(7, 4)},
        {"marks": MARKS},
        {"marks": MARKS.bool(), "places": PLACES},
        {"table": torch.zeros(0, 4), "values": torch.zeros(0, 4), "rows": ROWS[:0]},
    ],
)
def test_arguments_that_fit_are_taken(fits: dict[str, Any]) -> None:
    call(**fits)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"blocks": 0}, ValueError, "blocks is 0"),
        ({"values": VALUES.half()}, TypeError, "must be alike"),
        ({"values": torch.zeros(3, 5)}, TypeError, "must be alike"),
        ({"table": torch.zeros(4, 9).T}, TypeError, r"pass tensor\.contiguous"),
        ({"values": torch.zeros(4, 3).T}, TypeError, r"pass tensor\.contiguous"),
        ({"values": torch.zeros(3, 4, device="meta")}, TypeError, "values are on meta"),
        ({"table": torch.zeros(9, 4, device="meta")}, TypeError, "table is on meta"),
        ({"rows": ROWS.to(torch.int16)}, TypeError, r"rows is \(3,\) torch.int16"),
        ({"rows": ROWS.reshape(3, 1)}, TypeError, r"rows is \(3, 1\)"),
        ({"rows": torch.arange(6)[::2]}, TypeError, "rows is .* must be contiguous"),
        ({"rows": ROWS[:2]}, TypeError, "2 row numbers and 3 rows of values"),
        ({"places": PLACES.int()}, TypeError, "places is .* torch.int32"),
        ({"places": PLACES[:2]}, TypeError, r"places is \(2,\)"),
        ({"marks": MARKS.float()}, TypeError, "marks is .* torch.float32"),
        ({"marks": MARKS[:2]}, TypeError, r"marks is \(2,\)"),
        ({"marks": MARKS.to("meta")}, TypeError, "marks is .* on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_launch(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(**changed)


# ---- on a GPU: compared with torch on the host --------------------------------------------------------------


@pytest.fixture
def kernels() -> RowKernels:
    return RowKernels(torch.device("cuda", torch.cuda.current_device()))


def memory(nbytes: int, where: str) -> Tensor:
    return pinned_bytes(nbytes) if where == "pinned" else torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def table_of(shape: tuple[int, int], where: str, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Random bytes, pinned or on the device, ``offset`` bytes off an aligned address; and a plain copy on the host."""
    plain = torch.randint(0, 256, shape, dtype=torch.uint8)
    table = memory(plain.numel() + offset, where)[offset:].view(shape)
    table.copy_(plain)
    return table, plain


def poisoned(shape: tuple[int, int], offset: int = 0) -> tuple[Tensor, Tensor]:
    """An output on the device, ``offset`` bytes off, filled with a pattern; and all of the memory around it."""
    nbytes = shape[0] * shape[1]
    around = torch.full((nbytes + offset + 2 * MARGIN,), POISON, dtype=torch.uint8, device="cuda")
    return around[MARGIN + offset : MARGIN + offset + nbytes].view(shape), around


def assert_margins_untouched(out: Tensor, around: Tensor, offset: int = 0) -> None:
    start = MARGIN + offset
    assert bool((around[:start] == POISON).all())
    assert bool((around[start + out.numel() :] == POISON).all())


def tables(width: int) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Table, its plain copy, row numbers with repeats on the device, blocks: both memories, both types of numbers."""
    n = 257 if width <= 65_536 else 23
    for where in ("pinned", "device"):
        table, plain = table_of((n, width), where)
        for dtype in (torch.int32, torch.int64):
            for count, blocks in ((1, 8), (n, 1), (3 * n + 1, 8), (3 * n + 1, 60)):
                yield table, plain, torch.randint(0, n, (count,), dtype=dtype).cuda(), blocks


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_gathered_rows_are_those_that_torch_gathers(kernels: RowKernels, width: int) -> None:
    for table, plain, rows, blocks in tables(width):
        out, around = poisoned((len(rows), width))
        kernels.gather(out, table, rows, blocks=blocks)
        assert out.cpu().equal(plain[rows.cpu().long()])
        assert_margins_untouched(out, around)
        places = torch.randperm(len(rows) + 5)[: len(rows)]
        out, around = poisoned((len(rows) + 5, width))
        kernels.gather(out, table, rows, places=places.cuda(), blocks=blocks)
        wanted = torch.full(out.shape, POISON, dtype=torch.uint8)
        wanted[places] = plain[rows.cpu().long()]
        assert out.cpu().equal(wanted)
        assert_margins_untouched(out, around)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_places", [False, True])
@pytest.mark.parametrize("marked", [None, torch.uint8, torch.bool])
def test_scattered_rows_change_and_no_other_does(
    kernels: RowKernels, width: int, with_places: bool, marked: torch.dtype | None
) -> None:
    for table, plain, repeated, blocks in tables(width):
        rows = repeated.unique()[torch.randperm(len(repeated.unique()), device="cuda")]
        values = torch.randint(0, 256, (len(rows) + 3 * with_places, width), dtype=torch.uint8)
        places = torch.randint(0, len(values), rows.shape) if with_places else torch.arange(len(rows))
        marks = torch.ones(rows.shape, dtype=torch.bool) if marked is None else torch.rand(rows.shape) < 0.5
        kernels.scatter(
            table,
            rows,
            values.cuda(),
            places=places.cuda() if with_places else None,
            marks=None if marked is None else marks.to(marked).cuda(),
            blocks=blocks,
        )
        torch.cuda.synchronize()
        plain[rows.cpu().long()[marks]] = values[places[marks]]
        assert table.cpu().equal(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 3, 8, 16, 100, 512, 1000])
@pytest.mark.parametrize("where", ["pinned", "device"])
def test_rows_at_any_address_are_moved(kernels: RowKernels, width: int, where: str) -> None:
    rows = torch.randperm(97).cuda()
    for offset in (1, 2, 3, 4, 8, 12, 15):
        for table_offset, out_offset in ((offset, 0), (0, offset), (offset, offset)):
            table, plain = table_of((97, width), where, table_offset)
            out, around = poisoned((97, width), out_offset)
            kernels.gather(out, table, rows)
            assert out.cpu().equal(plain[rows.cpu()])
            assert_margins_untouched(out, around, out_offset)
            out.copy_(255 - out)
            kernels.scatter(table, rows, out)
            torch.cuda.synchronize()
            assert table.cpu().equal(255 - plain)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["pinned", "device"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tables_past_two_to_the_31_elements_are_reached_to_the_last_row(
    kernels: RowKernels, where: str, dtype: torch.dtype
) -> None:
    n = 2**31 // 64 + 10
    table = memory(n * 64 * dtype.itemsize, where).view(dtype).view(n, 64)
    last = torch.tensor([n - 1, 0, n - 11, n - 2], dtype=torch.int32)
    values = torch.randint(1, 100, (4, 64)).to(dtype)
    kernels.scatter(table, last.cuda(), values.cuda())
    torch.cuda.synchronize()
    assert table[last.long().to(table.device)].cpu().equal(values)
    out = torch.zeros(4, 64, dtype=dtype, device="cuda")
    kernels.gather(out, table, last.cuda())
    assert out.cpu().equal(values)


@pytest.mark.gpu
def test_outputs_past_two_to_the_31_elements_are_filled_to_the_last_row(kernels: RowKernels) -> None:
    table, plain = table_of((1000, 64), "device")
    rows = torch.randint(0, 1000, (2**31 // 64 + 10,), device="cuda")
    out = torch.full((len(rows), 64), POISON, dtype=torch.uint8, device="cuda")
    kernels.gather(out, table, rows, blocks=120)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert out[part].cpu().equal(plain[rows[part].cpu()])
    assert out.equal(table[rows])


@pytest.mark.gpu
def test_kernels_run_in_the_order_of_the_current_stream(kernels: RowKernels) -> None:
    table, plain = table_of((4096, 256), "pinned")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    late = torch.empty(4096, dtype=torch.int64, device="cuda")
    rows = torch.randperm(4096)
    given, out = rows.cuda(), torch.full((4096, 256), POISON, dtype=torch.uint8, device="cuda")
    late.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(given)
        kernels.gather(out, table, late)
        moved = out.clone()
    side.synchronize()
    assert moved.cpu().equal(plain[rows])


@pytest.mark.gpu
def test_nothing_is_launched_for_no_rows_and_what_does_not_fit_is_refused(kernels: RowKernels) -> None:
    table, plain = table_of((8, 16), "pinned")
    kernels.gather(
        torch.empty(0, 16, dtype=torch.uint8, device="cuda"), table, torch.empty(0, dtype=torch.int64, device="cuda")
    )
    rows, out = torch.tensor([1, 2], device="cuda"), torch.empty(2, 16, dtype=torch.uint8, device="cuda")
    for wrong in (plain, table[:, ::2]):  # neither is pageable memory read, nor are strides taken
        with pytest.raises(TypeError):
            kernels.gather(out, wrong, rows)
    with pytest.raises(TypeError, match="values must be on cuda"):
        kernels.gather(out.cpu(), table, rows)
    with pytest.raises(TypeError, match="rows is"):
        kernels.gather(out, table, rows.cpu())
    kernels.gather(out, table, rows)
    assert out.cpu().equal(plain[1:3])
