"""A trace as a picture: a row a thread or stream, bars of work, waits coloured by cause. The only file that draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WAITS = {
    "sampler": "#e69f00",
    "plan": "#cc79a7",
    "host gather": "#f0e442",
    "link": "#d55e00",
    "store": "#8c510a",
    "drain": "#7b3294",
    "cold start": "#999999",
}
_WORK = {"slot": "#eeeeee", "plan": "#8da0cb", "sampler": "#6a51a3", "fetch": "#0072b2", "drain": "#009e73"}
_OTHER = "#c7d8c9"  # batches and windows: the training's own time
INCHES = (14.0, 0.6)  # width, and height of a row


class Bar(NamedTuple):
    """Something on one row, in milliseconds from the start of the trace."""

    name: str
    start: float
    length: float
    cause: str | None
    """Of a wait."""


class Row(NamedTuple):
    """A thread or a stream."""

    name: str
    bars: list[Bar]


def read_trace(path: Path) -> list[Row]:
    """The rows of a trace that ``pipe.trace`` wrote, in its order.

    Raises:
        OSError: no such file. ValueError: not a trace of rowferry.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
        rows = {place: Row(name, []) for place, name in sorted(names.items())}
        for event in events:
            if event["ph"] == "X":
                cause = event["args"].get("cause")
                bar = Bar(event["name"], event["ts"] / 1e3, event["dur"] / 1e3, cause)
                rows[event["pid"], event["tid"]].bars.append(bar)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of rowferry; pipe.trace({str(path)!r}) writes one") from error
    return list(rows.values())


def draw(rows: Iterable[Row], out: Path) -> None:
    """Draw ``rows`` into ``out``, whose suffix says as what (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed. ValueError: a suffix that it does not know.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("rowferry trace draws with matplotlib; get it by: pip install 'rowferry[plot]'") from error
    rows = list(rows)
    figure = Figure(figsize=(INCHES[0], 1.5 + INCHES[1] * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(rows):
        for colour in (_OTHER, *_WORK.values(), *WAITS.values()):  # what lies inside another (a wait in a batch) comes later
            if spans := [(bar.start, bar.length) for bar in row.bars if _colour(bar) == colour]:
                axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", linewidth=0.3)
    legend = [Patch(color=colour, label=name) for name, colour in _legend(rows).items()]
    if legend:
        figure.legend(handles=legend, loc="outside upper center", ncols=min(len(legend), 8), frameon=False)
    figure.savefig(out, dpi=150)


def waited(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds that the consumer's stream waited in the trace, by cause."""
    seconds: dict[str, float] = {}
    for bar in (bar for row in rows if row.name == "consumer stream" for bar in row.bars):
        if bar.cause is not None:
            seconds[bar.cause] = seconds.get(bar.cause, 0.0) + bar.length / 1e3
    return seconds


def length(rows: Iterable[Row]) -> float:
    """Seconds from the first start to the last end."""
    spans = [(bar.start, bar.start + bar.length) for row in rows for bar in row.bars]
    return (max(stop for _, stop in spans) - min(start for start, _ in spans)) / 1e3 if spans else 0.0


def _colour(bar: Bar) -> str:
    return WAITS.get(bar.cause, _OTHER) if bar.cause is not None else _WORK.get(bar.name, _OTHER)


def _legend(rows: Iterable[Row]) -> Mapping[str, Any]:
    bars = [bar for row in rows for bar in row.bars]
    work = {name: colour for name, colour in _WORK.items() if any(bar.name == name for bar in bars)}
    waits = {f"wait: {cause}": colour for cause, colour in WAITS.items() if any(bar.cause == cause for bar in bars)}
    return {**work, **waits}
