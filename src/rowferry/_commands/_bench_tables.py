"""What ``rowferry bench`` prints: ratios first, then what they are ratios of."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rowferry._bench.compare import Comparison

from ._output import console, count, print_facts, size

_GROUPS = {
    "reading": "reading: share of the limit, ms a batch",
    "writing": "writing: share of the limit, ms a batch",
    "peers": "the same batches by other ways: share of the limit, ms a batch",
    "overlap": "a training loop: ms a step over max(compute + serve, transfer)",
}
_MORE = {"overlap": ["compute", "transfer", "serve"], "peers": ["GB/s", "rowferry is"]}


def print_record(record: dict[str, Any]) -> None:
    """A measurement, a table a group."""
    machine, sizes, limit, threads = record["machine"], record["sizes"], record["limit"], record["host_threads"]
    print_facts(
        "bench",
        [
            ("device", f"{machine['gpu'] or machine['processor']}, {machine['cores']} cores"),
            ("host threads", f"at most {threads['rowferry']} of rowferry's, {threads['torch']} of torch's"),
            ("rows", f"{sizes['store']}, {count(sizes['rows'])} rows of {count(sizes['row_bytes'])} bytes"),
            ("batch", f"{count(sizes['batch'])} rows, {size(sizes['batch'] * sizes['row_bytes'])}"),
            ("limit", _limit(limit)),
            *(("note", note) for note in record["notes"]),
        ],
    )
    for group, title in _GROUPS.items():
        results = [each for each in record["results"] if each["group"] == group]
        if results:
            _print_group(group, title, results)
    console().print(f"\n{record['seconds']:.0f} s in all; medians of the runs, with the lowest and the highest of them")


def _print_group(group: str, title: str, results: list[dict[str, Any]]) -> None:
    screen = console()
    screen.print(f"\n{title}", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ["ratio", "work", "from - to", "ms", *_MORE.get(group, ["GB/s", "mover"])]:
        table.add_column(head, justify="left" if head in ("work", "mover") else "right", no_wrap=head != "work")
    for each in results:
        if "ratio" in each:
            span = f"{_number(each['lowest'])} - {_number(each['highest'])}"
            table.add_row(_number(each["ratio"]), each["work"], span, f"{each['ms']:.2f}", *_rest(group, each))
    if table.row_count:
        screen.print(table)
    for each in results:
        if "skipped" in each:
            screen.print(f"   -   {each['work']}: {each['skipped']}")


def _rest(group: str, each: dict[str, Any]) -> list[str]:
    if group == "overlap":
        return [f"{each[name]:.2f}" for name in ("ms_compute", "ms_transfer", "ms_serve")]
    last = f"{each['rowferry_is_times_as_fast']:.1f} x as fast" if group == "peers" else each["mover"]
    return [f"{each['gb_s']:.2f}", last]


def print_comparison(compared: Comparison) -> None:
    """Two records, side by side."""
    screen = console()
    sides = zip("AB", compared.names, compared.limits, strict=True)
    print_facts("compared", [(letter, f"{name}; {_limit(limit)}") for letter, name, limit in sides])
    table = Table("B over A", "work", "A", "B", "of", box=None, padding=(0, 2, 0, 0))
    for pair in compared.pairs:
        values = [_number(value) for value in (pair.first, pair.second)]
        table.add_row(_number(pair.change), pair.work, *values, pair.measure)
    screen.print()
    screen.print(table)
    if compared.differences:
        print_facts("\nbesides speed these differ", [("", line) for line in compared.differences])


def _limit(limit: dict[str, Any]) -> str:
    speeds = f"{limit['to_device']:.1f} GB/s in, {limit['to_host']:.1f} GB/s out, {limit['both']:.1f} GB/s both at once"
    return f"link: {speeds}" if limit["kind"] == "link" else f"no GPU; copies in host memory: {limit['to_device']:.1f} GB/s"


def _number(value: float | None) -> str:
    """Two decimals, or two digits of what is small."""
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"
