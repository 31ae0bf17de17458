"""The documentation site: every page is found from the first one, and what tutorials run is Python."""

import ast
import posixpath
import re
from pathlib import Path

import pytest
import yaml

from attention_modules import available_mechanisms
from attention_modules.mechanism import mechanism_class
from lightning_tasks.__main__ import main
from lightning_tasks.analyses import ANALYSES
from lightning_tasks.recipes.variants import read_variants
from lightning_tasks.robustness.attacks.table import read_attacks
from tests.rows import each_row
from tests.test_public_paths import resolve

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix()
    for path in DOCS.rglob("*.md")
    if not re.match(r"results/.*/", path.relative_to(DOCS).as_posix())  # written by runs, linked to as files
)
TUTORIALS = [page for page in PAGES if page.startswith("tutorials/") and page != "tutorials/index"]
TOCTREE = re.compile(r"```\{toctree\}\n(?P<body>.*?)```", re.S)
PATH = re.compile(r"(?<![\w.])(?:attnswap|attention_modules|lightning_tasks)(?:\.\w+)+(?![\w/])")
CELL = re.compile(r"```\{code-cell\}.*?\n(?P<code>.*?)```", re.S)


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def listed(page: str) -> list[str]:
    """The pages in the toctrees of a page."""
    bodies = [match["body"] for match in TOCTREE.finditer(text_of(page))]
    lines = [line.strip() for body in bodies for line in body.splitlines()]
    names = [line for line in lines if line and not line.startswith(":")]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) for name in names]


def test_every_page_is_in_one_table_of_contents():
    found, waiting = [], ["index"]
    while waiting:
        page = waiting.pop()
        found.append(page)
        waiting += listed(page)
    assert sorted(found) == PAGES


@each_row("page", TUTORIALS)
def test_cells_of_a_tutorial_are_python(page):
    text = text_of(page)
    assert text.startswith("---\nfile_format: mystnb\n"), "a page whose cells nobody runs"
    cells = [re.sub(r"^(:.*\n)+\n", "", match["code"]) for match in CELL.finditer(text)]
    assert len(cells) >= 3
    for cell in cells:
        if not cell.startswith("%%"):  # the shell's, or a file's
            ast.parse(cell)


def test_every_path_in_a_guide_or_tutorial_exists():
    guides = [page for page in PAGES if page.startswith(("tutorials/", "how_to/", "reference/", "explanations/"))]
    named = {
        path for page in guides for path in PATH.findall(text_of(page)) if not path.endswith((".json", ".safetensors"))
    }
    assert len(named) > 20
    for path in named:
        assert resolve(path) is not None, path


@each_row("name", available_mechanisms())
def test_the_page_of_a_mechanism_says_what_it_is_and_costs(name):
    text = text_of(f"explanations/mechanisms/{name}")
    assert text.startswith(f"# {name}\n")
    for part in ("$$", "Parameters:", "Neutral start:", "Cost:", "- Good for:", "- Against:"):
        assert text.count(part) >= 1, part
    assert f".. autoclass:: attention_modules.{mechanism_class(name).__name__}\n" in text
    assert ("the query projection is left out" in text) == (not mechanism_class(name).uses_query)
    assert f"]({name}.md)" in text_of("explanations/mechanisms/index")


def papers_commands():
    """What the table of the papers gives: commands, `...` filled in from the one above, and settings."""
    table, above = text_of("explanations/papers").partition("```bash")[0], ""
    for text in re.findall(r"`([^`]+)`", table):
        whole = re.sub(r"^\.\.\.", above, text)
        if whole.startswith("attnswap ") and " ... " not in whole:
            above = " ".join(whole.split()[:3])  # without its options
            yield whole.removesuffix(" --ckpt_path ...")
        elif whole.startswith("attacks:"):
            yield whole.replace("[...]", "[1, 1, 1]")


@each_row("command", [*dict.fromkeys(papers_commands())])
def test_each_command_in_the_table_of_the_papers_is_one(command, capsys):
    if command.startswith("attacks:"):
        assert read_attacks(yaml.safe_load(command)["attacks"])
        return
    _, kind, name, *options = command.split()
    if kind == "analyze":
        assert name in ANALYSES
        given = [re.sub("BEFORE|AFTER", "x", each) for each in options]
        for arguments in (given, ["--help"]):
            with pytest.raises(SystemExit):
                main(["analyze", name, *arguments])
        printed = capsys.readouterr()
        assert "the following arguments are required: " in printed.err  # values are checked before
        assert all(f" {each}" in printed.out for each in given if each.startswith("--"))
    elif kind == "compare" or not options:
        assert read_variants(name)
    else:
        with pytest.raises(SystemExit) as stop:
            main([kind, name, *options, "--print_config"])
        assert stop.value.code == 0
