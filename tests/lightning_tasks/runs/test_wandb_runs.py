"""W&B runs of the command and of comparisons, read from their offline files."""

import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import yaml

from lightning_tasks.callbacks.monitoring.warnings import CollapseWarnings
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import Variant
from lightning_tasks.runs.wandb_runs import RunLabels, check_cell_loggers, continue_run, save_run
from tests.lightning_tasks.programs import run_forked
from tests.lightning_tasks.runs.logged_files import final_config, offline_runs, rows_and_updates, run_record
from tests.rows import each_row

WANDB = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "demo", "tags": ["mine"]}}
TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A tiny classifier that W&B logs; its task has a hyper-parameter `model`, as the configuration has."""
    model = {"class_path": "lightning_tasks.ImageClassificationTask", "init_args": {"model_options": TINY}}
    data = {"class_path": "attnswap.datamodules.DigitsDataModule", "init_args": {"batch_size": 120}}
    trainer = {**QUIET, "max_steps": 2, "limit_val_batches": 1, "limit_test_batches": 1, "logger": [WANDB]}
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump({"model": model, "data": data, "trainer": trainer}))
    return path


@pytest.fixture(scope="module")
def cells(recipe, tmp_path_factory):
    """Two cells, one after the other in one process, as a worker of a comparison runs them."""
    out = tmp_path_factory.mktemp("out")
    variants = [Variant("plain, a/b", str(recipe), (), test=True), Variant("é" * 200, str(recipe))]
    planned = plan_cells(variants, [3], out, comparison="digits")
    for cell in planned:
        run_cell(cell)
    return planned


def test_each_cell_is_a_wandb_run_of_its_own(cells):
    runs = [run_record(records) for cell in cells for records in offline_runs(cell.folder)]
    assert len(runs) == 2
    assert len({run.run_id for run in runs}) == 2
    assert [run.run_group for run in runs] == ["digits", "digits"]
    assert runs[0].display_name == "plain, a/b seed 3"
    assert sorted(runs[0].tags) == ["mine", "plain, a/b", "seed 3"]
    assert len(runs[1].display_name) == 128  # as many as W&B takes
    assert max(map(len, runs[1].tags)) == 64


def test_a_cell_keeps_best_values_its_recipe_and_what_it_was_for(cells):
    (records,) = offline_runs(cells[0].folder)
    assert run_record(records).job_type == "cell"
    kinds = {
        kind: [each for each in records if each.WhichOneof("record_type") == kind] for kind in ("metric", "artifact")
    }
    kept = {record.metric.name: record.metric.summary for record in kinds["metric"]}
    assert kept["val/loss"].min
    assert kept["val/loss"].last
    assert kept["val/top1"].max
    (recipe,) = [record.artifact for record in kinds["artifact"] if record.artifact.type == "recipe"]
    names = {entry.path for entry in recipe.manifest.contents}
    assert {"config.yaml", "environment.json"} <= names


def test_a_sign_of_collapse_is_an_alert_once_a_kind(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path)):
        signs = CollapseWarnings("AttentionMonitor")
        for step in (1, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                signs.look({("sink", "layer_00"): 0.5, ("normalised_entropy", "layer_01"): 0.001}, f"step {step}")
    (records,) = offline_runs(tmp_path)
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert sorted(alert.title for alert in alerts) == ["attention sink", "entropy collapse"]
    assert "step 1" in alerts[0].text


def test_what_a_cell_logs_is_in_its_own_run(cells):
    for cell in cells:
        (records,) = offline_runs(cell.folder)
        history, _ = rows_and_updates(records)
        losses = [row["train/loss"] for row in history if "train/loss" in row]
        assert losses == [row["value"] for row in cell.result()["rows"] if row["metric"] == "train/loss"]


def test_the_key_model_has_one_form_in_fit_and_test(cells):
    configs = [final_config(records) for cell in cells for records in offline_runs(cell.folder)]
    for config in configs:  # the first was tested after its fit
        assert config["model"]["class_path"] == "lightning_tasks.ImageClassificationTask"
        assert config["model"]["init_args"]["model_options"] == TINY
    assert configs[0]["model"] == configs[1]["model"]


def test_long_names_and_dots_are_folders_of_their_own(cells, tmp_path):
    assert len(cells[1].folder.parent.name.encode()) <= 255
    long = [Variant("x" * 300 + end, "none") for end in "ab"]
    planned = plan_cells([*long, Variant("..", "none"), Variant(".", "none")], [0], tmp_path)
    assert {cell.folder.parent.parent for cell in planned} == {tmp_path / "cells"}
    assert len({cell.folder for cell in planned}) == 4


@each_row(
    ("loggers", "text"),
    [
        (False, "trainer.logger is false"),
        ([{**WANDB, "init_args": {"id": "one"}}], "the W&B logger has the id 'one'"),
        ({**WANDB, "init_args": {"version": "two"}}, "the W&B logger has the id 'two'"),
    ],
)
def test_what_would_make_one_run_of_all_cells_is_refused(loggers, text):
    with pytest.raises(UsageError, match=text):
        check_cell_loggers(loggers)


def test_labels_leave_what_was_given():
    arguments = {"group": None, "name": "mine", "tags": None}
    RunLabels("group", "name", ("tag", "", "tag")).fill(arguments)
    assert arguments == {"group": "group", "name": "mine", "tags": ["tag"]}


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(recipe, tmp_path_factory):
    """The folder of the runs: a fit, another that resumes it, and a test of the checkpoint."""
    import lightning_tasks.cli.fit as cli
    from lightning_tasks.runs.wandb_runs import one_run

    folder = tmp_path_factory.mktemp("resumed")
    common = ["--config", str(recipe), f"--trainer.default_root_dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["attnswap"])
        with one_run():
            cli.run(["fit", *common])
        (checkpoint,) = folder.rglob("*.ckpt")
        with one_run():
            cli.run(["fit", *common, "--ckpt_path", str(checkpoint), "--trainer.max_steps=4"])
        with one_run():
            cli.run(["test", *common, "--ckpt_path", str(checkpoint)])
    return folder


def test_a_resumed_fit_goes_on_with_its_wandb_run(resumed):
    first, second, tested = (offline_runs(resumed / "tiny" / f"version_{number}")[0] for number in range(3))
    ids = [run_record(records).run_id for records in (first, second, tested)]
    assert ids[0] == ids[1] != ids[2]
    steps = [row["trainer/global_step"] for row in rows_and_updates(second)[0] if "train/loss" in row]
    assert steps == [2, 3]
    assert final_config(second)["model"]["class_path"] == final_config(first)["model"]["class_path"]


def test_a_test_has_the_key_model_in_the_form_of_the_fit(resumed):
    fitted, _, tested = (offline_runs(resumed / "tiny" / f"version_{number}")[0] for number in range(3))
    one, other = (final_config(records)["model"] for records in (fitted, tested))
    assert one["class_path"] == other["class_path"]
    assert one["init_args"].keys() == other["init_args"].keys()


def test_a_given_id_or_another_project_is_no_continuation():
    checkpoint = {"wandb_run": {"id": "old", "project": "demo"}}
    for arguments, expected in (
        ({"project": "demo", "id": None, "version": None}, "old"),
        ({"project": "demo", "id": "new", "version": None}, "new"),
        ({"project": "demo", "id": None, "version": "new"}, None),
        ({"project": "other", "id": None, "version": None}, None),
    ):
        continue_run(arguments, checkpoint)
        assert arguments["id"] == expected
    arguments = {"project": "demo", "id": None}
    for others in ({}, {"wandb_run": "broken"}):
        continue_run(arguments, others)
    assert arguments["id"] is None


@each_row("run", [None, 3, ["abc"], {"a": 1}, "", " a", "../../other", "team/project/abc", "a\\b", "a" * 129])
def test_what_is_no_id_in_a_checkpoint_is_refused(run):
    arguments = {"project": "demo", "id": None}
    for saved in ({"id": run, "project": "demo"}, {"project": "demo"}):
        with pytest.raises(UsageError, match=r"which is no id of one .* give the logger an `id`"):
            continue_run(arguments, {"wandb_run": saved})
    continue_run(arguments, {"wandb_run": {"id": run, "project": ["demo"]}})
    assert arguments["id"] is None


def test_a_run_of_another_entity_is_not_continued():
    saved = {"id": "abc", "project": "demo", "entity": "theirs"}
    for entity, expected in (("ours", None), ("theirs", "abc"), (None, "abc")):
        arguments = {"project": "demo", "id": None, "entity": entity}
        continue_run(arguments, {"wandb_run": saved})
        assert arguments["id"] == expected


# -- the key -----------------------------------------------------------------------------------------------------------

KEY = "a" * 40


@pytest.mark.costly
def test_the_key_is_looked_up_as_wandb_does(tmp_path):
    """By its environment variables, its settings file and netrc, for the server that these name; in one process."""
    (tmp_path / "netrc").write_text(f"machine wandb.lab.example login user password {KEY}\n")
    (tmp_path / "config").mkdir()
    server = {"WANDB_BASE_URL": "https://wandb.lab.example"}
    cases = [
        {},  # no key of the public server
        server,  # in netrc
        {"WANDB_BASE_URL": "https://other.example"},
        {"WANDB_API_KEY": KEY},
        {"WANDB_MODE": "online"},
        {"WANDB_MODE": "disabled"},
        {"WANDB_API_KEY": "a key!"},
    ]
    settings = "[default]\nbase_url = https://wandb.lab.example\n"
    environment = {"NETRC": str(tmp_path / "netrc"), "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    environment["WANDB_CONFIG_DIR"] = str(tmp_path / "config")
    module = "tests.lightning_tasks.runs.key_cases"
    done = run_forked(module, json.dumps([*cases, {"settings": settings}]), cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr

    offline, online = ["offline", "offline"], [None, "online"]
    *found, refused, named = json.loads(done.stdout.splitlines()[-1])
    assert found == [offline, online, offline, online, ["online", "online"], ["disabled", "disabled"]]
    assert "WANDB_API_KEY" in refused
    assert KEY not in refused
    assert named == online


def test_the_first_process_alone_writes_the_run_into_a_checkpoint():
    logger = type("WandbLogger", (), {"version": "a", "name": "b"})()
    for is_first, expected in ((False, {}), (True, {"wandb_run": {"id": "a", "project": "b"}})):
        checkpoint = {}
        save_run(SimpleNamespace(loggers=[logger], is_global_zero=is_first), checkpoint)
        assert checkpoint == expected
