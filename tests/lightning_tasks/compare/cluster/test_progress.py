"""A cell that is killed goes on from its last checkpoint, and its result is that of one that was not."""

import json
import socket

import pytest
import yaml
from lightning.pytorch import Callback, Trainer

from lightning_tasks.compare.cell import RESULT
from lightning_tasks.compare.cluster import progress
from lightning_tasks.compare.cluster.lease import LostError
from lightning_tasks.compare.cluster.progress import FILE, checkpoint_of, read_progress
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.pairing import RecordPairing
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.recipes.variants import Variant
from lightning_tasks.runs.environment import this_environment
from tests.reliability import kill_trials

OF_RUNS = ("environment", "seconds", "runs", "log")


class Killed(BaseException):
    """In place of SIGKILL: nobody catches it."""


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_PAUSE", 0.0)


def run_killed(cell, batch):
    """Run a cell whose process ends before a batch, counted from its start."""
    begin, seen = RecordPairing.on_train_batch_start, []

    def watched(self, *arguments):
        seen.append(self)
        if len(seen) == batch:
            raise Killed
        begin(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordPairing, "on_train_batch_start", watched)
        with pytest.raises(Killed):
            run_cell(cell)


def cell_of(kind, tmp_path, place, further=()):
    command = kill_trials.command("language" if kind == "averages" else kind, tmp_path)
    overrides = [each for each in command[3:] if "ModelCheckpoint" not in each]
    callbacks = {
        "language": [kill_trials.SWAP],
        "stabilizers": kill_trials.STABILIZERS,
        "averages": [{"class_path": f"{__name__}.MeanLoss"}],
    }.get(kind, [])
    overrides.append(f"--trainer.callbacks={json.dumps(callbacks)}")
    variant = Variant("it", command[2], (*overrides, *further))
    return plan_cells([variant], [3], tmp_path / place)[0]


def result(cell):
    return {name: value for name, value in cell.result().items() if name not in OF_RUNS}


class MeanLoss(Callback):
    """Logs a mean over the epoch, of which no checkpoint holds the sum."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("train/mean", outputs["loss"], on_step=False, on_epoch=True, batch_size=1)


EPOCHS = ["--trainer.val_check_interval=1.0", "--trainer.check_val_every_n_epoch=1"]
CASES = {
    "language": ("language", []),
    "accumulated": ("language", ["--trainer.accumulate_grad_batches=2"]),
    "validated by epochs": ("language", EPOCHS),
    "averaged over epochs": ("averages", EPOCHS),
    "stabilizers": ("stabilizers", []),
    "images": ("images", []),
    "masks": ("masks", []),
}


FEW = ("language", "stabilizers", "images")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in CASES])
def test_it_ends_as_one_that_was_not_killed(kind, tmp_path, at_once):
    (kind, further), kills = CASES[kind], [(2, 4, 3), (7,)][list(CASES).index(kind) % 2]
    whole, cut = (cell_of(kind, tmp_path, place, further) for place in ("whole", "cut"))
    run_cell(whole)
    for batch in kills:
        run_killed(cut, batch)
        assert not (cut.folder / RESULT).exists()
    run_cell(cut)
    one, other = result(cut), result(whole)
    assert [row for row in one["rows"] if row not in other["rows"]] == []
    assert one == other
    runs = cut.result()["runs"]
    assert runs[0] == socket.gethostname()
    assert not list(cut.folder.rglob("*.ckpt"))
    assert not (cut.folder / FILE).exists()


OWN = "tests.lightning_tasks.compare.cluster.own_module"
LIGHTNING = "lightning.pytorch.callbacks"
OF_LIGHTNING = {
    f"{LIGHTNING}.LearningRateFinder": {"attr_name": "rate", "num_training_steps": 3},
    f"{LIGHTNING}.StochasticWeightAveraging": {"swa_lrs": 0.05, "swa_epoch_start": 1, "annealing_epochs": 2},
}
# module, its kind, who draws in the data, workers, a callback; and from which step a cell goes on that ends in its 5th,
# and in its 8th, where an epoch has 6
ROWS = {
    "plain": (("OwnModule", "plain", "", 0, None), 4, 7),
    "drawn by python": (("OwnModule", "plain", "python", 0, None), 4, 7),
    "drawn by numpy": (("OwnModule", "plain", "numpy", 0, None), 4, 7),
    "drawn by python in workers": (("OwnModule", "plain", "python", 1, None), 4, 7),
    "drawn by torch in workers": (("OwnModule", "plain", "torch", 1, None), 4, 7),
    "a generator of the data": (("OwnModule", "plain", "own", 0, None), 0, 0),
    "a list": (("OwnModule", "a list", "", 0, None), 0, 6),
    "a metric": (("OwnModule", "a metric", "", 0, None), 0, 6),
    "a count": (("OwnModule", "a count", "", 0, None), 0, 0),
    "a buffer": (("OwnModule", "a buffer", "", 0, None), 0, 0),
    "later than callbacks": (("LateModule", "plain", "", 0, None), 0, 6),
    "adds to gradients": (("OwnModule", "adds to gradients", "", 0, None), 1, 1),
    "plateau by steps": (("OwnModule", "plateau by steps", "", 0, None), 0, 6),
    "plateau by epochs": (("OwnModule", "plateau by epochs", "", 0, None), 4, 7),
    "a callback": (("OwnModule", "plain", "", 0, f"{OWN}.Counts"), 0, 0),
    "a finder": (("OwnModule", "plain", "", 0, f"{LIGHTNING}.LearningRateFinder"), 0, 0),
    "averaged weights": (("OwnModule", "plain", "", 0, f"{LIGHTNING}.StochasticWeightAveraging"), 0, 6),
}


@pytest.fixture
def own_cell(tmp_path):
    def make(module, kind, by, workers, callback, place):
        path = tmp_path / "own.yaml"
        trainer = {"accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
        if callback is not None:
            trainer["callbacks"] = [{"class_path": callback, "init_args": OF_LIGHTNING.get(callback, {})}]
        settings = {
            "model": {"class_path": f"{OWN}.{module}", "init_args": {"kind": kind}},
            "data": {"class_path": f"{OWN}.OwnData", "init_args": {"by": by, "workers": workers}},
            "trainer": trainer,
        }
        path.write_text(yaml.safe_dump(settings))
        return plan_cells([Variant("it", str(path), ())], [3], tmp_path / place)[0]

    return make


@pytest.mark.parametrize(("of", "within", "after"), ROWS.values(), ids=ROWS)
def test_what_no_checkpoint_holds_is_not_lost(of, within, after, own_cell, at_once):
    whole = own_cell(*of, "whole")
    run_cell(whole)
    for batch, step in ((5, within), (8, after)):
        cut = own_cell(*of, f"cut_{batch}")
        run_killed(cut, batch)
        run_cell(cut)
        assert result(cut) == result(whole)
        host = socket.gethostname()
        assert cut.result()["runs"] == [host, *([f"{host} from step {step}"] if step else [])]


@pytest.fixture
def begun(tmp_path, at_once):
    """A cell that was killed in its fourth step."""
    cell = cell_of("language", tmp_path, "out")
    run_killed(cell, 4)
    return cell


def test_a_checkpoint_counts_once_its_step_is_logged(begun):
    found = read_progress(begun, begun.sources)
    assert (found.step, found.runs) == (2, [socket.gethostname()]), "after the third step it validates"
    assert [row["step"] for row in found.rows if row["metric"] == "train/loss"] == [0, 1]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILT = {
    "a bit of the checkpoint": lambda cell: flip(checkpoint_of(cell, 2)),
    "no checkpoint": lambda cell: checkpoint_of(cell, 2).unlink(),
    "a cut record": lambda cell: (cell.folder / FILE).write_text('{"step": 2'),
    "a step of another kind": lambda cell: (cell.folder / FILE).write_text(
        (cell.folder / FILE).read_text().replace('"step": 2, "seconds"', '"step": "../../it", "seconds"')
    ),
    "other settings": lambda cell: (cell.folder / FILE).write_text(
        (cell.folder / FILE).read_text().replace(cell.fingerprint, "0" * 64)
    ),
    "other code of attnswap": lambda cell: (cell.folder / FILE).write_text(
        (cell.folder / FILE).read_text().replace(this_environment().code, "0123456789")
    ),
    "other code": lambda cell: (cell.folder / FILE).write_text(
        (cell.folder / FILE).read_text().replace(next(iter(cell.sources.values())), "0" * 64)
    ),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_is_damaged_or_of_another_cell_is_not_gone_on_from(spoil, begun):
    spoil(begun)
    assert read_progress(begun, begun.sources) is None


def test_what_cannot_be_gone_on_from_is_tried_twice(begun, monkeypatch):
    """Once more than needed, as the cause may be gone at the next start: a full device, a folder that came late."""

    def refuse(self, state):
        raise ValueError("of another version")

    with monkeypatch.context() as patch:
        patch.setattr(RecordPairing, "load_state_dict", refuse)
        for kept in (True, False):
            with pytest.raises(ValueError, match="of another version"):
                run_cell(begun)
            assert (begun.folder / FILE).exists() == kept
    run_cell(begun)
    assert begun.result()["runs"] == [socket.gethostname()]


def test_who_lost_the_lease_leaves_the_files_of_the_other_alone(begun):
    before = (begun.folder / FILE).read_bytes()

    def lost():
        raise LostError("taken over")

    with pytest.raises(LostError):
        run_cell(begun, may_write=lost)
    assert (begun.folder / FILE).read_bytes() == before
    assert checkpoint_of(begun, 2).is_file()


def test_a_loader_that_does_not_know_its_place_is_named(cells, at_once, capsys):
    run_cell(cells[0])
    assert "no checkpoint can be kept: DataLoader has no place to go on from" in capsys.readouterr().err
    assert not list(cells[0].folder.glob("progress*"))


def test_a_full_disk_ends_no_cell(tmp_path, monkeypatch, at_once, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    cell = cell_of("language", tmp_path, "out")
    run_cell(cell)
    assert capsys.readouterr().err.count("no checkpoint can be kept: OSError: [Errno 28] No space left on device") == 1
