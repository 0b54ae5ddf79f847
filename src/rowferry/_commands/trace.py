"""``rowferry trace``: the file that ``pipe.trace`` wrote, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._output import JsonOption, count, print_facts, print_json, refusals, waits
from ._picture import draw, length, read_trace, waited


def trace(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="What pipe.trace() wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where to draw it: .png, .svg or .pdf; beside TRACE if not given.")] = None,
    json: JsonOption = False,
) -> None:
    """Draw TRACE: a row for each thread and stream, waits coloured by cause. https://ui.perfetto.dev opens it too."""
    with refusals():
        target = path.with_suffix(".png") if out is None else out
        rows = read_trace(path)
        draw(rows, target)
    seconds, spans = length(rows), sum(len(row.bars) for row in rows)
    causes = waited(rows)
    if json:
        print_json({"path": path, "picture": target, "spans": spans, "seconds": seconds, "waited_for": causes})
        return
    facts = [
        ("spans", f"{count(spans)} in {seconds * 1e3:.1f} ms"),
        ("the consumer waited", waits(causes, seconds)),
        ("picture", str(target)),
    ]
    print_facts(str(path), facts)
