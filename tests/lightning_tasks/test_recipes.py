"""Recipes: names found, listed, and nearest where there is none; every shipped one parses, and its twin runs."""

import csv
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare.plan import check_cells, plan_cells
from lightning_tasks.compare.record import FINISHED, read_record
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import (
    CONFIGS,
    Recipe,
    check_recipe,
    find_recipe,
    is_comparison,
    read_settings,
    recipe_name,
    shipped_parts,
    shipped_recipes,
)
from lightning_tasks.recipes.variants import find_named, find_variant, full_name, read_variants
from lightning_tasks.robustness.attacks.table import AttackSetting
from lightning_tasks.runs.metric_names import robustness_name
from tests.lightning_tasks.gathered import CHECKS
from tests.lightning_tasks.recipe_table import PAGE, page
from tests.lightning_tasks.twins import OVERLAYS, twin
from tests.rows import each_row

COMPARISONS = [recipe.name for recipe in shipped_recipes() if is_comparison(read_settings(recipe.path))]
FILES = [recipe for recipe in shipped_recipes() if recipe.name not in COMPARISONS]
RECIPES = [name for recipe in FILES for name in (recipe.name, *recipe.variant_names)]
FITTED = [recipe.name for recipe in FILES]  # their variants are parsed
LIKE_ANOTHER = ("rpc/imagenet_fan_tiny", "rpc/imagenet_deit_base", "camvid/segmenter")
LIKE_ANOTHER += ("locater/wikitext2_small_vocabulary", "rpc/wikitext2_small_vocabulary")
TEST_PARTS = [name for name in shipped_parts() if name.startswith("robustness/")]  # behind --config, to test with
PARTS = [name for name in shipped_parts() if name not in TEST_PARTS]

# What a twin may name: sizes and amounts of data, and what a run without a terminal needs.
SIZES = {"num_layers", "num_heads", "dim", "mlp_dim", "num_tokens", "vocab_size", "batch_size", "num_workers"}
SIZES |= {
    "max_bytes",
    "max_steps",
    "steps_per_epoch",
    "val_check_interval",
    "log_every_n_steps",
    "every_n_steps",
    "total_iters",
    "T_max",
    "milestones",
}
SIZES |= {"limit_val_batches", "limit_test_batches", "num_sanity_val_steps"}
SIZES |= {"num_epochs", "cooldown_epochs", "precision"}  # a CPU has no float16
SIZES |= {"img_size", "patch_size", "embed_dim", "depth", "max_epochs", "warmup_epochs"}
SIZES |= {"crop_size", "short_side", "eval_batch_size", "windows_at_once", "decoder_heads", "every_n_epochs"}
SIZES |= {"num_train", "num_val", "num_test", "stride", "check_val_every_n_epoch"}
ADDED = {"accelerator", "enable_progress_bar", "enable_model_summary"}
# And in place of a pretrained model's folder a small one, with words as tokens.
ADDED |= {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tokenizer"}
SIZES |= {"stages"}


@pytest.fixture
def configs(tmp_path):
    """A folder like `configs` with one recipe and one part."""
    (tmp_path / "paper").mkdir()
    (tmp_path / "parts" / "strategy").mkdir(parents=True)
    (tmp_path / "paper" / "wikitext2.yaml").write_text(
        "# summary: a\n# paper: b\n# needs: c\nmodel: {}\n# paper: late\n"
    )
    (tmp_path / "parts" / "strategy" / "ddp.yaml").write_text("strategy: ddp\n")
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
    with pytest.raises(UsageError, match=rf"'{wrong}'.*paper/wikitext2"):
        find_recipe(wrong, configs)


def test_nothing_near_points_to_the_list(configs):
    with pytest.raises(UsageError, match="attnswap recipes"):
        find_recipe("zzzzzzzz", configs)


def test_a_folder_is_called_one(configs, tmp_path):
    with pytest.raises(UsageError, match=r"paper' is a folder; give a YAML file, or the name of a shipped recipe"):
        find_recipe(str(tmp_path / "paper"), configs)
    (tmp_path / "paper" / "config.yaml").write_text("model: {}\n")  # that of a run
    with pytest.raises(UsageError, match=r"paper' is a folder; give .*/paper/config\.yaml"):
        find_recipe(str(tmp_path / "paper"), configs)


def test_names_do_not_leave_the_folder(configs):
    (configs.parent / "outside.yaml").write_text("a: 1\n")
    with pytest.raises(UsageError):
        find_recipe("../outside", configs)


@each_row(
    ("content", "says"),
    [
        ("model: [\n", "is no YAML"),
        ("- model\n", "holds list"),
        ("", "is empty; settings .* are needed"),
        ("# only a comment\n", "is empty"),
        ("modle: {}\n", "unknown section 'modle'; the nearest are model"),
        ("zzz: 1\n", "they are seed_everything, model, data, trainer"),
        ("base: a\nvariants: {}\n", "attnswap compare"),
    ],
)
def test_a_bad_recipe_is_named_with_what_is_wrong(tmp_path, content, says):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"bad\.yaml.*{says}"):
        check_recipe(path, read_settings(path))


def test_the_name_of_a_file_elsewhere_is_its_stem(tmp_path):
    assert recipe_name(tmp_path / "my.yaml") == "my"


@each_row("recipe", shipped_recipes())
def test_every_shipped_recipe_says_what_it_is(recipe):
    assert "-" not in (recipe.summary, recipe.paper, recipe.needs)


def test_readme_lists_every_recipe():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.lightning_tasks.recipe_table"


@each_row("recipe", RECIPES)
def test_every_recipe_is_guarded_and_summarized(recipe):
    settings = find_named(recipe).settings
    callbacks = settings["trainer"]["callbacks"]
    if changed := [text for text in find_variant(recipe).overrides if text.startswith("--trainer.callbacks")]:
        (callbacks,) = [yaml.safe_load(text.removeprefix("--trainer.callbacks=")) for text in changed]
    names = [each["class_path"].rpartition(".")[2] for each in callbacks]
    assert names[-2:] == ["NonFiniteGuard", "RunSummary"]  # after whatever changes gradients


def test_parts_are_no_recipes():
    assert not {recipe.name for recipe in shipped_recipes()} & set(shipped_parts())
    assert not [recipe.name for recipe in shipped_recipes() if recipe.name.startswith("parts")]


def test_the_names_of_parts_are_public():
    promised = {f"strategy/{name}" for name in ("single", "ddp", "ddp_multinode", "fsdp2", "fsdp")}
    promised |= {"logger/csv", "logger/tensorboard", "logger/wandb", "trainer/bf16", "trainer/smoke"}
    assert promised <= set(PARTS)
    assert "robustness/standard" in TEST_PARTS
    for name in shipped_parts():
        assert recipe_name(find_recipe(name)) == name


# -- every shipped file ------------------------------------------------------------------------------------------------


def leaves(value, path=()):
    """The entries of nested dictionaries, and of lists of classes by `class_path`, by the keys that lead there."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "class_path" in each for each in value):
        value = {each["class_path"]: {key: each[key] for key in each if key != "class_path"} for each in value}
    if not isinstance(value, dict):
        return {path: value}
    return {keys: leaf for key, each in value.items() for keys, leaf in leaves(each, (*path, key)).items()}


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    return tmp_path


def test_there_is_a_twin_of_every_recipe_and_of_nothing_else():
    assert sorted(recipe_name(path, OVERLAYS) for path in OVERLAYS.rglob("*.yaml")) == [file.name for file in FILES]


@each_row("recipe", FILES)
def test_a_twin_names_what_differs_and_that_are_sizes(recipe):
    named, own = leaves(read_settings(OVERLAYS / f"{recipe.name}.yaml")), leaves(read_settings(recipe.path))
    assert {keys[-1] for keys in named} <= SIZES | ADDED
    assert not [keys for keys, value in named.items() if own.get(keys) == value]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses(name, own_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", name, "--print_config"])
    assert stop.value.code == 0
    assert "class_path: lightning_tasks" in capsys.readouterr().out


@pytest.mark.parametrize("part", PARTS)
def test_every_part_parses(part, own_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "fit",
                "--model",
                "lightning.pytorch.demos.boring_classes.BoringModel",
                "--trainer",
                part,
                "--print_config",
            ]
        )
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]
    content = read_settings(find_recipe(part))
    if content.get("logger") is True:  # printed as what the run will have
        assert [each["class_path"] for each in printed["logger"]] == ["lightning.pytorch.loggers.CSVLogger"]
        del content["logger"]
    assert all(printed[key] == value for key, value in content.items() if not isinstance(value, dict))


def logged_metrics(name):
    """What the callbacks of a recipe promise to log: at least one of each kind."""
    callbacks = {
        callback["class_path"].rsplit(".", 1)[-1]: callback.get("init_args", {})
        for callback in find_named(name).settings["trainer"]["callbacks"]
    }
    metrics = [callbacks["RunSummary"].get("metric", "val/perplexity")]
    if "AttentionMonitor" in callbacks:
        metrics.append("val/attention/entropy/mean")
    if "SpectrumMonitor" in callbacks:
        metrics.append("qk_spectrum/variance/layer_00")
    return metrics


@pytest.mark.parametrize("part", TEST_PARTS)
def test_every_part_for_a_test_adds_its_callbacks_to_the_recipe_s(part, own_folder, capsys):
    recipe = "quickstart/language_modeling"
    with pytest.raises(SystemExit) as stop:
        main(["test", "--config", recipe, "--config", part, "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    own, added = (read_settings(find_recipe(name))["trainer"] for name in (recipe, part))
    expected = [entry["class_path"] for entry in (*own["callbacks"], *added["callbacks+"])]
    assert [entry["class_path"] for entry in printed] == expected


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in LIKE_ANOTHER else ()) for each in FITTED]
)
def test_every_twin_fits_validates_tests_and_predicts(name, own_folder, tiny_data, monkeypatch, capsys):
    if name.startswith("mmseg/"):
        pytest.importorskip("mmseg", reason="the extra [mmseg] is not installed")
    monkeypatch.setenv("ATTNSWAP_DATA", str(tiny_data))
    recipe, metrics = twin(name, own_folder), logged_metrics(name)
    main(["fit", "--config", recipe])
    assert metrics[0] in capsys.readouterr().out
    run = Path("runs") / full_name(recipe) / "version_0"
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for metric in metrics:
        values = [float(row[metric]) for row in rows if row[metric]]
        assert values, metric
        assert all(math.isfinite(value) for value in values)
    assert (run / "run.png").stat().st_size > 1000
    if name not in {recipe.name for recipe in FILES}:  # it differs from its recipe in how it trains
        return
    commands = ["test", "validate", "predict"]
    if name != "quickstart/language_modeling":  # one of them in turn
        commands = [commands[FITTED.index(name) % 3]]
    for command in commands:
        main([command, "--config", recipe, "--ckpt_path", str(next(run.glob("checkpoints/*.ckpt")))])
    if "predict" not in commands:
        return
    predicted = run.parent / f"version_{1 + commands.index('predict')}"
    if "SegmentationTask" in find_named(recipe).path.read_text():  # masks are shown, not listed
        assert (predicted / "predict_overlay.png").stat().st_size > 1000
    else:
        assert (predicted / "predictions.csv").read_text().startswith("index,")


def test_exploratory_figures_can_stand_beside_those_of_the_comparison():
    main_one, other = (
        read_settings(CONFIGS / "rpc" / f"compare_classification{end}.yaml") for end in ("", "_exploratory")
    )
    for key in ("base", "test", "settings", "metrics"):
        assert main_one[key] == other[key], key


def test_the_segmenters_start_from_backbones_of_the_comparison_on_imagenet():
    """Those of the same attention: what the variants leave out is the recipes' own."""
    segmenters, classifiers = (read_variants(f"rpc/compare_{name}") for name in ("ade20k", "imagenet"))
    cells = {cell.checkpoint: cell for cell in plan_cells(classifiers, [0], Path("runs/rpc_imagenet"))}
    started = {}
    for variant in segmenters:
        (path,) = [text.partition("=")[2] for text in variant.overrides if text.startswith("--model.backbone_checkp")]
        started[variant.name] = cells[Path(path)].name
    n_6 = {"rpc": "rpc n 6", "rpc decoder": "rpc n 6", "rpc without S": "rpc n 6 without S"}
    assert started == {"softmax": "softmax", "symmetric": "symmetric", **n_6}


def attack_metrics(attacks=(), eps=(), **others):
    """The accuracies that a `RobustnessEvaluation` of images logs of its attacks."""
    read = [AttackSetting.read(attack) for attack in attacks]
    radii = {each.label: [text for text, _ in each.eps] or eps for each in read}
    return {robustness_name(label, each, "accuracy") for label, own in radii.items() for each in own}


def test_what_scripts_gather_is_checked_of_comparisons_that_there_are():
    assert {*CHECKS} <= {*COMPARISONS}


SEARCHED = [name for name in COMPARISONS if "grid" in read_settings(CONFIGS / f"{name}.yaml")]
RUN = ["quickstart/comparison", "locater/compare_mean"]  # two variants of each; `-m slow` runs all of all


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_variant_of_a_comparison_is_accepted(name, own_folder):
    content = read_settings(CONFIGS / f"{name}.yaml")
    content["base"] = twin(content["base"], own_folder)
    tiny = own_folder / "tiny.yaml"
    tiny.write_text(yaml.safe_dump(content, sort_keys=False))
    variants = read_variants(str(tiny))
    if name.startswith(("mmseg/", "zoo/")):
        variants = variants[:3]
    assert check_cells(plan_cells(variants, [0], Path("out"))).keys() == {variant.name for variant in variants}


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, False) for name in RUN),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in COMPARISONS),
    ],
)
def test_every_comparison_runs(name, whole, own_folder, tiny_data, monkeypatch, capsys):
    """Where not the whole, the first variant and RPC, or the second; values are chosen of two."""
    monkeypatch.setenv("ATTNSWAP_DATA", str(tiny_data))
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    content["base"] = twin(content["base"], own_folder)
    for variant in content["variants"].values():
        variant.pop("model.backbone_checkpoint", None)  # what another comparison leaves
    added = content.get("settings", {}).get("trainer.callbacks+", [])
    content["settings"] = {  # the twin has sizes of its own
        key: value
        for key, value in content.get("settings", {}).items()
        if re.search(r"callbacks\+|model\.(mechanism|options|layers)|attention", key)
    }
    for callback in added if isinstance(added, list) else [added]:
        if callback["class_path"].endswith("RobustnessEvaluation"):  # at a size for a test
            attacks = [metric for metric in content["metrics"] if re.search("_255/|_l1_", metric)]
            assert {*attacks} <= attack_metrics(**callback["init_args"])
            kept = ["fog"] if "imagenet_c" in callback["init_args"] else []
            callback["init_args"] |= {"num_images": 2, "attacks": ["fgsm"], "corruptions": kept}
    first, *others = content["variants"]
    if name in SEARCHED:
        ((key, values),) = content["grid"].items()
        searched = (
            {name: each[:2] for name, each in values.items()} if isinstance(values, dict) else {first: values[:2]}
        )
        content["grid"] = {key: searched}
        others = [*searched, *others]
    if not whole:
        other = "rpc" if "rpc" in others else next(each for each in others if each != first)
        content["variants"] = {key: content["variants"][key] for key in (first, other)}
        content.pop("references", None)
        if name in SEARCHED:
            content["grid"] = {key: {each: values for each, values in searched.items() if each in (first, other)}}
    tiny = own_folder / "tiny.yaml"
    tiny.write_text(yaml.safe_dump(content, sort_keys=False))
    main(["compare", str(tiny), "--seeds", "0", "--output", "out"])
    printed, errors = capsys.readouterr()
    never_logged = re.findall(r"[\w/.]+", errors.partition("never logged: ")[2].partition(";")[0])
    left_out = "released|pgd|spsa|square|autoattack|corruption|gaussian_noise|fog|motion_blur|layer_0[23]"
    assert all(re.search(left_out, metric) for metric in never_logged), never_logged
    assert all(f"| {variant} | 1 |" in printed for variant in content["variants"])
    other = [line for line in printed.partition("Not paired:")[2].partition("Intervals:")[0].splitlines() if line]
    unlike = "- (softmax (wider|widest|longer|longest)|narrow softmax) seed 0: "
    assert all(re.match(unlike, line) for line in other), other
    with Path("out/results.csv").open() as file:
        values = {(row["config"], int(row["seed"]), row["metric"]): float(row["value"]) for row in csv.DictReader(file)}
    kept = [(path, np.load(path)) for path in Path("out/cells").rglob("robustness_images.npz")]
    of_images = content.get("primary") in ("test/top1", "robustness/autoattack/1_255/accuracy")
    assert len(kept) == (len(content["variants"]) if of_images else 0)
    for path, found in kept:
        cell = json.loads((path.parent / "result.json").read_text())
        for name in set(found) - {"data"}:
            assert found[name].mean() == pytest.approx(values[cell["config"], 0, name])
    record = read_record(Path("out"))
    assert record.references == content.get("references", {})
    assert {cell.state for cell in record.cells} == {FINISHED}
    assert len({cell.training_data for cell in record.cells if "longe" not in cell.variant}) == 1
    if name in CHECKS:
        gathered = own_folder / "gathered"
        gathered.mkdir()
        CHECKS[name](own_folder / "out", gathered, values)


def test_the_saved_config_says_once_what_the_command_line_overrode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = twin("quickstart/language_modeling", tmp_path)
    changed = ["--model.model.init_args.dim=8", "--model.optimizer.init_args.lr=0.5", "--trainer.max_steps=1"]
    main(["fit", "--config", recipe, *changed])
    saved = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())["model"]["init_args"]
    assert set(saved["model"]) == set(saved["optimizer"]) == {"class_path", "init_args"}
    assert (saved["model"]["init_args"]["dim"], saved["optimizer"]["init_args"]["lr"]) == (8, 0.5)
