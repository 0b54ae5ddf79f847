"""What the documentation says is so: its snippets and commands run, its links lead somewhere, its names exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import rowferry as rf
from rowferry.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LANGUAGES = {"python", "bash", "text"}  # text is for pictures and output, which nothing can check


class Block(NamedTuple):
    """A fenced block: ``line`` is the number of its first line of code in the page."""

    page: Path
    language: str
    line: int
    text: str

    @property
    def needs(self) -> list[str]:
        """Modules that its first line says it needs: ``# needs: fastai``. Most blocks need none but our own."""
        found = re.match(r"# needs: (.+)", self.text)
        return found[1].split(", ") if found else []

    def code(self) -> str:
        """As Python, so far down that a traceback names the page's line."""
        return "\n" * (self.line - 1) + self.text


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    start, language, held = 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.lstrip().startswith("```"):
            held.append(line)
        elif start:
            yield Block(page, language, start, "\n".join(held))
            start = 0
        else:
            start, language, held = number + 1, line.strip().removeprefix("```"), []
    assert not start, f"{page} has a block that starts before line {start} and never ends"


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a bash block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """What a ``#`` link may name: the headings, as GitHub writes them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


# ---- commands: run where that is quick, else checked against what they name -----------------------------------------


def run_rowferry(words: list[str]) -> None:
    if words[0] == "bench" and "--compare" not in words:
        words = [*words, "--seconds", "3", "--threads", "1"]  # the figures are not read here
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout


def check_make(words: list[str]) -> None:
    """Each target has a rule, each variable a default."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable, is_setting, _ = word.partition("=")
        rule = rf"^{re.escape(variable)} \?=" if is_setting else rf"^{re.escape(word)}:"
        assert re.search(rule, makefile, re.MULTILINE), f"the Makefile knows no {word}"


def check_pip(words: list[str]) -> None:
    """``pip install`` of this project, with extras that exist."""
    action, *targets = (word for word in words if word != "-e")
    assert action == "install"
    for target in targets:
        found = re.fullmatch(r"(?:rowferry|\.)(?:\[([\w,]+)\])?", target)
        assert found, f"{target} is not this project"
        extras = set(found[1].split(",")) if found[1] else set()
        assert extras <= set(PROJECT["project"]["optional-dependencies"])


def check_python(words: list[str]) -> None:
    """A program of this repository, with options that it has; or a script that the page wrote, run by a module."""
    if words[0] == "-m":
        done = subprocess.run([sys.executable, *words], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=100)
        assert done.returncode == 0
        return
    program, *options = words
    text = (ROOT / program).read_text() + (ROOT / program).with_name("_common.py").read_text()
    for option in options:
        assert not option.startswith("--") or f'"{option}"' in text, f"{program} has no {option}"


def check_script(words: list[str]) -> None:
    assert not words


KNOWN: dict[str, Callable[[list[str]], None]] = {
    "rowferry": run_rowferry,
    "make": check_make,
    "pip": check_pip,
    ".venv/bin/pip": check_pip,
    "python": check_python,
    ".ci/run": check_script,
}


# ---- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_snippets_and_commands_run_in_order_from_an_empty_folder(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "snippets"}
    for block in blocks(page):
        if block.needs:
            continue  # a recipe; it has a test of its own
        if block.language == "python":
            exec(compile(block.code(), str(page), "exec"), namespace)
        elif block.language == "bash":
            for name, *words in commands(block):
                assert name in KNOWN, f"line {block.line}: no test knows how to check the command {name}"
                KNOWN[name](words)


RECIPES = [block for page in PAGES for block in blocks(page) if block.needs]
# .ci/run names the libraries that it installed: there a recipe that needs no other must run.
REQUIRED = set(filter(None, os.environ.get("ROWFERRY_RECIPES", "").split(",")))


def run_recipe(recipe: Block, folder: Path, code: str) -> None:
    """What the page shows before its recipes, then ``code``: in a process of its own, for libraries change torch and Python."""
    shared = [block for block in blocks(recipe.page) if block.language == "python" and not block.needs]
    parts = [*(block.code() for block in shared if block.line < recipe.line), code]
    script = "\n".join(f"exec(compile({part!r}, {title(recipe.page)!r}, 'exec'))" for part in parts)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr


def require(modules: Iterable[str]) -> None:
    """Skip the test, and say what is absent; fail where it was promised to be there."""
    missing = [module for module in modules if find_spec(module) is None]
    assert not REQUIRED & set(missing), f"ROWFERRY_RECIPES names {', '.join(missing)}, which cannot be imported"
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; pip install 'rowferry[recipes]' brings what PyPI has")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda block: block.needs[0])
def test_a_recipe_runs_where_its_library_is_installed(recipe: Block, tmp_path: Path) -> None:
    require(recipe.needs)
    run_recipe(recipe, tmp_path, recipe.code())


NEIGHBORS = """
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput


class Neighbors(BaseSampler):  # all neighbours of the seeds, which come first
    sample_from_edges = None

    def sample_from_nodes(self, inputs):
        seeds, (source, target) = inputs.node, graph.edge_index
        edges = torch.isin(target, seeds).nonzero().squeeze(1)
        nodes = torch.cat([seeds, source[edges][~torch.isin(source[edges], seeds)].unique()])
        place = torch.empty(graph.num_nodes, dtype=torch.int64).scatter_(0, nodes, torch.arange(len(nodes)))
        return SamplerOutput(nodes, place[source[edges]], place[target[edges]], edges, metadata=(inputs.input_id, inputs.time))


def NeighborLoader(graph, num_neighbors, **keywords):
    return NodeLoader(graph, Neighbors(), **keywords)
"""


def test_the_recipe_for_geometric_runs_on_items_of_its_loaders_shape_where_the_compiled_sampler_is_absent(
    tmp_path: Path,
) -> None:
    recipe = next(block for block in RECIPES if "NeighborLoader" in block.text)
    require(["torch_geometric"])
    imported = "from torch_geometric.loader import NeighborLoader\n"
    assert imported in recipe.text
    run_recipe(recipe, tmp_path, recipe.text.replace(imported, NEIGHBORS))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda block: block.needs[0])
def test_a_recipe_is_short(recipe: Block) -> None:
    lines = [line for line in recipe.text.splitlines() if line.strip() and not re.match(r"#|import|from|assert|print", line)]
    assert len(lines) <= 10


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_block_says_what_it_is_in(page: Path) -> None:
    unknown = [f"line {block.line}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_relative_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_file_that_is_named_exists(page: Path) -> None:
    tops = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    named = re.findall(rf"`((?:{tops})/[^`\s]*)`", prose(page))
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_command_of_rowferry_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert [name for name in names if not re.search(rf"\b(?:rowferry|make) {name}\b", readme)] == []


def test_every_public_name_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    public = re.findall(r"^from .+ import (\w+) as \1$", Path(rf.__file__).read_text(), re.MULTILINE)
    assert "Pipeline" in public
    assert [name for name in public if not re.search(rf"\b{name}\b", readme)] == []


def test_every_benchmark_is_described() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    programs = [path.name for path in (ROOT / "benchmarks").glob("[!_]*.py")]
    assert [name for name in programs if f"`{name}`" not in text or f"benchmarks/{name}" not in text] == []


def test_the_loop_in_the_readme_has_at_most_eight_lines() -> None:
    loop = next(block.text for block in blocks(ROOT / "README.md") if "import rowferry" in block.text)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 8


def test_the_changelog_speaks_of_what_is_to_come_or_of_this_version() -> None:
    headings = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1:] == [] or rf.__version__ in headings[1:]
