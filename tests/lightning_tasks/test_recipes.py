"""Names of recipes: found, listed, and nearest where there is none."""

import pytest

from lightning_tasks.recipes import (
    CONFIGS,
    PART_FOLDERS,
    Recipe,
    RecipeError,
    find_recipe,
    recipe_name,
    shipped_recipes,
)


@pytest.fixture
def configs(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "strategy").mkdir()
    (tmp_path / "paper" / "wikitext2.yaml").write_text(
        "# summary: a\n# paper: b\n# needs: c\nmodel: {}\n# paper: late\n"
    )
    (tmp_path / "strategy" / "ddp.yaml").write_text("strategy: ddp\n")
    return tmp_path


def test_reads_the_head_of_a_recipe(configs):
    (recipe,) = shipped_recipes(configs)
    assert (recipe.name, recipe.summary, recipe.paper, recipe.needs) == ("paper/wikitext2", "a", "b", "c")


def test_a_missing_head_line_reads_as_a_dash(tmp_path):
    file = tmp_path / "bare.yaml"
    file.write_text("model: {}\n")
    assert Recipe.read(file).needs == "-"


def test_a_path_wins_over_a_name(configs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    assert find_recipe("mine.yaml", configs) == tmp_path / "mine.yaml"
    assert find_recipe("paper/wikitext2", configs) == configs / "paper" / "wikitext2.yaml"
    assert find_recipe("strategy/ddp", configs).name == "ddp.yaml"


@pytest.mark.parametrize("wrong", ["paper/wikitext", "papr/wikitext2", "wikitext2"])
def test_an_unknown_name_lists_the_nearest(configs, wrong):
    with pytest.raises(RecipeError, match=rf"'{wrong}'.*paper/wikitext2"):
        find_recipe(wrong, configs)


def test_nothing_near_points_to_the_list(configs):
    with pytest.raises(RecipeError, match="attnswap recipes"):
        find_recipe("zzzzzzzz", configs)


def test_names_do_not_leave_the_folder(configs):
    (configs.parent / "outside.yaml").write_text("a: 1\n")
    with pytest.raises(RecipeError):
        find_recipe("../outside", configs)


def test_the_name_of_a_file_elsewhere_is_its_stem(tmp_path):
    assert recipe_name(tmp_path / "my.yaml") == "my"


@pytest.mark.parametrize("recipe", shipped_recipes(), ids=lambda recipe: recipe.name)
def test_every_shipped_recipe_says_what_it_is(recipe):
    assert "-" not in (recipe.summary, recipe.paper, recipe.needs)


def test_parts_are_no_recipes():
    assert not [recipe.name for recipe in shipped_recipes() if recipe.name.split("/")[0] in PART_FOLDERS]
    assert all((CONFIGS / folder).is_dir() for folder in PART_FOLDERS)
