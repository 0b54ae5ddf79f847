"""What the documentation says is so: its snippets and commands run, its links lead somewhere, its names exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
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
    """A program of this repository, with options that it has."""
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
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
            exec(compile(code, str(page), "exec"), namespace)
        elif block.language == "bash":
            for name, *words in commands(block):
                assert name in KNOWN, f"line {block.line}: no test knows how to check the command {name}"
                KNOWN[name](words)


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
