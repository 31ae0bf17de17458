"""What the command leaves out of the lines of other packages, and that it prints the configuration that runs."""

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lightning_tasks.__main__ import main
from lightning_tasks.cli.as_run import OF_LIGHTNING
from lightning_tasks.cli.quiet import leave_out_what_is_not_known, quiet
from tests.lightning_tasks.cli.runs import checkpoint, last_run, saved_config
from tests.lightning_tasks.demo import DemoModule


@pytest.fixture
def logged(caplog, monkeypatch):
    for name in (rank_zero_module.log.name, "lightning.pytorch"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level(logging.INFO, name)
    return caplog


def test_tips_are_left_out_of_the_command_alone(demo, logged):
    main(["fit", "--config", demo])
    assert not [line for line in logged.messages if "Tip" in line]
    assert any("Trainer.fit` stopped" in line for line in logged.messages)
    Trainer(logger=False, accelerator="cpu")
    assert [line for line in logged.messages if "litlogger" in line]  # Lightning says it to everybody else


def test_other_lines_pass(logged):
    with quiet():
        rank_zero_info("💡 Tip: of somebody else")
        with pytest.warns(UserWarning, match="The dirpath has changed from"):
            warnings.warn("The dirpath has changed from a to b", stacklevel=1)  # of another module
    assert logged.messages == ["💡 Tip: of somebody else"]


def test_a_line_that_cannot_be_formatted_ends_no_run(caplog, monkeypatch):
    """As without the filter, where logging itself reports it."""
    caplog.set_level(logging.INFO, rank_zero_module.log.name)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with quiet():
        rank_zero_info("100% of %d", "x")


def test_a_run_without_a_seed_says_once_which_it_takes(demo, monkeypatch):
    """Lightning warns of it beside the line "Seed set to 0"."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        main(["fit", "--config", demo, "--seed_everything", "true"])
    assert not [each for each in found if "No seed found" in str(each.message)]


def test_a_resumed_run_has_another_folder_without_a_warning(demo):
    main(["fit", "--config", demo])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        main(["fit", "--config", demo, "--ckpt_path", str(checkpoint()), "--trainer.max_steps", "3"])
    texts = [str(each.message) for each in found]
    assert not [text for text in texts if "dirpath has changed" in text or "LeafSpec" in text]


@pytest.mark.parametrize(("before", "after"), [(None, "mine"), ("mine", None), ("mine", "other")])
def test_a_folder_of_checkpoints_that_the_user_changes_is_said(demo, before, after):
    def checkpoints(folder):
        kept = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": folder}}
        return f"--trainer.callbacks={json.dumps([kept])}"

    main(["fit", "--config", demo, checkpoints(before)])
    path = next(Path.cwd().rglob("*.ckpt"))
    with pytest.warns(UserWarning, match="The dirpath has changed from"):
        main(["fit", "--config", demo, "--ckpt_path", str(path), "--trainer.max_steps", "3", checkpoints(after)])


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_zero_flops_are_left_out_and_the_rest_is_not(kind, logged, capsys):
    if kind is RichModelSummary:
        pytest.importorskip("rich")
    rows = [(" ", ["0"]), ("Name", ["layer"]), ("Type", ["Linear"]), ("Params", ["3"]), ("Mode", ["train"])]
    rows += [("FLOPs", ["0"])]
    trainer = Trainer(logger=False, accelerator="cpu", callbacks=[kind()], enable_progress_bar=False)
    (summary,) = [callback for callback in trainer.callbacks if type(callback) is kind]
    for flops in (0, 7):
        logged.clear()
        leave_out_what_is_not_known(trainer)
        summary.summarize(rows, 3, 3, 0.1, {"train": 1, "eval": 0}, total_flops=flops)
        printed = "".join(logged.messages) + capsys.readouterr().out
        assert ("total flops" in printed.lower()) == bool(flops)
        assert "Linear" in printed
        assert "Modules in train mode" in printed


@pytest.mark.parametrize("command", ["validate", "test"])
def test_untrained_weights_are_said(demo, command):
    with pytest.warns(UserWarning, match="no --ckpt_path and no --init_from: untrained weights"):
        main([command, "--config", demo])


def printed_config(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--print_config"])
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_the_printed_configuration_is_that_of_the_run(demo, capsys):
    printed = printed_config(capsys, "fit", "--config", demo)
    assert not Path("runs").exists()
    main(["fit", "--config", demo])
    saved = saved_config()
    assert printed["weights_only"] is saved["weights_only"] is True
    (planned,), (kept,) = printed["trainer"]["logger"], saved["trainer"]["logger"]
    assert planned["class_path"] == kept["class_path"]
    assert Path(planned["init_args"]["save_dir"], planned["init_args"]["name"]) == last_run().parent
    Path("printed.yaml").write_text(yaml.safe_dump(printed))
    main(["fit", "--config", "printed.yaml"])
    assert last_run().name == "version_1"
    states = [torch.load(next(Path("runs/demo", f"version_{number}").rglob("*.ckpt"))) for number in (0, 1)]
    assert all(torch.equal(states[0]["state_dict"][name], each) for name, each in states[1]["state_dict"].items())


def test_the_printed_configuration_has_the_number_of_workers_and_the_added_callbacks(demo, capsys, monkeypatch):
    """And it prints itself again."""

    def printed(*arguments):
        with pytest.raises(SystemExit):
            main([*arguments, "--print_config"])
        output = capsys.readouterr()
        assert output.out, output.err
        return output.out

    monkeypatch.setenv("ATTNSWAP_NUM_WORKERS", "3")
    data = "--data=attnswap.datamodules.CIFAR10DataModule"
    text = printed("fit", "--config", demo, data, "--ckpt_path=s3://a/b.ckpt")
    assert yaml.safe_load(text)["data"]["init_args"]["num_workers"] == 3
    added = ["SaveOnStop", "ExactResume", "CheckResumedOptimizer"]
    comment = text[text.index("# The command adds these callbacks") :]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert sorted(line.rpartition(".")[2] for line in comment.splitlines()[1:]) == sorted(added)
    Path("printed.yaml").write_text(text)
    monkeypatch.delenv("ATTNSWAP_NUM_WORKERS")
    assert printed("fit", "--config", "printed.yaml") == text
    Path("weights.ckpt").touch()
    text = printed("predict", "--config", demo, data, "--data.num_workers=0", "--init_from=weights.ckpt")
    assert yaml.safe_load(text)["data"]["init_args"]["num_workers"] == 0
    assert "InitFromCheckpoint\n" in text
    assert "PredictionTable\n" in text


def test_a_fit_that_nothing_ends_has_its_number_of_epochs(capsys):
    model = f"--model={DemoModule.__module__}.DemoModule"
    assert printed_config(capsys, "fit", model)["trainer"]["max_epochs"] == 1000
    assert printed_config(capsys, "fit", model, "--trainer.max_steps=3")["trainer"]["max_epochs"] is None
    assert printed_config(capsys, "fit", model, "--trainer.logger=false")["trainer"]["logger"] is False


def test_what_a_trainer_takes_for_null():
    trainer = Trainer(logger=False, accelerator="cpu")
    for name in ("num_sanity_val_steps", "log_every_n_steps", "val_check_interval", "precision"):
        assert getattr(trainer, name) == OF_LIGHTNING[name]
    for split in ("train", "val", "test", "predict"):
        assert getattr(trainer, f"limit_{split}_batches") == OF_LIGHTNING[f"limit_{split}_batches"]
    assert trainer.checkpoint_callbacks
    assert trainer.progress_bar_callback is not None


def test_a_fit_by_steps_has_no_last_epoch_in_its_bar():
    pytest.importorskip("rich")
    for limits, text in (({"max_steps": 5}, "Epoch 0"), ({"max_epochs": 3}, "Epoch 0/2")):
        trainer = Trainer(logger=False, accelerator="cpu", callbacks=[RichProgressBar()], **limits)
        leave_out_what_is_not_known(trainer)
        (bar,) = [callback for callback in trainer.callbacks if isinstance(callback, RichProgressBar)]
        bar._trainer = trainer
        assert bar._get_train_description(0).strip() == text
