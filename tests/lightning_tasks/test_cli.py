"""The command: what answers at once, and every trap of Lightning's command line that it cures."""

import csv
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tasks.__main__ import HELP, main, refusal_in, refusal_text
from lightning_tasks.cli import expand_recipe_names, fill, spell_out_classes
from lightning_tasks.loggers import wandb_offline_without_key
from lightning_tasks.models import TransformerLM
from lightning_tasks.recipes import CONFIGS, RecipeError

DEMO = "tests.lightning_tasks.demo.DemoModule"
ARGUMENTS = {"width": 32, "init_bias": False, "optimizer": "SGD"}  # of DemoModule, at their defaults
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])


@pytest.fixture
def demo(tmp_path):
    """A recipe that trains in milliseconds."""
    trainer = {
        "accelerator": "cpu",
        "max_steps": 2,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    recipe = {"seed_everything": 1, "model": {"class_path": DEMO, "init_args": {"rate": 0.05}}, "trainer": trainer}
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def last_run(name="demo"):
    return max(Path("runs", name).iterdir(), key=lambda path: int(path.name.removeprefix("version_")))


def saved_config(name="demo"):
    return yaml.safe_load((last_run(name) / "config.yaml").read_text())


def checkpoint(name="demo"):
    return next((last_run(name) / "checkpoints").glob("*.ckpt"))


# -- what answers at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["--help", "--version", "recipes"])
def test_quick_commands_import_neither_lightning_nor_torch(argument):
    code = (
        f"import sys; from lightning_tasks.__main__ import main; main([{argument!r}]); "
        "print([name for name in ('torch', 'lightning', 'pytorch_lightning') if name in sys.modules])"
    )
    seconds = []
    while not seconds or (min(seconds) >= 1.5 and len(seconds) < 3):  # a busy machine may need another try
        started = time.monotonic()
        answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - started)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert len(answer.stdout.splitlines()) > 1
    assert min(seconds) < 1.5


def test_version_is_that_of_the_package(capsys):
    import attention_modules

    main(["--version"])
    assert capsys.readouterr().out == f"attnswap {attention_modules.__version__}\n"


def test_no_arguments_print_the_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: attnswap")


@pytest.mark.parametrize("arguments", [["fitt"], ["fit", "--config", "demoo"], ["fit", "--trainer", "strategy/dpp"]])
def test_what_does_not_exist_is_a_short_error(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("attnswap: error: ")


# -- names of files ----------------------------------------------------------------------------------------------------


def test_recipe_names_become_paths():
    ddp = str(CONFIGS / "strategy" / "ddp.yaml")
    assert expand_recipe_names(["fit", "--trainer", "strategy/ddp", "--model", DEMO]) == [
        "fit", "--trainer", ddp, "--model", DEMO,
    ]  # fmt: skip
    assert expand_recipe_names(["--trainer=strategy/ddp"]) == [f"--trainer={ddp}"]
    assert expand_recipe_names(["--trainer", '{"max_steps": 1}']) == ["--trainer", '{"max_steps": 1}']


def test_an_unknown_part_names_the_nearest():
    with pytest.raises(RecipeError, match=r"--trainer 'strategy/dpp'.*strategy/ddp"):
        expand_recipe_names(["--trainer", "strategy/dpp"])


def test_a_comparison_is_no_recipe():
    with pytest.raises(RecipeError, match="attnswap compare"):
        expand_recipe_names(["fit", "--config", "locater/compare_small_vocabulary"])


def test_a_part_changes_only_its_own_keys(demo):
    main(["fit", "--config", demo, "--trainer", "trainer/smoke"])
    trainer = saved_config()["trainer"]
    assert (trainer["max_steps"], trainer["log_every_n_steps"]) == (4, 1)


# -- the run's folder --------------------------------------------------------------------------------------------------


def test_a_run_has_csv_config_and_checkpoint_in_one_folder(demo):
    main(["fit", "--config", demo])
    folder = last_run()
    with (folder / "metrics.csv").open() as file:
        assert any(row["train/loss"] for row in csv.DictReader(file))
    assert checkpoint().is_relative_to(folder)


def test_the_next_run_gets_the_next_folder(demo):
    main(["fit", "--config", demo])
    main(["fit", "--config", demo])
    assert sorted(path.name for path in Path("runs/demo").iterdir()) == ["version_0", "version_1"]


def test_the_saved_config_is_complete_and_runs_again(demo):
    main(["fit", "--config", demo, "--model.width=32"])
    saved = saved_config()
    assert saved["model"]["init_args"] == {
        "width": 32,
        "rate": 0.05,
        "note": "none",
        "init_bias": False,
        "optimizer": "SGD",
    }
    assert saved["seed_everything"] == 1
    assert saved["trainer"]["gradient_clip_val"] is None  # defaults are there too
    log = last_run() / "metrics.csv"
    before = log.read_text()
    main(["fit", "--config", str(last_run() / "config.yaml")])
    assert last_run().name == "version_1"
    assert saved_config()["model"] == saved["model"]
    assert (last_run() / "metrics.csv").read_text() == before
    assert log.read_text() == before  # the log of the first run is still there


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_run_without_a_logger_leaves_the_user_s_config_alone(demo):
    mine = Path("config.yaml")
    mine.write_text("# mine\n" + Path(demo).read_text())
    main(["fit", "--config", "config.yaml", "--trainer.logger=false", "--trainer.enable_checkpointing=false"])
    assert mine.read_text().startswith("# mine\n")


def test_a_dictionary_that_is_given_is_whole():
    stored = {"class_path": "A", "init_args": {"attention": "rpc", "attention_options": {"iterations": 2, "lam": 1.0}}}
    options = {"init_args": {"attention_options": {"iterations": 3}}}
    assert fill(options, stored)["init_args"] == {"attention": "rpc", "attention_options": {"iterations": 3}}
    assert fill({"init_args": {"attention_options": {}}}, stored)["init_args"]["attention_options"] == {}
    assert fill({"init_args": {"attention": "softmax"}}, stored)["init_args"] == {"attention": "softmax"}


def test_the_command_line_beats_the_hyper_parameters_of_the_checkpoint(demo):
    main(["fit", "--config", demo, "--model.note=stored"])
    path = str(checkpoint())
    main(["fit", "--config", demo, "--ckpt_path", path, "--model.rate=0.5", "--trainer.max_steps=4"])
    assert saved_config()["model"]["init_args"] == {
        "width": 32,
        "rate": 0.5,
        "note": "stored",
        "init_bias": False,
        "optimizer": "SGD",
    }


@pytest.fixture
def trained(capsys):
    """A recipe of a language model, and a checkpoint that it wrote after one step."""
    recipe = {"model": {"class_path": "lightning_tasks.LanguageModelingTask", "init_args": {}}}
    recipe["model"]["init_args"]["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}}
    cosine = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 9}}
    recipe["model"]["init_args"]["scheduler"] = cosine
    recipe["data"] = {"class_path": "tests.lightning_tasks.demo.DemoText"}
    recipe["trainer"] = {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 0, "enable_progress_bar": False}
    Path("lm.yaml").write_text(yaml.safe_dump(recipe))
    main(["fit", "--config", "lm.yaml"])
    capsys.readouterr()
    return ["--config", "lm.yaml", "--ckpt_path", str(checkpoint("lm")), "--trainer.max_steps=2"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model.optimizer.init_args.lr=0.5"], "optimizer.lr is 0.003 in the checkpoint and 0.5 now"),
        (["--model.scheduler.init_args.T_max=99"], "scheduler.T_max is 9 in the checkpoint and 99 now"),
        (["--model.scheduler_interval=epoch"], "scheduler_interval is 'step' in the checkpoint and 'epoch' now"),
        (["--model.optimizer", "SGD"], "torch.optim.AdamW(lr=0.003) in the checkpoint and torch.optim.SGD() now"),
        (['--model.param_groups=[{"match": "*norm*", "weight_decay": 0}]'], "param_groups is None in the checkpoint"),
    ],
)
def test_a_resumed_run_refuses_what_the_restored_optimizer_would_not_use(trained, arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *trained, *arguments])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert text in line
    assert "--init_from" in line
    assert [path.name for path in Path("runs/lm").iterdir()] == ["version_0"]


def test_a_resumed_run_may_spell_its_settings_in_other_ways(trained):
    """A default that is written out is no other setting; nor is the saved config.yaml."""
    main(["fit", *trained, "--model.optimizer.init_args.weight_decay=0.01"])
    saved = str(last_run("lm") / "config.yaml")
    main(["fit", *trained, "--config", saved, "--trainer.max_steps=3"])
    assert torch.load(checkpoint("lm"), weights_only=True)["global_step"] == 3


def test_other_settings_of_the_optimizer_are_no_matter_outside_of_fit(trained):
    main(["validate", *(word for word in trained if "max_steps" not in word), "--model.optimizer.init_args.lr=0.5"])


def test_a_resumed_run_warns_of_numbers_that_the_optimizer_of_any_module_does_not_use(demo):
    main(["fit", "--config", demo])
    resume = ["fit", "--config", demo, "--ckpt_path", str(checkpoint()), "--trainer.max_steps=4"]
    with pytest.warns(UserWarning, match=r"SGD goes on with lr 0\.05 of the checkpoint, not with 0\.5.*--init_from"):
        main([*resume, "--model.rate=0.5"])
    with warnings.catch_warnings(record=True) as caught:
        main([*resume, "--model.note=other"])
    assert not [warning for warning in caught if "goes on with" in str(warning.message)]


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("Adam", "is none of the kind Adam (with "),
        ("SGD_without_bias", r"its optimizer has groups of [2] parameters, and SGD now has groups of [1]"),
    ],
)
def test_a_resumed_run_refuses_another_optimizer_of_any_module(demo, optimizer, text, capsys):
    main(["fit", "--config", demo])
    before = str(checkpoint())
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", demo, "--ckpt_path", before, f"--model.optimizer={optimizer}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert "--init_from" in error
    assert [path.name for path in Path("runs/demo").iterdir()] == ["version_0"]


def test_a_checkpoint_alone_brings_its_model(demo):
    main(["fit", "--config", demo, "--model.note=stored"])
    path = str(checkpoint())
    main(
        ["validate", "--model", DEMO, "--ckpt_path", path, "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    )
    assert saved_config("DemoModule")["model"]["init_args"] == {**ARGUMENTS, "rate": 0.05, "note": "stored"}


def test_fill_goes_level_by_level_and_stops_at_another_class():
    stored = {"class_path": "A", "init_args": {"x": 1, "opt": {"class_path": "SGD", "init_args": {"lr": 1, "m": 2}}}}
    given = {"init_args": {"opt": {"class_path": "SGD", "init_args": {"lr": 5}}}}
    filled = fill(given, stored)
    assert filled["init_args"] == {"x": 1, "opt": {"class_path": "SGD", "init_args": {"lr": 5, "m": 2}}}
    given = {"class_path": "B", "init_args": {"y": 1}}
    assert fill(given, stored) == given


def test_fill_knows_a_class_by_either_of_its_paths():
    given = {"class_path": "lightning_tasks.LanguageModelingTask"}
    stored = {"class_path": "lightning_tasks.language_modeling.LanguageModelingTask", "init_args": {"vocab_size": 7}}
    assert fill(given, stored)["init_args"] == {"vocab_size": 7}


@pytest.mark.parametrize("option", ["--ckpt_path", "--init_from"])
@pytest.mark.parametrize("content", [b"some text", b"PK\x03\x04cut short"])
def test_a_file_that_is_no_checkpoint_is_named(demo, option, content, capsys):
    Path("odd.ckpt").write_bytes(content)
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, option, "odd.ckpt"])
    assert "odd.ckpt cannot be read as a checkpoint" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_checkpoint_that_is_missing_leaves_no_folder(demo, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, "--ckpt_path", "no.ckpt"])
    assert "--ckpt_path no.ckpt: no such file; give the path of a .ckpt file" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_help_shows_arguments_that_fit_accepts(capsys):
    example = next(line.split("follow:")[1].split() for line in HELP.splitlines() if "can follow:" in line)
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "quickstart/language_modeling", *example, "--print_config"])
    assert done.value.code == 0, capsys.readouterr().err
    assert "attention: rpc" in capsys.readouterr().out


def test_init_from_takes_the_weights_and_nothing_else(demo):
    main(["fit", "--config", demo, "--model.note=stored"])
    path = checkpoint()
    still = ["--model.rate=0.0", "--trainer.max_steps=1"]
    main(["fit", "--config", demo, "--init_from", str(path), *still])
    before, after = torch.load(path, weights_only=True), torch.load(checkpoint(), weights_only=True)
    torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
    assert after["global_step"] == 1
    assert saved_config()["model"]["init_args"]["note"] == "none"


def test_init_from_refuses_weights_that_do_not_fit(demo, capsys):
    path = Path("other.ckpt")
    torch.save({"state_dict": {"layer.weight": torch.zeros(3, 32)}}, path)
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, "--init_from", str(path)])
    error = capsys.readouterr().err
    assert "other.ckpt: its weights do not fit DemoModule" in error
    first, *others = error[error.index("attnswap: error: ") :].splitlines()
    assert first.startswith("attnswap: error: --init_from other.ckpt")
    assert others  # torch's, a line for each weight
    assert all(line.startswith("    ") and line.strip() for line in others)
    assert others[-1] == "    (ATTNSWAP_TRACEBACK=1 shows where)"
    assert "Traceback" not in error
    assert not Path("runs").exists()


def test_init_from_runs_no_code_of_the_file(demo, tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Payload()}, "evil.ckpt")
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, "--init_from", "evil.ckpt"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("arguments", [["--init_from", "no.ckpt"], ["--init_from", "a", "--ckpt_path", "b"]])
def test_init_from_with_nothing_to_take(demo, arguments):
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, *arguments])


# -- errors ------------------------------------------------------------------------------------------------------------

TASK = ["fit", "--model", "lightning_tasks.LanguageModelingTask", "--data", "tests.lightning_tasks.demo.DemoText"]
TASK += ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.enable_progress_bar=false"]
OWN_MODEL = '--model.model={"class_path": "lightning_tasks.models.TransformerLM", "init_args": %s}'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([OWN_MODEL % '{"dim": 10, "num_heads": 3}'], "dim=10 is not a multiple of num_heads=3"),
        ([OWN_MODEL % '{"num_token": 8}'], "TransformerLM could not be built with"),
        ([OWN_MODEL % '{"num_tokens": 7}'], "windows have 8 tokens and TransformerLM has 7 positions"),
        (["--model.attention=rpc", '--model.attention_options={"iteration": 2}'], "no option 'iteration'"),
        (["--model.chunk_size=0"], "chunk_size must be at least 1, got 0"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_and_leaves_no_folder(arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*TASK, *arguments])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert text in line
    assert not Path("runs").exists()


@pytest.fixture
def said(monkeypatch):
    """What the command says of a run."""
    lines = []
    monkeypatch.setattr("lightning_tasks.cli.rank_zero_info", lines.append)
    return lines


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--model.optimizer=SGD", "--model.optimizer.lr=-1"],
            "SGD could not be built with {'lr': -1}: Invalid",
        ),
        (["--model.optimizer=SDG"], "no 'SDG' was found; looked in torch.optim. Did you mean 'SGD'"),
        (["--model.optimizr=SGD"], "Option 'optimizr' is not accepted. Did you mean 'optimizer'"),
        (["--data=WikiTextDataModuel"], "Did you mean 'datamodules.WikiTextDataModule'"),
        (
            ["--trainer.max_stepz", "3"],
            "--trainer.max_stepz 3. Did you mean '--trainer.max_steps'",
        ),
        (["--data.batch_size=some"], "Expected a <class 'int'>. Got value: some"),
        (["--model.attention=rcp"], "Did you mean 'rpc'"),
        (["--data.batch_size=0"], "batch_size"),
    ],
)
def test_bad_input_is_one_line_with_the_nearest_name(arguments, text, capsys, said):
    data = ["--data", "datamodules.PythonSourceDataModule"]
    with pytest.raises(SystemExit) as stop:
        main([*TASK[:3], *data, *TASK[5:], "--trainer.limit_val_batches=0", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if line.strip() and "Warning" not in line]
    assert line.startswith("attnswap: error: ")
    assert text in line
    assert not Path("runs").exists()
    assert said == []


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
        ("attention", "rpc", "attention_modules.RPCAttention"),
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
    "PursuitMonitor": {},
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
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
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


# -- loggers -----------------------------------------------------------------------------------------------------------


def test_wandb_has_the_nested_config_and_the_saved_config_runs_again(demo):
    pytest.importorskip("wandb")
    from lightning_tasks.cli import run

    arguments = ["fit", "--config", demo, "--trainer", "logger/wandb"]
    for _ in range(2):
        cli = run(arguments)
        arguments = ["fit", "--config", str(last_run() / "config.yaml")]
        csv_logger, wandb_logger = cli.trainer.loggers
        assert Path(csv_logger.log_dir) == last_run()
        assert wandb_logger.experiment.config["model"]["init_args"]["rate"] == 0.05
        wandb_logger.experiment.finish()
    for run_folder in ("version_0", "version_1"):
        assert len(list(Path("runs/demo", run_folder, "wandb").glob("offline-run-*"))) == 1


def test_two_runs_in_one_folder_are_fine(demo):
    given = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "here", "version": "same"}}
    for _ in range(2):
        main(["fit", "--config", demo, f"--trainer.logger={json.dumps(given)}"])
    assert len(list(Path("here").rglob("config.yaml"))) == 2


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, {"WANDB_MODE": "offline"}),
        ({"WANDB_API_KEY": "x"}, {}),
        ({"WANDB_MODE": "online"}, {}),
    ],
)
def test_wandb_is_offline_where_there_is_no_key(environment, added, tmp_path):
    assert wandb_offline_without_key({"NETRC": str(tmp_path / "netrc"), **environment}) == added


def test_a_key_in_netrc_is_a_key(tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert wandb_offline_without_key({"NETRC": str(tmp_path / "netrc")}) == {}


def test_one_wandb_run_a_job_under_ddp(demo):
    pytest.importorskip("wandb")
    parts = ["--trainer", "strategy/ddp", "--trainer", "logger/wandb"]
    command = [sys.executable, "-m", "lightning_tasks", "fit", "--config", demo, *parts]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    assert [path.name for path in Path("runs/demo").iterdir()] == ["version_0"]
    assert len(list(Path("runs/demo/version_0/wandb").glob("offline-run-*"))) == 1
    assert (Path("runs/demo/version_0") / "config.yaml").is_file()
