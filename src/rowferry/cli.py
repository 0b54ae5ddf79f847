"""The command line: the list of commands. What each does is in ``_commands``, a file a command."""

from __future__ import annotations

from typing import Annotated

import typer

from ._commands._versions import own_version
from ._commands.bench import bench
from ._commands.convert import convert
from ._commands.demo import demo
from ._commands.doctor import doctor
from ._commands.inspect import inspect
from ._commands.plan import plan
from ._commands.stream import stream
from ._commands.trace import trace

app = typer.Typer(add_completion=False, help="Ferry rows between large stores and the GPU while it trains.")
app.command()(inspect)
app.command()(stream)
app.command()(convert)
app.command()(doctor)
app.command()(demo)
app.command()(plan)
app.command()(bench)
app.command()(trace)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"rowferry {own_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of ``rowferry`` and ``python -m rowferry``."""
    app(prog_name="rowferry")
