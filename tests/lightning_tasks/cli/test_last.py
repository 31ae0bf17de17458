"""The command: `--ckpt_path last`, and checkpoint files that are not what was written."""

import json
import os
import random
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_tasks.__main__ import main
from lightning_tasks.cli.save_config import CONFIGURATION, THIS_JOB
from lightning_tasks.files.checkpoint_io import CheckedCheckpointIO, UnwrittenCheckpoint, refuse_damaged
from lightning_tasks.files.weights import read_checkpoint
from tests.lightning_tasks.cli.data import SEEN, ReadsSteps
from tests.lightning_tasks.cli.runs import checkpoint, last_run

LAST = ["--ckpt_path", "last", "--trainer.max_steps=4"]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_without_a_run_nothing_starts(demo, capsys):
    error = refused(["fit", "--config", demo, *LAST], capsys)
    assert "--ckpt_path last: there is no checkpoint in runs/demo/*/checkpoints/*.ckpt" in error
    assert not Path("runs").exists()


def test_the_newest_of_the_recipe_s_runs_is_taken(demo, said):
    main(["fit", "--config", demo])
    main(["fit", "--config", demo, *LAST])
    before = checkpoint()
    assert said[-2] == "attnswap: --ckpt_path last is runs/demo/version_0/checkpoints/epoch=0-step=2.ckpt"
    assert torch.load(before, weights_only=True)["global_step"] == 4
    main(["validate", "--config", demo, "--ckpt_path", "last"])
    assert said[-2] == f"attnswap: --ckpt_path last is {before}"


@pytest.mark.parametrize(
    ("finder", "reads"),
    [("LearningRateFinder", {"attr_name": "rate"}), ("BatchSizeFinder", {"batch_arg_name": "width"})],
)
def test_callbacks_that_begin_at_the_first_step_resume_nothing(finder, reads, demo, capsys):
    main(["fit", "--config", demo])
    callback = {"class_path": f"lightning.pytorch.callbacks.{finder}", "init_args": reads}
    error = refused(["fit", "--config", demo, *LAST, f"--trainer.callbacks={json.dumps([callback])}"], capsys)
    assert f"{finder} begins each fit at its first step, and --ckpt_path goes on from the checkpoint's" in error
    assert "--init_from" in error


def test_a_torn_file_and_one_of_weights_are_left_out(demo, said, capsys):
    main(["fit", "--config", demo])
    good = checkpoint()
    torn = good.with_name("torn.ckpt")
    torn.write_bytes(good.read_bytes()[:-100])
    good.with_name("link.ckpt").symlink_to("gone.ckpt")
    bare = good.with_name("bare.ckpt")
    content = torch.load(good, weights_only=True)
    del content["optimizer_states"]
    torch.save(content, bare)
    for later, path in enumerate((torn, bare), start=1):
        os.utime(path, ns=(good.stat().st_mtime_ns + later,) * 2)
    with pytest.warns(UserWarning, match="leaves out bare.ckpt.*weights only") as caught:
        main(["fit", "--config", demo, *LAST])
    assert any("leaves out torn.ckpt" in str(warning.message) for warning in caught)
    assert str(good) in said[-2]
    shutil.rmtree(last_run())
    good.unlink()
    with pytest.warns(UserWarning, match="leaves out"):
        error = refused(["fit", "--config", demo, *LAST], capsys)
    assert "none of 2 checkpoints can be resumed" in error
    assert "weights only, so that a fit cannot go on from it" in refused(
        ["fit", "--config", demo, "--ckpt_path", str(bare)], capsys
    )


DATA = "--data=tests.lightning_tasks.cli.data.OtherData"
KEPT = '--trainer.callbacks={"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept", "save_top_k": -1}}'


@pytest.mark.parametrize("more", [[], [KEPT]], ids=["folder-of-runs", "folder-of-checkpoints"])
@pytest.mark.parametrize(
    ("other", "key"),
    [
        (["--data.size=7"], "data.init_args.size"),
        (["--seed_everything=9"], "seed_everything"),
        (["--data=tests.lightning_tasks.cli.data.FurtherData"], "data"),
    ],
    ids=["argument", "seed", "class"],
)
def test_a_checkpoint_of_other_data_or_another_seed_is_not_resumed(demo, said, capsys, other, key, more):
    mine = ["fit", "--config", demo, "--seed_everything=1", DATA, *more]
    main([*mine, *other])
    error = refused([*mine, *LAST], capsys)
    assert re.search(rf"of another configuration: {re.escape(key)} is .* there and .* here; give the path", error)
    before = {*Path().rglob("*.ckpt")}
    main(mine)
    (own,) = {*Path().rglob("*.ckpt")} - before
    main([*mine, *other])
    with pytest.warns(UserWarning, match=rf"takes {own}: newer ones are of another configuration"):
        main([*mine, *LAST])
    assert said[-2] == f"attnswap: --ckpt_path last is {own}"


def test_of_two_models_the_same_one_is_resumed_and_workers_make_no_difference(demo, said):
    main(["fit", "--config", demo, "--model.width=32", "--model.note=mine", DATA])
    own = checkpoint()
    main(["fit", "--config", demo, "--model.note=theirs", DATA, "--data.num_workers=1"])
    with pytest.warns(UserWarning, match="newer ones are of another configuration"):
        main(["fit", "--config", demo, "--model.note=mine", DATA, *LAST])
    assert said[-2] == f"attnswap: --ckpt_path last is {own}"
    newest = checkpoint()
    main(["fit", "--config", demo, DATA, "--data.num_workers=1", "--ckpt_path=last", "--trainer.max_steps=6"])
    assert said[-2] == f"attnswap: --ckpt_path last is {newest}"


def test_a_job_that_is_queued_again_goes_on_from_its_own_checkpoint(demo, said, monkeypatch):
    """Two jobs fit one recipe, data and seed; the newer checkpoint is that of the other one, of another trainer."""
    monkeypatch.setenv(THIS_JOB, "one")
    main(["fit", "--config", demo])
    own = checkpoint()
    monkeypatch.setenv(THIS_JOB, "two")
    main(["fit", "--config", demo, "--trainer.gradient_clip_val=0.5"])
    assert not any("goes on from its own" in text for text in said)
    monkeypatch.setenv(THIS_JOB, "one")
    main(["fit", "--config", demo, "--init_from", str(checkpoint()), "--trainer.max_steps=4"])
    assert f"attnswap: this job goes on from its own {own}" in said
    assert torch.load(checkpoint(), weights_only=True)["global_step"] == 4
    torn = checkpoint().with_name("torn.ckpt")
    torn.write_bytes(own.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"leaves out .*torn\.ckpt, which cannot be read"):
        main(["fit", "--config", demo, "--trainer.max_steps=6"])
    assert torch.load(checkpoint(), weights_only=True)["global_step"] == 6
    monkeypatch.setenv(THIS_JOB, "three")
    main(["fit", "--config", demo])
    assert torch.load(checkpoint(), weights_only=True)["global_step"] == 2


def test_a_module_of_one_s_own_goes_on_at_its_place_in_the_data(demo):
    """It reads the number of steps as it builds the optimizer; Lightning alone would begin the epoch anew."""
    fit = ["fit", "--config", demo, f"--model={ReadsSteps.__module__}.ReadsSteps"]
    fit.append(f"--data={ReadsSteps.__module__}.ResumableData")
    SEEN.clear()
    main([*fit, "--trainer.max_steps=12"])
    whole = SEEN.copy()
    SEEN.clear()
    main([*fit, "--trainer.max_steps=3", "--trainer.default_root_dir=cut"])
    main([*fit, "--trainer.max_steps=12", "--trainer.default_root_dir=cut", "--ckpt_path=last"])
    assert whole == SEEN
    assert sorted(whole[:8]) == [*range(8)]


def test_a_seed_that_may_be_any_is_that_of_each_checkpoint(demo, said, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")  # which Lightning takes for it
    fit = ["fit", "--config", demo, "--seed_everything=true", DATA]
    main(fit)
    own = checkpoint()
    main([*fit, *LAST])
    assert said[-2] == f"attnswap: --ckpt_path last is {own}"


@pytest.mark.parametrize("size", [7, 8])
def test_a_config_yaml_of_the_user_s_own_says_nothing_of_the_checkpoints_beside_it(demo, capsys, said, size):
    Path("config.yaml").write_text(f"data: {{class_path: {DATA[7:]}, init_args: {{size: 8}}}}")
    fit = ["fit", "--config", demo, "--config=config.yaml", "--trainer.logger=false"]
    main([*fit, "--data.size=7"])
    if size == 8:
        assert "data.init_args.size is 7 there and 8 here" in refused([*fit, *LAST], capsys)
        return
    main([*fit, "--data.size=7", *LAST])
    assert any("last is checkpoints/epoch=0-step=2.ckpt" in line for line in said)


def test_a_checkpoint_that_says_nothing_is_of_the_configuration_in_its_run_s_folder(demo, capsys):
    """As those of earlier versions."""
    main(["fit", "--config", demo, DATA])
    content = torch.load(checkpoint(), weights_only=True)
    del content[CONFIGURATION]
    torch.save(content, checkpoint())
    assert "data.init_args.size is 8 there and 7 here" in refused(
        ["fit", "--config", demo, DATA, "--data.size=7", *LAST], capsys
    )


def test_a_test_may_be_of_other_data(demo, said):
    main(["fit", "--config", demo, DATA])
    own = checkpoint()
    main(["test", "--config", demo, DATA, "--data.size=9", "--ckpt_path=last"])
    assert said[-2] == f"attnswap: --ckpt_path last is {own}"


def test_folders_of_one_s_own_are_looked_into(demo, said):
    keep = '--trainer.callbacks={"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept"}}'
    main(["fit", "--config", demo, keep])
    main(["fit", "--config", demo, keep, *LAST])
    assert any("last is kept/epoch=0-step=2.ckpt" in line for line in said)
    unlogged = ["fit", "--config", demo, "--trainer.logger=false", "--trainer.default_root_dir=here"]
    main(unlogged)
    main([*unlogged, *LAST])
    assert any("last is here/checkpoints/epoch=0-step=2.ckpt" in line for line in said)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".", "--ckpt_path . is a folder; give the path of a .ckpt file"),
        ("https://example.org/a.ckpt", "is a URL, and checkpoints are read from files"),
        ("registry:a", "--ckpt_path registry:a: no such file"),
    ],
)
def test_what_is_no_file_is_refused(demo, path, text, capsys):
    assert text in refused(["fit", "--config", demo, "--ckpt_path", path], capsys)
    assert not Path("runs").exists()


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {f"w{index}": torch.randn(400) for index in range(4)}}, path)
    refuse_damaged(path)
    whole, random_ = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        tensors = [each for each in archive.infolist() if "/data/" in each.filename]
    for entry in tensors:
        start = entry.header_offset + 30 + int.from_bytes(whole[entry.header_offset + 26 :][:2], "little")
        start += int.from_bytes(whole[entry.header_offset + 28 :][:2], "little")
        for _ in range(5):
            changed = bytearray(whole)
            changed[start + random_.randrange(entry.file_size)] ^= 1 << random_.randrange(8)
            path.write_bytes(changed)
            torch.load(path, weights_only=True)  # torch takes it
            with pytest.raises(ValueError, match=r"a\.ckpt cannot be read as a checkpoint: it is damaged"):
                read_checkpoint(path)
            with pytest.raises(ValueError, match="damaged"):
                CheckedCheckpointIO().load_checkpoint(path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path, files = tmp_path / "a.ckpt", CheckedCheckpointIO()
    files.save_checkpoint({"step": 1}, path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnwrittenCheckpoint, match=r"a\.ckpt could not be written \(No space left on device\)"):
        files.save_checkpoint({"step": 2}, path)
    assert read_checkpoint(path) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    monkeypatch.undo()
    path.with_name("a.ckpt.partial").symlink_to("/dev/full")  # torch has errors of its own for what the disk refuses
    with pytest.raises(UnwrittenCheckpoint, match="No space left on device"):
        files.save_checkpoint({"step": torch.zeros(100_000)}, path)
    assert read_checkpoint(path) == {"step": 1}
