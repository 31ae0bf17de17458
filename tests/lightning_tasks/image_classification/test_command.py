"""The task through the command: weight averaging, monitors and show-batch."""

import json

import pytest
import torch

from tests.lightning_tasks.image_classification.tasks import TINY


def test_the_command_averages_weights_of_a_swapped_model_and_monitors_it(tmp_path, monkeypatch):
    from lightning_tasks.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attnswap"])
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}},
        {"class_path": "lightning_tasks.callbacks.AttentionMonitor", "init_args": {"statistics": ["entropy"]}},
    ]
    arguments = ["--model", "lightning_tasks.ImageClassificationTask", f"--model.model_options={json.dumps(TINY)}"]
    arguments += [
        "--model.mechanism=rpc",
        "--model.layers=[0]",
        "--data",
        "attnswap.datamodules.DigitsDataModule",
    ]
    arguments += ["--data.batch_size=400", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    main(["fit", *arguments, "--trainer.enable_progress_bar=false", f"--trainer.callbacks={json.dumps(callbacks)}"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert {"current_model_state", "averaging_state"} <= torch.load(checkpoint, weights_only=True).keys()
    main(["test", *arguments, "--ckpt_path", str(checkpoint)])
    assert len(list(tmp_path.rglob("test_confusion.png"))) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "quickstart/language_modeling"], "has no show_batch"),
        ([], "attnswap show-batch quickstart/classification"),
        (["--config", "quickstart/clasification"], "quickstart/classification"),
    ],
)
def test_show_batch_without_images(arguments, text, capsys):
    from lightning_tasks.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["show-batch", *arguments])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.figures
def test_show_batch_of_a_recipe(tmp_path, capsys):
    from lightning_tasks.__main__ import main

    path = tmp_path / "batch.png"
    main(["show-batch", "--config", "quickstart/classification", "--data.batch_size", "9", "--output", str(path)])
    assert path.stat().st_size > 2000
    assert str(path) in capsys.readouterr().out
