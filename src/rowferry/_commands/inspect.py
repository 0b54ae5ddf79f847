"""``rowferry inspect``: what a file holds, and what a random row of it costs."""

from __future__ import annotations

from typing import Any

from rowferry.pipeline._planner import WINDOW_ROWS
from rowferry.stores import MemmapStore, Store, ZarrStore
from rowferry.stores._rows import rows_read_for_a_row

from ._output import JsonOption, count, print_facts, print_json, refusals, size
from ._sample import RowCost, npy_header, row_cost
from ._stores import ArrayOption, PathArgument, StoredOption, dtype_name, open_named, shown

WINDOW_BYTES = 1 << 30  # of a slot: the default staging is 2 GiB for two
_LAYOUT = ("order", "zarr_format", "dimension_names", "units", "scale_factor", "add_offset", "chunks", "shards", "compressor")


def inspect(path: PathArgument, array: ArrayOption = None, stored_dtype: StoredOption = None, json: JsonOption = False) -> None:
    """Show what PATH holds and what a random row of it costs to read."""
    with refusals(), open_named(path, array, stored_dtype) as store:
        facts = describe(store)
        cost = row_cost(store)
    if json:
        print_json({"path": shown(path), "array": array, **facts, "random_row": cost._asdict() if cost else None})
    else:
        print_facts(shown(path), _lines(facts, cost))


def describe(store: Store) -> dict[str, Any]:
    """What a store holds and how it is laid out; None where the format does not say."""
    layout: dict[str, Any] = store.describe() if isinstance(store, ZarrStore) else {}
    if isinstance(store, MemmapStore):
        layout["order"] = "Fortran: the elements of a row lie far apart" if npy_header(store).fortran else "C"
    return {
        "store": type(store).__name__,
        "shape": list(store.shape),
        "dtype": dtype_name(store.dtype),
        "rows": len(store),
        "row_shape": list(store.row_shape),
        "row_bytes": store.row_nbytes,
        "bytes": store.nbytes,
        **{name: layout.get(name) for name in _LAYOUT},
        "rows_decoded_per_row_used": store.chunk_rows,
        "rows_read_per_row_used": {
            "shuffle=True": rows_read_for_a_row(len(store), store.chunk_rows, _window(store)),
            "shuffle='chunks'": 1.0,
        },
    }


def _window(store: Store) -> int:
    """Rows of a window of a pipeline with default settings, where memory is not short."""
    return min(WINDOW_BYTES // max(store.row_nbytes, 1), WINDOW_ROWS)


def _lines(facts: dict[str, Any], cost: RowCost | None) -> list[tuple[str, str]]:
    lines = [
        ("store", facts["store"]),
        ("shape", " x ".join(map(str, facts["shape"]))),
        ("dtype", facts["dtype"]),
        ("rows", count(facts["rows"])),
        ("a row", f"{count(facts['row_bytes'])} bytes"),
        ("all rows", size(facts["bytes"])),
    ]
    lines += [(name.replace("_", " "), _value(facts[name])) for name in _LAYOUT if facts[name] is not None]
    lines.append(("rows decoded for a row used", f"{count(facts['rows_decoded_per_row_used'])} when read alone"))
    plain, chunked = facts["rows_read_per_row_used"].values()
    lines.append(("rows read for a row used", f"{plain:,.1f} with shuffle=True, {chunked:,.1f} with shuffle='chunks'"))
    if cost is None:
        return [*lines, ("a random row", "there is none")]
    lines.append(("a random row, read alone", _cost(cost.alone_microseconds, cost.alone_bytes, cost.alone_rows)))
    lines.append(("in a window of sorted rows", _cost(cost.window_microseconds, cost.window_bytes, cost.window_rows)))
    lines.append(("rows decoded for a row used there", f"{cost.window_decoded:.1f}"))
    return lines


def _cost(microseconds: float, nbytes: float | None, rows: int) -> str:
    read = "bytes read unknown on this system" if nbytes is None else f"{size(nbytes)} read"
    return f"{microseconds:,.1f} us, {read} (mean of {count(rows)} rows)"


def _value(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    return ", ".join("-" if each is None else str(each) for each in value) or "none"
