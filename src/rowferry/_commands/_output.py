"""How commands speak: one JSON object or a rich table on stdout, one line on stderr when something is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]

# What stores and the pipeline raise about what they were given. Anything else is a bug and keeps its traceback.
_REFUSALS = (OSError, ValueError, TypeError, LookupError, ImportError, MemoryError)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """End the command with exit code 2 and one line on stderr when what the user gave is refused inside the block.

    The traceback goes to the logger ``rowferry`` at DEBUG.
    """
    try:
        yield
    except _REFUSALS as error:
        logging.getLogger("rowferry").debug("the command was refused", exc_info=True)
        typer.echo(f"rowferry: {_one_line(error)}", err=True)
        raise typer.Exit(2) from error


def print_json(result: Mapping[str, Any]) -> None:
    """``result`` as one strict JSON object; numbers that JSON lacks (nan, inf) are written as strings."""
    typer.echo(json.dumps(plain(result), allow_nan=False))


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """A heading, and below it two columns: what, and its value."""
    table = Table(show_header=False, box=None, padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    screen = console()
    screen.print(title, style="bold")
    screen.print(table)


def console() -> Console:
    """A console on the stdout of now (tests and redirections exchange it), without guesses about markup and emoji."""
    return Console(markup=False, emoji=False, highlight=False)


def progress(quiet: bool) -> Progress:
    """A bar on stderr where that is a terminal, so that stdout holds the result alone."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal)


def count(number: int) -> str:
    """1234567 as ``1,234,567``."""
    return f"{number:,}"


def size(nbytes: float) -> str:
    """Bytes in a unit of 1024 that keeps the number short: ``512 B``, ``64.0 KiB``, ``14.9 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def waits(seconds: Mapping[str, float], total: float) -> str:
    """Where the consumer's time went while it waited: ``12.5 % (store 10.0 %, plan 2.5 %)``."""
    parts = sorted(((cause, value) for cause, value in seconds.items() if value > 0), key=lambda part: -part[1])
    named = ", ".join(f"{cause} {share(value, total):.1%}" for cause, value in parts)
    return f"{share(sum(seconds.values()), total):.1%}" + (f" ({named})" if named else "")


def share(part: float, whole: float) -> float:
    """``part / whole``, 0 of nothing."""
    return part / whole if whole else 0.0


def _one_line(error: BaseException) -> str:
    # str(KeyError) is the repr of its message
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def plain(value: Any) -> Any:
    """``value`` in types that JSON has; nan and inf, which it lacks, as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
