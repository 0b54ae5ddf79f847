"""The rooms keep their walls: who may import what, where threads start, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES_OF_A_FILE = 300
LINES_OF_A_FUNCTION = 60

SHIPPED = [path for top in ("stores", "pipeline", "src/rowferry") for path in sorted((ROOT / top).rglob("*.py"))]
EVERYTHING = [*SHIPPED, *(path for top in ("tests", "benchmarks", "examples") for path in sorted((ROOT / top).rglob("*.py")))]

# What -> the only files that may name it. A backend is imported by one store; the rest asks the store.
ONLY_IN = {
    "zarr": ("stores/_zarr*.py", "src/rowferry/_bench/zarr_rows.py"),
    "tensorstore": ("stores/_zarr_tensorstore.py",),
    "obstore": ("stores/_remote.py",),
    "cupy": ("stores/_kernels.py", "stores/_pinned.py", "src/rowferry/_bench/peers.py"),
    "matplotlib": ("src/rowferry/_bench/plot.py", "src/rowferry/_commands/_picture.py"),
    "pynvml": ("src/rowferry/_commands/_link.py", "src/rowferry/_commands/_gpu.py"),
    "typer": ("src/rowferry/cli.py", "src/rowferry/_commands/*.py"),
    "rich": ("src/rowferry/_commands/*.py",),
    "sklearn": ("src/rowferry/_commands/_digits.py",),
    "nvtx": ("pipeline/_ranges.py",),
    "torch.cuda": ("stores/_devices.py", "stores/_pinning.py", "stores/_kernels.py"),
    # Threads that live on are started and joined in one file; a pool is used where a `with` ends it.
    "threading.Thread": ("pipeline/_engine.py",),
    "concurrent.futures": ("stores/_pinning.py", "stores/_remote.py", "stores/testing/_suite*.py"),
    "multiprocessing": (),
    "asyncio": ("stores/_remote.py",),
    "unittest": (),
    "time.sleep": (),
    "pickle": (),
}

# A layer may import those after it, never those before.
LAYERS = ("cli", "_commands", "_bench", "speedtorch", "pipeline", "stores")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def used(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that a module imports or reaches through what it imported: ``torch.cuda``, ``threading.Thread``."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                aliases[each.asname or each.name.partition(".")[0]] = each.name if each.asname else each.name.partition(".")[0]
                yield each.name
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                yield f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            start, *rest = dotted(node).split(".")
            if start in aliases:
                yield ".".join((aliases[start], *rest))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain that starts at a name; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def layer_of(path: Path) -> int | None:
    """Place in ``LAYERS``; None for ``__init__.py`` and ``__main__.py`` of the package, which stand outside."""
    parts = path.relative_to(ROOT / "src" / "rowferry" if path.is_relative_to(ROOT / "src") else ROOT).parts
    top = parts[0].removesuffix(".py")
    return LAYERS.index(top) if top in LAYERS else None


@pytest.mark.parametrize("what", ONLY_IN)
def test_only_the_files_that_own_a_backend_name_it(what: str) -> None:
    found = {
        name(path)
        for path in SHIPPED
        if any(f"{each}.".startswith(f"{what}.") for each in used(ast.parse(path.read_text())))
        and not any(fnmatch(name(path), pattern) for pattern in ONLY_IN[what])
    }
    assert found == set()


def test_imports_go_down_the_layers_only() -> None:
    wrong = []
    for path in SHIPPED:
        here = layer_of(path)
        for each in used(ast.parse(path.read_text())):
            parts = each.split(".")
            if here is not None and parts[0] == "rowferry" and len(parts) > 1 and parts[1] in LAYERS[:here]:
                wrong.append(f"{name(path)} imports {each}")
            if parts[0] in ("stores", "pipeline"):
                wrong.append(f"{name(path)} imports {each}, a second copy of rowferry.{each}")
    assert wrong == []


def test_a_folder_imports_itself_relatively_so_that_its_classes_exist_once() -> None:
    wrong = [
        f"{name(path)} imports {each}"
        for folder in ("stores", "pipeline")
        for path in SHIPPED
        if path.parent == ROOT / folder  # a folder inside it can't: imports through a parent are not used
        for each in used(ast.parse(path.read_text()))
        if f"{each}.".startswith(f"rowferry.{folder}.")
    ]
    assert wrong == []


def test_no_file_is_longer_than_one_can_read_at_once() -> None:
    long = {name(path): lines for path in EVERYTHING if (lines := len(path.read_text().splitlines())) >= LINES_OF_A_FILE}
    assert long == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{name(path)}:{node.name}": lines
        for path in EVERYTHING
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_the_rules_catch_what_they_forbid() -> None:
    code = "import torch as t\nfrom threading import Thread\nimport concurrent.futures\nt.cuda.Stream()\n"
    assert set(used(ast.parse(code))) >= {"torch.cuda.Stream", "threading.Thread", "concurrent.futures"}
