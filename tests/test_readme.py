"""README: its Python runs, its YAML builds callbacks, what it links to is there, and its recipes exist."""

import re
from pathlib import Path

import yaml

from lightning_tasks.recipes import find_recipe
from lightning_tasks.training.hparams import import_object

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_python_runs(capsys):
    snippets = blocks("python")
    assert len(snippets) >= 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert "cosine_attention, temperature=0.2" in capsys.readouterr().out


def test_the_yaml_builds_callbacks():
    built = [
        import_object(entry["class_path"])(**entry.get("init_args", {}))
        for block in blocks("yaml")
        for entry in yaml.safe_load(block)["trainer"]["callbacks"]
    ]
    assert "SwapAttention" in {type(callback).__name__ for callback in built}


def test_links_lead_to_files():
    paths = set(re.findall(r"\]\(((?!https?:)[^)#\s]+)", README))
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_table_of_mechanisms_is_one_click_away():
    assert "](docs/results/zoo.md)" in README


def test_the_recipes_exist():
    named = set(re.findall(r"attnswap (?:fit|test|compare) ([a-z_0-9]+/[a-z_0-9]+)", README))
    named |= set(re.findall(r"--(?:config|trainer) ([a-z_0-9]+/[a-z_0-9]+)", README))
    assert len(named) >= 4
    for name in named:
        assert find_recipe(name), name
