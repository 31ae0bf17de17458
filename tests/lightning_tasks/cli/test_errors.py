"""The command: errors are one line, and leave nothing behind."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.cli.arguments import spell_out_classes
from lightning_tasks.errors import refusal_in, refusal_text
from lightning_tasks.models import TransformerLM
from tests.lightning_tasks.cli.runs import DEMO, ROOT, checkpoint, last_run, saved_config

TASK = ["fit", "--model", "lightning_tasks.LanguageModelingTask", "--data", "tests.lightning_tasks.demo.DemoText"]
TASK += ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.enable_progress_bar=false"]
OWN_MODEL = '--model.model={"class_path": "lightning_tasks.models.TransformerLM", "init_args": %s}'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([OWN_MODEL % '{"dim": 10, "num_heads": 3}'], "dim=10 is not a multiple of num_heads=3"),
        ([OWN_MODEL % '{"num_token": 8}'], "TransformerLM could not be built with"),
        ([OWN_MODEL % '{"num_tokens": 7}'], "windows have 8 tokens and TransformerLM has 7 positions"),
        (["--model.mechanism=rpc", '--model.options={"iteration": 2}'], "no option 'iteration'"),
        (["--model.chunk_size=0"], "chunk_size must be at least 1, or None for all tokens, got 0"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_and_leaves_no_folder(arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*TASK, *arguments])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert text in line
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--model.optimizer=SGD", "--model.optimizer.lr=-1"],
            "SGD could not be built with {'lr': -1}: Invalid",
        ),
        (["--model.optimizer=SDG"], "no 'SDG' was found; looked in torch.optim. Did you mean 'SGD'"),
        (["--model.optimizr=SGD"], "Option 'optimizr' is not accepted. Did you mean 'optimizer'"),
        (["--data=WikiTextDataModuel"], "Did you mean 'attnswap.datamodules.WikiTextDataModule'"),
        (
            ["--trainer.max_stepz", "3"],
            "--trainer.max_stepz 3. Did you mean '--trainer.max_steps'",
        ),
        (["--trainer.max_ep", "3"], "unrecognized arguments: --trainer.max_ep 3. Did you mean '--trainer.max_epochs'"),
        (["--ckpt", "x"], "unrecognized arguments: --ckpt x. Did you mean '--ckpt_path'"),
        (["--model.lr=0.1"], "Option 'lr' is not accepted. It belongs to the optimizer: --model.optimizer.lr"),
        (["--data=cifar10"], "Did you mean 'attnswap.datamodules.CIFAR10DataModule'? Others there: "),
        (["--data=wikitext"], "Did you mean 'attnswap.datamodules.WikiTextDataModule'? Others there: "),
        (["--model=language_modeling"], "Did you mean 'lightning_tasks.LanguageModelingTask'? Others there: "),
        (["--data.batch_size=some"], "Expected a <class 'int'>. Got value: some"),
        (["--model.mechanism=rcp"], "Did you mean 'rpc'"),
        (["--data.batch_size=0"], "batch_size"),
    ],
)
def test_bad_input_is_one_line_with_the_nearest_name(arguments, text, capsys, said):
    data = ["--data", "attnswap.datamodules.PythonSourceDataModule"]
    with pytest.raises(SystemExit) as stop:
        main([*TASK[:3], *data, *TASK[5:], "--trainer.limit_val_batches=0", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if line.strip() and "Warning" not in line]
    assert line.startswith("attnswap: error: ")
    assert text in line
    assert not Path("runs").exists()
    assert said == []


def test_what_cannot_be_built_is_not_offered(capsys):
    with pytest.raises(SystemExit):
        main(["show-batch", "--data", "vision"])
    printed = capsys.readouterr().err
    assert "CIFAR10DataModule" in printed
    assert "VisionDataModule" not in printed


@pytest.mark.parametrize("command", ["show-batch", "compare", "report", "analyze token-selection"])
def test_no_command_takes_abbreviations(command, capsys):
    given = {"show-batch": ["quickstart/classification"], "compare": ["x"], "report": ["x"]}.get(command, [])
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), *given, "--outp", "x", "--output", "y"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --outp x" in capsys.readouterr().err.replace("--outp=x", "--outp x")


def test_an_option_of_the_callbacks_says_that_it_reaches_the_last(demo):
    recipe = yaml.safe_load(Path(demo).read_text())
    names = ["lightning_tasks.callbacks.NonFiniteGuard", "lightning.pytorch.callbacks.ModelSummary"]
    recipe["trainer"]["callbacks"] = [{"class_path": name} for name in names]
    Path("two.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.warns(
        UserWarning, match=r"--trainer.callbacks.max_depth changes ModelSummary, the last of 2 callbacks"
    ):
        main(["fit", "two.yaml", "--trainer.callbacks.max_depth", "2"])
    own = [
        "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor",
        "--trainer.callbacks.log_momentum=true",
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*the last of")
        main(["fit", "two.yaml", *own])


def test_an_option_that_the_last_callback_has_not(demo, capsys):
    recipe = yaml.safe_load(Path(demo).read_text())
    recipe["trainer"]["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.Timer"}]
    Path("two.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit):
        main(["fit", "two.yaml", "--trainer.callbacks.every_n_steps", "2"])
    assert "reaches the last callback of the list alone" in capsys.readouterr().err


def test_a_run_says_once_where_its_files_are(demo, said):
    main(["fit", "--config", demo])
    assert said == [f"attnswap: this run's files are in {last_run()}"]


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m lightning_tasks recipes | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=60)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_a_refusal_of_several_lines_is_indented():
    assert refusal_text(ValueError("one")) == "attnswap: error: one"
    assert refusal_text(ValueError("one"), "more") == "attnswap: error: one (more)"
    assert refusal_text(ValueError("one:\n\n\ttwo\nthree \n"), "more") == (
        "attnswap: error: one:\n        two\n    three\n    (more)"
    )
    assert refusal_text(ValueError()) == "attnswap: error: ValueError"


@pytest.mark.parametrize(
    ("option", "further"),
    [
        ("--model.optimizer SGD", "--model.optimizer.lr"),
        ("--model.optimizer=SGD", "--model.optimizer.init_args.lr"),
        ("--model.optimizer torch.optim.SGD", "--model.optimizer.lr"),
    ],
)
def test_a_class_and_then_its_arguments(option, further):
    """jsonargparse's usual short form; the arguments of the recipe's own class are gone with it."""
    recipe = {"model": {"class_path": "lightning_tasks.LanguageModelingTask", "init_args": {}}}
    recipe["model"]["init_args"]["optimizer"] = {"class_path": "AdamW", "init_args": {"lr": 3.0, "amsgrad": True}}
    recipe["data"] = {"class_path": "tests.lightning_tasks.demo.DemoText"}
    recipe["trainer"] = {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 0, "enable_progress_bar": False}
    Path("lm.yaml").write_text(yaml.safe_dump(recipe))
    main(["fit", "--config", "lm.yaml", *option.split(), further, "0.5"])
    chosen = saved_config("lm")["model"]["init_args"]["optimizer"]
    assert chosen["class_path"].rsplit(".", 1)[-1] == "SGD"
    assert chosen["init_args"] == {"lr": 0.5}
    hparams = torch.load(checkpoint("lm"), weights_only=True)["hyper_parameters"]
    assert hparams["optimizer"] == {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}


def test_arguments_without_their_class_name_the_form_that_works(capsys):
    with pytest.raises(SystemExit):
        main([*TASK, "--model.optimizer.lr", "0.5"])
    assert "--model.optimizer CLASS --model.optimizer.lr ..." in capsys.readouterr().err


def test_only_classes_with_further_keys_are_spelled_out():
    for plain in (
        ["--model", DEMO, "--model.rate", "1"],
        ["--model.note", "x", "--model.notes.y", "1"],
        ["--model.note", "demo.yaml/x", "--model.note.y", "1"],
        ["--model.optimizer.y", "1", "--model.optimizer", "SGD"],
        ["--model.other", "SGD", "--model.other.y", "1"],
        ["--model.a"],
    ):
        assert spell_out_classes(plain) == plain
    assert spell_out_classes(["--model.a=b.C", "--model.a.y=1"]) == ['--model.a={"class_path": "b.C"}', "--model.a.y=1"]
    for name, value, path in (
        ("optimizer", "SGD", "torch.optim.SGD"),
        ("scheduler", "StepLR", "torch.optim.lr_scheduler.StepLR"),
        ("mechanism", "rpc", "attention_modules.RPCAttention"),
        ("model", "TransformerLM", "lightning_tasks.models.TransformerLM"),
    ):
        _, spelled, *_ = spell_out_classes([f"--model.{name}", value, f"--model.{name}.key", "1"])
        assert json.loads(spelled) == {"class_path": path}


REFUSED = {
    "SwapAttention": {"mechanism": "rpc", "where": "nothing"},
    "LocAteR": {"weight": 1.0, "where": "nothing"},
    "QKWeightDecay": {"weight_decay": 1.0, "where": "nothing"},
    "FreezeQK": {"where": "nothing"},
    "SpectrumMonitor": {"where": "nothing"},
    "AttentionMonitor": {"where": "nothing"},
    "LipschitzMonitor": {"where": "nothing"},
    "PursuitMonitor": {"where": "nothing"},
    "KernelPCAMonitor": {"where": "nothing"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_refuses_leaves_no_folder(name, capsys):
    callback = {"class_path": f"lightning_tasks.callbacks.{name}", "init_args": REFUSED[name]}
    with pytest.raises(SystemExit) as stop:
        main([*TASK, OWN_MODEL % '{"num_layers": 1, "dim": 8}', f"--trainer.callbacks={json.dumps(callback)}"])
    assert stop.value.code == 2
    assert "attnswap: error: " in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_frozen_layer_leaves_no_folder(capsys):
    callbacks = [
        {"class_path": "tests.lightning_tasks.demo.FreezeAll"},
        {"class_path": "lightning_tasks.callbacks.LocAteR", "init_args": {"weight": 1.0}},
    ]
    with pytest.raises(SystemExit):
        main([*TASK, f"--trainer.callbacks={json.dumps(callbacks)}"])
    assert "frozen or in no optimizer" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_environment_asks_for_the_traceback(monkeypatch):
    monkeypatch.setenv("ATTNSWAP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="chunk_size must be at least 1, or None for all tokens, got 0"):
        main([*TASK, "--model.chunk_size=0"])


def test_an_interrupt_has_no_traceback(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_tasks.recipes.print_recipes", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(["recipes"])
    assert capsys.readouterr().err == "attnswap: interrupted\n"


def test_an_error_of_other_code_keeps_its_traceback(demo):
    with pytest.raises(ValueError, match="the module's own"):
        main(["fit", "--config", demo, "--model.note=fail"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [("--trainer.accelerator=tpuu", "accelerator='tpuu'"), ("--trainer.strategy=foo", "strategy='foo'")],
)
def test_what_the_trainer_refuses_has_no_traceback(argument, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*TASK, argument])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_test_of_no_checkpoint_warns(demo):
    with pytest.warns(UserWarning, match="no --ckpt_path and no --init_from"):
        main(["test", "--config", demo])


def test_a_fault_of_ours_is_no_refusal():
    with pytest.raises(ValueError, match="layers") as refusal:
        TransformerLM(9, num_layers=0)
    assert refusal_in(refusal.value) is refusal.value
    with pytest.raises(TypeError) as fault:
        TransformerLM(None)
    assert refusal_in(fault.value) is None


def test_a_guard_that_stops_ends_the_command_with_an_error_and_its_last_line_says_why(demo, tmp_path, capsys):
    recipe = yaml.safe_load(Path(demo).read_text())
    recipe["trainer"]["callbacks"] = [{"class_path": "lightning_tasks.callbacks.NonFiniteGuard"}]
    Path(demo).write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", demo, "--model.rate=.nan"])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    saved = Path("runs/demo/version_0/non_finite_step_1.pt")
    assert last.startswith("attnswap: error: step 1 (epoch 0, batch 1): the loss is nan, and the gradient of 2 of 2 ")
    assert f"the batch is in {saved}" in last
    assert "batch" in torch.load(saved, weights_only=True)
    assert "non_finite/stopped" in Path("runs/demo/version_0/metrics.csv").read_text()


def test_a_loss_that_is_nan_is_said_where_the_recipe_has_no_summary(demo, said):
    main(["fit", "--config", demo, "--model.rate=.nan"])
    assert said[-1] == "attnswap: diverged: train/loss is NaN (first at step 1)"
    main(["fit", "--config", demo])
    assert "diverged" not in said[-1]


@pytest.mark.parametrize(
    ("callback", "arguments", "says"),
    [
        ("EarlyStopping", {"monitor": "val/los"}, "conditioned on metric `val/los` which is not available"),
        ("ModelCheckpoint", {"monitor": "val/los"}, "could not find the monitored key in the returned metrics"),
    ],
)
def test_a_metric_that_nothing_logs_is_one_line_that_names_those_that_are(callback, arguments, says, demo, capsys):
    spec = {"class_path": f"lightning.pytorch.callbacks.{callback}", "init_args": arguments}
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", demo, "--trainer.limit_train_batches=2", f"--trainer.callbacks={json.dumps([spec])}"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert says in line
    assert "val/perplexity" in line
    assert line.startswith(f"attnswap: error: after 2 steps (the run's files stay in {last_run()}): ")
    assert (last_run() / "metrics.csv").exists()
