"""The command: what a checkpoint brings, what beats it, and what is refused."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tasks.__main__ import HELP, main
from lightning_tasks.cli.fit import fill, run
from tests.lightning_tasks.cli.runs import ARGUMENTS, DEMO, checkpoint, last_run, saved_config


def test_a_run_without_a_logger_leaves_the_user_s_config_alone(demo):
    mine = Path("config.yaml")
    mine.write_text("# mine\n" + Path(demo).read_text())
    main(["fit", "--config", "config.yaml", "--trainer.logger=false", "--trainer.enable_checkpointing=false"])
    assert mine.read_text().startswith("# mine\n")


def test_a_dictionary_that_is_given_is_whole():
    stored = {"class_path": "A", "init_args": {"mechanism": "rpc", "options": {"iterations": 2, "lam": 1.0}}}
    options = {"init_args": {"options": {"iterations": 3}}}
    assert fill(options, stored)["init_args"] == {"mechanism": "rpc", "options": {"iterations": 3}}
    assert fill({"init_args": {"options": {}}}, stored)["init_args"]["options"] == {}
    assert fill({"init_args": {"mechanism": "softmax"}}, stored)["init_args"] == {"mechanism": "softmax"}


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


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_weights_alone_are_sent_to_init_from(demo, command, capsys):
    torch.save({"meta": {}, "state_dict": {}}, "weights.pth")
    with pytest.raises(SystemExit) as stop:
        main([command, "--config", demo, "--ckpt_path", "weights.pth"])
    assert stop.value.code == 2
    assert "weights.pth: weights, but no checkpoint of a Lightning run" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_checkpoint_that_is_missing_leaves_no_folder(demo, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", demo, "--ckpt_path", "no.ckpt"])
    assert "--ckpt_path no.ckpt: no such file; give the path of a .ckpt file" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_help_shows_arguments_that_fit_accepts(capsys):
    marker = "override any key of the recipe:"
    example = next(line.split(marker)[1].split() for line in HELP.splitlines() if marker in line)
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "quickstart/language_modeling", *example, "--print_config"])
    assert done.value.code == 0, capsys.readouterr().err
    assert "mechanism: rpc" in capsys.readouterr().out


def test_init_from_takes_the_weights_and_nothing_else(demo):
    main(["fit", "--config", demo, "--model.note=stored"])
    path = checkpoint()
    still = ["--model.rate=0.0", "--trainer.max_steps=1"]
    main(["fit", "--config", demo, "--init_from", str(path), *still])
    before, after = torch.load(path, weights_only=True), torch.load(checkpoint(), weights_only=True)
    torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
    assert after["global_step"] == 1
    assert saved_config()["model"]["init_args"]["note"] == "none"


def test_init_from_comes_before_what_copies_the_model(demo):
    main(["fit", "--config", demo])
    options = ["--init_from", str(checkpoint()), "--trainer.callbacks+=EMAWeightAveraging", "--model.rate=0.0"]
    cli = run(["fit", "--config", demo, *options, "--trainer.max_steps=1"])
    kinds = [type(each).__name__ for each in vars(cli.trainer)["callbacks"]]
    assert kinds.index("InitFromCheckpoint") < kinds.index("EMAWeightAveraging")


def test_beside_a_teacher_a_run_resumes_with_init_from(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "healing/linearize", "--init_from", "a", "--ckpt_path", "no.ckpt"])
    assert "--ckpt_path no.ckpt: no such file" in capsys.readouterr().err


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


def test_a_test_with_other_attention_than_the_checkpoint_s_warns(trained, capsys):
    path = trained[3]
    test = ["test", "--config", "lm.yaml", "--ckpt_path", path]

    def warned(*more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            main([*test, *more])
        return [str(each.message) for each in caught if re.search("checkpoint (was|records)", str(each.message))]

    assert warned() == []
    (said,) = warned("--model.mechanism=twicing")
    assert re.search(r"trained with mechanism '?softmax.*and is used with .*twicing.*: leave it out", said)

    main(["fit", "--config", "lm.yaml", "--trainer.callbacks+=SwapAttention", "--trainer.callbacks.mechanism=twicing"])
    test[-1] = str(checkpoint("lm"))
    (said,) = warned()
    assert re.search(r"with SwapAttention \(twicing in .*\), and these layers have softmax attention now", said)
    assert warned("--trainer.callbacks+=SwapAttention", "--trainer.callbacks.mechanism=twicing") == []
