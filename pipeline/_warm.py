"""Runs every operator of a window once at construction: CUDA loads code when it is first launched, and the first
batch must not wait for that."""

from __future__ import annotations

import torch

from rowferry.stores._bytes import as_ints

from ._ids import id_dtype
from ._run import Parts
from ._window import Layout, Older, Sorted


def warm(parts: Parts) -> None:
    """Nothing to do on a device that runs work at once."""
    if not parts.device.is_cuda:
        return
    device = parts.device
    with device.use(parts.streams.plan):
        for dtype in {id_dtype(table.rows) for table in parts.source.tables}:
            _plan(parts, dtype)
        for column in (column for table in parts.source.tables for column in table.columns):
            rows = device.empty((2, *column.store.row_shape), column.store.dtype)
            places = torch.zeros(2, dtype=torch.int64, device=device.torch)
            chosen = as_ints(rows).index_select(0, places).view(rows.dtype)
            if column.dtype != rows.dtype:
                chosen.to(column.dtype)
            if parts.settings.writable:
                as_ints(rows).index_copy_(0, places[:1], as_ints(chosen[:1]))
        buffer = parts.pool.take(4096)
        event = device.record(parts.streams.plan)
    event.synchronize()
    parts.pool.give(buffer, None)


def _plan(parts: Parts, dtype: torch.dtype) -> None:
    """A window of four ids, one of them carried."""
    here = parts.device.torch
    ids = torch.arange(4, dtype=dtype, device=here)
    ends = torch.tensor([2, 4], device=here)
    older = [Older(ids[:1].clone(), torch.zeros(1, dtype=torch.int64, device=here))]
    found = Sorted(torch.empty_like(ids), torch.empty(4, dtype=torch.int64, device=here))
    parts.plan.count(ids, ends, older, found, torch.empty((3, 2), dtype=torch.int64, device=here))
    numbers = torch.empty((6, 4), dtype=torch.int64, device=here)
    writable = parts.settings.writable
    layout = Layout(
        rows=torch.empty_like(ids),
        places=numbers[0],
        older=Older(torch.empty_like(ids), numbers[1]),
        carried=(numbers[2, :1],),
        batch_places=numbers[3] if writable else None,
        inverse=numbers[4] if writable else None,
    )
    parts.plan.arrange(found, ends, older, [3, 1], layout)
    marks = torch.zeros(4, dtype=torch.uint8, device=here)
    if writable:
        marks.index_fill_(0, layout.places, 1)
        marks.sub_(marks.clone())
        torch.sum(marks, 0, keepdim=True, dtype=torch.int64, out=numbers[5][:1])
        torch.cumsum(marks[layout.places], 0, out=numbers[5])
