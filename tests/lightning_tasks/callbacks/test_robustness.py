"""RobustnessEvaluation in Lightning's test loop: its table, what it keeps when killed, and what it refuses."""

import csv
import inspect
import json
import math
import os
import signal
from fractions import Fraction
from importlib.metadata import version
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import swap_attention
from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import RobustnessEvaluation, SwapAttention
from lightning_tasks.robustness import fgsm, input_gradient_norms, pgd, square
from lightning_tasks.robustness.attacks.table import ATTACKS, AttackSetting, read_eps
from lightning_tasks.robustness.images import Subject, corruption_measurement
from lightning_tasks.robustness.text import Text, clean_text_measurement, perplexity
from lightning_tasks.runs import measurements as suite
from lightning_tasks.runs.measurements import fingerprint
from lightning_tasks.runs.robustness import Row, figure, read_csv, write_csv
from tests.lightning_tasks.language_data import SMALL, VOCAB, RandomText
from tests.lightning_tasks.robustness.modules import CLASSES, TinyClassifier, TinyImages, pictures

QUICK = {"attacks": ["fgsm", {"name": "square", "queries": 5}], "eps": ["4/255", 0.1], "corruptions": []}


def trainer(folder, *callbacks, logger=None, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    loggers = CSVLogger(folder, name="demo") if logger is None else logger
    return pl.Trainer(default_root_dir=folder, logger=loggers, callbacks=[*callbacks], **{**quiet, **options})


def evaluate(folder, module, data=None, logger=None, **options):
    callback = RobustnessEvaluation(**{**QUICK, **options})
    trainer(folder, callback, logger=logger).test(module, data or TinyImages(), verbose=False)
    return callback.table


def values(rows):
    return {(row.test, row.name, row.setting, row.metric): row.value for row in rows}


@pytest.fixture(scope="module")
def state():
    """Weights of a classifier that is right about most images."""
    torch.manual_seed(0)
    module = TinyClassifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    images, labels = pictures(100, 12, seed=0)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()
    return module.state_dict()


@pytest.fixture
def module(state):
    module = TinyClassifier()
    module.load_state_dict(state)
    return module


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference_mode", [True, False])
def test_the_table_is_what_the_attacks_give_by_hand(tmp_path, module, inference_mode):
    callback = RobustnessEvaluation(
        attacks=["fgsm", {"name": "pgd", "steps": 3}, {"name": "square", "queries": 5}], eps=["4/255"], corruptions=[]
    )
    runner = trainer(tmp_path, callback, inference_mode=inference_mode)
    runner.test(module, TinyImages(), verbose=False)
    images, labels = pictures(24, 12, seed=1)
    found = values(callback.table)

    def right(attacked):
        return (module.eval()(attacked).argmax(1) == labels).double().mean().item()

    clean = right(images)
    assert found["clean", "", "", "accuracy"] == clean
    assert found["attack", "fgsm", "4/255", "accuracy"] == right(fgsm(module, images, labels, eps=4 / 255))
    expected = right(pgd(module, images, labels, eps=4 / 255, steps=3))
    assert found["attack", "pgd", "4/255", "accuracy"] == expected
    assert found["attack", "square", "4/255", "accuracy"] == right(
        square(module, images, labels, eps=4 / 255, queries=5)
    )
    assert clean > expected + 0.2
    assert all(row.samples == 24 for row in callback.table)
    norms = {row.name: row.gradient_l2 > 0 and row.gradient_l1 > row.gradient_l2 for row in callback.table}
    assert norms == {"": False, "fgsm": True, "pgd": True, "square": False}
    assert runner.callback_metrics["robustness/pgd/4_255/accuracy"] == pytest.approx(expected)
    first, second = (norms.double().mean().item() for norms in input_gradient_norms(module, images, labels))
    assert found["input gradient", "", "", "l1"] == pytest.approx(first)
    assert runner.callback_metrics["robustness/input_gradient/l2"] == pytest.approx(second)
    with (tmp_path / "demo" / "version_0" / "robustness.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == [*[""] * 3, "fgsm", "pgd", "square"]
    assert (
        f"| attack: pgd | 4/255 | accuracy | {100 * expected:.1f}% | 24 |"
        in (tmp_path / "demo" / "version_0" / "robustness.md").read_text()
    )
    assert f"| input gradient |  | l2 | {second:.3g} | 24 |" in next(tmp_path.rglob("robustness.md")).read_text()


def test_the_input_gradient_stands_where_a_white_box_attack_starts(tmp_path, module):
    released = {"name": "released_fgsm", "std": [0.2, 0.25, 0.3]}
    rows = evaluate(tmp_path, module, attacks=["fgsm", released, {"name": "square", "queries": 2}], eps=[0.1])
    norms = {row.setting: row.value for row in rows if row.test == "input gradient" and row.metric == "l1"}
    assert set(norms) == {"", "own prediction"}
    beside = {row.name: row.gradient_l1 for row in rows if row.test == "attack"}
    assert (beside["fgsm"], beside["released_fgsm"]) == pytest.approx((norms[""], norms["own prediction"]))
    assert not [row for row in evaluate(tmp_path, module, attacks=[]) if row.test == "input gradient"]


def test_the_test_itself_and_the_module_stay_as_they_were(tmp_path, module):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    plain = trainer(tmp_path).test(module, TinyImages(), verbose=False)[0]
    with_table = trainer(tmp_path, RobustnessEvaluation(**QUICK)).test(module, TinyImages(), verbose=False)[0]
    assert with_table["test/loss"] == plain["test/loss"]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(("mechanism", "options"), [("rpc", {}), ("scaled", {"variant": "scalar"}), ("symmetric", {})])
def test_swapped_models_are_attacked_through_their_fast_path(tmp_path, module, mechanism, options):
    swap_attention(module, mechanism, **options)
    rows = evaluate(tmp_path, module, attacks=["fgsm", {"name": "released_pgd", "std": [0.2, 0.25, 0.3]}])
    assert all(row.gradient_l2 > 0 for row in rows if row.test == "attack")


def test_one_attack_with_two_settings_has_two_names(tmp_path, module):
    longer = {"name": "pgd", "steps": 3, "step_size": np.float32(0.01), "label": "pgd of 3 steps"}
    callback = RobustnessEvaluation(attacks=[{"name": "pgd", "steps": 1}, longer], eps=["4/255"], corruptions=[])
    runner = trainer(tmp_path, callback)
    runner.test(module, TinyImages(), verbose=False)
    for name, key in (("pgd", "pgd"), ("pgd of 3 steps", "pgd_of_3_steps")):
        logged = runner.callback_metrics[f"robustness/{key}/4_255/accuracy"]
        assert logged == pytest.approx(values(callback.table)["attack", name, "4/255", "accuracy"])


def test_the_first_images_alone(tmp_path, module):
    rows = evaluate(tmp_path, module, num_images=13, attacks=[])
    images, labels = pictures(24, 12, seed=1)
    assert rows[0].samples == 13
    assert rows[0].value == (module.eval()(images[:13]).argmax(1) == labels[:13]).double().mean().item()


def test_corruptions_their_mean_and_the_errors_against_a_baseline(tmp_path, module):
    pytest.importorskip("imagecorruptions", reason="imagecorruptions-imaug is not installed (extra `robustness`)")
    chosen = {"corruptions": ["gaussian_noise", "contrast", "saturate"], "severities": [1, 5], "attacks": []}
    rows = evaluate(tmp_path / "a", module, TinyImages(size=32), **chosen)
    found = values(rows)
    common = [
        value
        for key, value in found.items()
        if key[:2] in {("corruption", "gaussian_noise"), ("corruption", "contrast")}
    ]
    assert len(common) == 4
    assert found["mean corruption", "", "", "accuracy"] == pytest.approx(sum(common) / 4)
    baseline = tmp_path / "a" / "demo" / "version_0"
    again = values(evaluate(tmp_path / "b", module, TinyImages(size=32), baseline=str(baseline), **chosen))
    assert again["mean corruption", "", "", "mCE"] == pytest.approx(1)
    assert {key: value for key, value in again.items() if key in found} == found  # the same by seed
    noted = evaluate(tmp_path / "b", module, TinyImages(size=32), baseline=str(baseline), num_images=20, **chosen)
    notes = {row.metric: row.note for row in noted if row.test == "mean corruption"}
    assert notes["mCE"] == f"against {baseline}, measured on 24 images"
    text = (tmp_path / "a" / "demo" / "version_0" / "robustness.md").read_text()
    assert "| corruption, accuracy at severity | 1 | 5 |" in text
    assert "2 of 15 corruptions, severities 1, 5" in text
    with pytest.raises(ValueError, match="no fog at severity 1"):
        RobustnessEvaluation(corruptions=["fog"], severities=[1], baseline=str(baseline))
    with pytest.raises(ValueError, match="no such file"):
        RobustnessEvaluation(baseline=str(tmp_path))


def test_a_baseline_without_errors_at_the_first_severity_ends_nothing(tmp_path, module):
    pytest.importorskip("imagecorruptions", reason="imagecorruptions-imaug is not installed (extra `robustness`)")
    chosen = {"corruptions": ["brightness", "contrast"], "severities": [1, 5], "attacks": []}

    def baseline(*accuracies):
        keys = [(name, severity) for name in chosen["corruptions"] for severity in chosen["severities"]]
        rows = [
            Row("corruption", name, str(severity), "accuracy", accuracy, 24)
            for (name, severity), accuracy in zip(keys, accuracies, strict=True)
        ]
        write_csv([Row("clean", "", "", "accuracy", 1.0, 24), *rows], tmp_path / "robustness.csv")
        return str(tmp_path)

    again = values(evaluate(tmp_path / "b", module, TinyImages(size=32), baseline=baseline(1, 0.5, 1, 0.5), **chosen))
    lost = [2 - sum(again["corruption", name, str(s), "accuracy"] for s in (1, 5)) for name in chosen["corruptions"]]
    assert again["mean corruption", "", "", "mCE"] == pytest.approx(sum(lost) / 2 / 0.5)
    with pytest.raises(ValueError, match="the baseline has no error under contrast"):
        RobustnessEvaluation(baseline=baseline(1, 0.5, 1, 1), **chosen)


def test_images_too_small_for_corruptions_are_said_and_not_measured(tmp_path, module):
    pytest.importorskip("imagecorruptions", reason="imagecorruptions-imaug is not installed (extra `robustness`)")
    with pytest.warns(UserWarning, match="no corruption is measured: images are 12 x 12"):
        rows = evaluate(tmp_path, module, attacks=[], corruptions="common")
    assert [(row.test, row.value != row.value) for row in rows] == [("clean", False), ("mean corruption", True)]
    assert "images are 12 x 12, the corruptions need 32 x 32" in rows[1].note
    assert "| mean corruption |  | accuracy | not measured |" in next(tmp_path.rglob("*.md")).read_text()


@pytest.fixture
def folders(tmp_path):
    """A folder of images of two of five classes, and one of others."""
    generator = torch.Generator().manual_seed(0)
    for root, names in (("shifted", ("n01", "n04")), ("inside", ("n00", "n02")), ("outside", ("x", "y"))):
        for name in names:
            (tmp_path / root / name).mkdir(parents=True)
            for count in range(3):
                pixels = torch.randint(0, 256, (14, 14, 3), generator=generator, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / root / name / f"{count}.png")
    (tmp_path / "wnids.txt").write_text("n00\nn01\nn02\nn03\nn04\n")
    return tmp_path


def test_shifted_and_out_of_distribution_folders(folders, tmp_path, module):
    rows = evaluate(
        tmp_path,
        module,
        attacks=[],
        shifts={"A": str(folders / "shifted")},
        ood={"O": str(folders / "inside"), "far": str(folders / "outside")},
        wnids=str(folders / "wnids.txt"),
    )
    notes = {(row.name, row.metric): (row.samples, row.note) for row in rows}
    assert notes["A", "accuracy"] == (6, "among 2 classes")
    assert notes["O", "auroc"] == (10 + 6, "10 inside, 6 outside (positive), among 2 classes")
    assert notes["far", "fpr95"] == (24 + 6, "24 inside, 6 outside (positive), among all classes")
    assert {row.metric for row in rows if row.name == "O"} == {"auroc", "aupr", "fpr95"}
    assert all(0 <= row.value <= 1 for row in rows)


def test_a_folder_that_fits_no_class_is_an_error(folders, tmp_path, module):
    options = {"attacks": [], "wnids": str(folders / "wnids.txt")}
    with pytest.raises(ValueError, match="2 folders that name no class of the model's 5, 'x' first"):
        evaluate(tmp_path, module, shifts={"A": str(folders / "outside")}, **options)
    with pytest.raises(ValueError, match="needs the class names of the model"):
        evaluate(tmp_path, module, attacks=[], shifts={"A": str(folders / "shifted")})
    with pytest.raises(ValueError, match="none of the 1 test images is of the 2 classes"):
        evaluate(tmp_path, module, TinyImages(count=1), ood={"O": str(folders / "shifted")}, **options)
    with pytest.raises(ValueError, match="must be a folder"):
        RobustnessEvaluation(ood={"O": str(tmp_path / "nowhere")})


def test_pictures_of_a_folder_that_cannot_be_read_are_left_out_and_counted(folders, tmp_path, module):
    whole = (folders / "shifted" / "n01" / "1.png").read_bytes()
    (folders / "shifted" / "n01" / "1.png").write_bytes(whole[: len(whole) // 2])
    (folders / "outside" / "y" / "0.png").write_bytes(b"")
    options = {"shifts": {"A": str(folders / "shifted")}, "ood": {"far": str(folders / "outside")}, "batch_size": 1}
    with (
        pytest.warns(
            UserWarning, match=r"1 of 6 pictures cannot be read.*n01/1\.png \(the first: OSError: image file is"
        ),
        pytest.warns(
            UserWarning,
            match=r"1 of 6 pictures cannot be read.*y/0\.png \(the first: UnidentifiedImageError: cannot .* file '/",
        ),
    ):
        rows = evaluate(tmp_path, module, attacks=[], wnids=str(folders / "wnids.txt"), **options)
    found = {row.name: (row.samples, row.note) for row in rows}
    assert found["A"] == (5, "among 2 classes; 1 of 6 files cannot be read and are left out")
    assert found["far"][0] == 24 + 5
    assert found["far"][1].startswith("24 inside, 5 outside")
    pixels = torch.stack([transforms_of(folders / "shifted" / "n01" / f"{place}.png") for place in (0, 2)])
    pixels = torch.cat([pixels, *(transforms_of(path)[None] for path in sorted((folders / "shifted/n04").iterdir()))])
    chosen = module.eval()(pixels)[:, [1, 4]].argmax(1)
    right = (chosen == torch.tensor([0, 0, 1, 1, 1])).double().mean().item()
    assert next(row.value for row in rows if row.name == "A") == right  # labels stayed beside their pictures


def transforms_of(path):
    transform = create_transform((3, 12, 12), normalize=False)
    return transform(Image.open(path).convert("RGB")).float() / 255


def test_a_folder_of_unreadable_pictures_is_an_error_before_anything_is_measured(folders, tmp_path, module, counted):
    calls, _ = counted
    for path in (folders / "outside").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 6 pictures can be read, e\.g\. .*outside/x/0\.png"):
        evaluate(tmp_path, module, ood={"far": str(folders / "outside")})
    assert calls == []


def test_another_number_of_class_names_than_classes_is_an_error(folders, tmp_path, module):
    (folders / "wnids.txt").write_text("n01\nn04\n")
    with pytest.raises(ValueError, match="the model has 5 classes, and 2 wnids were given"):
        evaluate(tmp_path, module, shifts={"A": str(folders / "shifted")}, wnids=str(folders / "wnids.txt"))


def test_a_table_for_loggers_that_take_one(tmp_path, module):
    class Tables(DummyLogger):
        def log_table(self, key, columns, data):
            self.logged = (key, columns, data)

    logger = Tables()
    rows = evaluate(tmp_path, module, logger=logger)
    key, columns, data = logger.logged
    assert (key, columns[:5], len(data)) == ("robustness", ["test", "name", "setting", "metric", "value"], len(rows))


def test_tables_are_read_as_they_were_written(tmp_path, module):
    rows = evaluate(tmp_path, module)
    write_csv(rows, tmp_path / "again.csv")
    assert repr(read_csv(tmp_path / "again.csv")) == repr(rows)
    (tmp_path / "again.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no table of a robustness evaluation"):
        read_csv(tmp_path / "again.csv")


def test_classes_that_come_one_after_another_are_warned_of(tmp_path):
    class Sorted(TinyImages):
        def test_dataloader(self):
            images, labels = pictures(24, 12, seed=1)
            return DataLoader(TensorDataset(images, labels * 0), batch_size=10)

    with pytest.warns(UserWarning, match=f"of 1 of {CLASSES} classes only"):
        evaluate(tmp_path, TinyClassifier(), Sorted(), attacks=[])


# -- going on where a killed run was -----------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """How often each attack ran; an attack named in the set fails."""
    calls, failing = [], set()
    for name, attack in list(ATTACKS.items()):

        def function(*args, name=name, original=attack.function, **options):
            calls.append(name)
            if name in failing:
                raise KeyboardInterrupt
            return original(*args, **options)

        function.__signature__ = inspect.signature(attack.function)
        monkeypatch.setitem(ATTACKS, name, type(attack)(function, attack.white_box, attack.passes))
    return calls, failing


def test_a_killed_run_goes_on_with_what_is_done(tmp_path, module, counted):
    calls, failing = counted
    whole = values(evaluate(tmp_path / "whole", module))
    calls.clear()
    failing.add("square")
    with pytest.raises(SystemExit):  # Lightning's for an interrupt
        evaluate(tmp_path / "cut", module)
    assert calls == ["fgsm", "fgsm", "square"]
    assert [row.name for row in read_csv(tmp_path / "cut/demo/version_0/robustness.csv")] == [*[""] * 3, *["fgsm"] * 2]
    failing.clear()
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == ["square", "square"]
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == []
    assert len((tmp_path / "cut/demo/robustness_rows.jsonl").read_text().splitlines()) == 6


def test_a_terminated_run_ends_within_a_measurement_and_keeps_what_is_done(tmp_path, module, monkeypatch):
    def terminated(*args, original=ATTACKS["square"].function, **options):
        signal.raise_signal(signal.SIGTERM)  # to which Lightning only sets a flag outside of training
        return original(*args, **options)

    terminated.__signature__ = inspect.signature(ATTACKS["square"].function)
    monkeypatch.setitem(ATTACKS, "square", type(ATTACKS["fgsm"])(terminated, False, ATTACKS["square"].passes))
    with pytest.raises(SIGTERMException):
        evaluate(tmp_path, module, TinyImages(), eps=["4/255"])
    done = [row.name for row in read_csv(tmp_path / "demo/version_0/robustness.csv")]
    assert done == ["", "", "", "fgsm"]


def test_rows_stay_in_a_run_folder_of_another_name(tmp_path, module):
    runner = trainer(tmp_path / "run", RobustnessEvaluation(**QUICK), logger=False)
    runner.test(module, TinyImages(), verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "robustness_rows.jsonl").is_file()


def test_rows_of_folders_whose_content_changed_are_not_used(folders, tmp_path, module):
    def samples():
        rows = evaluate(tmp_path, module, attacks=[], ood={"far": str(folders / "outside")}, rows=str(kept))
        return len(kept.read_text().splitlines()), next(row.value for row in rows if row.metric == "auroc")

    kept, first = tmp_path / "rows.jsonl", folders / "outside" / "x" / "0.png"
    before = samples()
    assert samples() == before
    stat = first.stat()
    Image.new("RGB", (14, 14), (255, 0, 0)).save(first)
    first.write_bytes(first.read_bytes().ljust(stat.st_size, b"\0"))  # the same size,
    os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and the same time
    assert first.stat().st_size == stat.st_size
    assert samples()[0] == before[0] + 1


def test_rows_of_other_weights_settings_or_data_are_not_used(tmp_path, module, counted):
    calls, _ = counted
    one = {"attacks": [{"name": "pgd", "steps": 2}], "eps": ["4/255"], "rows": str(tmp_path / "rows.jsonl")}

    def ran(changed, data=None, **options):
        calls.clear()
        evaluate(tmp_path, changed, data, **{**one, **options})
        return len(calls)

    assert ran(module) == 1
    assert ran(module) == 0
    assert ran(module, num_images=20) == 1
    assert ran(module, TinyImages(seed=2)) == 1
    assert ran(module, seed=3) == 1
    assert ran(module, attacks=[{"name": "pgd", "steps": 3}]) == 1
    assert ran(module, eps=["5/255"]) == 1
    assert ran(module, eps=["5/255", "4/255"]) == 0  # each alone is known
    swap_attention(module, "rpc", iterations=2, lam=4.0)
    assert ran(module) == 1
    assert ran(module) == 0
    swap_attention(module, "rpc", iterations=3, lam=4.0)  # the same weights
    assert ran(module) == 1
    with torch.no_grad():
        next(module.parameters()).add_(1e-6)
    assert ran(module) == 1


def test_a_line_that_was_cut_short_is_measured_again(tmp_path, module, counted):
    calls, _ = counted
    rows = tmp_path / "rows.jsonl"
    whole = values(evaluate(tmp_path, module, rows=str(rows)))
    rows.write_bytes(rows.read_bytes()[:-40])
    calls.clear()
    with pytest.warns(UserWarning, match="line 6, is cut short"):
        assert values(evaluate(tmp_path, module, rows=str(rows))) == whole
    assert len(calls) == 1
    calls.clear()
    with pytest.warns(UserWarning, match="line 6"):
        evaluate(tmp_path, module, rows=str(rows))
    assert calls == []
    assert json.loads(rows.read_text().splitlines()[-1])["rows"][0]["name"] == "square"


# -- transfer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
def test_transfer_from_the_checkpoint_of_a_twin(tmp_path, module, swapped):
    callbacks = [SwapAttention("rpc", {"iterations": 2})] if swapped else []
    twin = TinyClassifier(seed=3)
    fit = trainer(tmp_path, *callbacks, max_steps=1)
    fit.fit(twin, TinyImages())
    fit.save_checkpoint(tmp_path / "twin.ckpt")
    transferred = {"name": "transfer", "source": str(tmp_path / "twin.ckpt"), "steps": 2}
    rows = evaluate(tmp_path, module, attacks=[transferred], eps=[0.1])
    images, labels = pictures(24, 12, seed=1)
    attacked = pgd(twin, images, labels, eps=0.1, steps=2)
    assert rows[1].value == (module.eval()(attacked).argmax(1) == labels).double().mean().item()
    assert (rows[1].name, rows[1].gradient_l2 > 0) == ("transfer of pgd", False)


# -- language models ---------------------------------------------------------------------------------------------------


def test_perplexity_with_words_swapped(tmp_path):
    data = RandomText(val_windows=30)
    task = LanguageModelingTask(SMALL, vocab_size=VOCAB, attention="rpc", attention_options={"iterations": 2})
    callback = RobustnessEvaluation(word_swap=np.float32(0.3), word_swap_token=0, batch_size=7)
    metrics = trainer(tmp_path, callback).test(task, data, verbose=False)[0]
    found = values(callback.table)
    assert found["clean", "", "", "perplexity"] == pytest.approx(metrics["test/perplexity"], rel=1e-5)
    assert set(found) == {
        ("clean", "", "", "perplexity"),
        ("word swap", "token 0", "30%", "perplexity"),
        ("word swap", "token 0", "30%", "perplexity of the words that stayed"),
    }
    samples = [row.samples for row in callback.table]
    assert samples[0] == samples[1] == 30 * 8 - 5
    assert samples[2] == pytest.approx(0.7 * samples[0], abs=20)
    assert found["word swap", "token 0", "30%", "perplexity"] != found["clean", "", "", "perplexity"]
    assert "| word swap: token 0 | 30% | perplexity |" in next(tmp_path.rglob("*.md")).read_text()
    unswapped = RobustnessEvaluation(word_swap=0.0)
    trainer(tmp_path, unswapped).test(task, data, verbose=False)
    assert len({row.value for row in unswapped.table}) == 1


def test_perplexities_that_are_nan_or_infinite_are_said():
    counted = torch.tensor([[True, True]])
    assert perplexity(torch.tensor([[-1000.0, -1000.0]]).double(), counted) == (math.inf, 2)
    text = Text(
        SimpleNamespace(predict_step=lambda batch, index: torch.full((1, 2), math.nan)), *[counted.long()] * 2, "cpu"
    )
    (row,) = clean_text_measurement(text).measure(lambda share: None)
    assert (math.isnan(row.value), row.note) == (True, "the model gives nan")
    assert row.is_measured
    assert figure(row) == "NaN"
    assert figure(Row("mean corruption", "", "", "accuracy", math.nan, note="no baseline")) == "not measured"


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attacks": ["pgdd"]}, "unknown attack 'pgdd'; did you mean 'pgd'"),
        ({"attacks": [{"name": "pgd", "step": 3}]}, "unknown option of pgd 'step'; did you mean 'steps'"),
        ({"attacks": [{"name": "fgsm", "eps": 3}]}, "unknown option of fgsm 'eps'"),
        ({"attacks": ["transfer"]}, "needs source: the checkpoint of a twin"),
        ({"attacks": [{"name": "transfer", "source": "nowhere.ckpt"}]}, "'nowhere.ckpt': no such file"),
        ({"attacks": ["released_pgd"]}, "needs std"),
        (
            {"attacks": [{"name": "square", "queries": 1e3}]},
            "'square': queries=1000.0 must be .*; write 1000",
        ),
        ({"attacks": [{"name": "square", "queries": "many"}]}, "queries='many' must be an integer"),
        ({"attacks": [{"name": "spsa", "samples": 3}]}, "samples=3 must be an even integer"),
        ({"attacks": [{"name": "pgd", "step_size": -1}]}, "step_size=-1 must be a positive number"),
        ({"attacks": ["pgd", {"name": "pgd", "steps": 50}]}, "two attacks are called 'pgd' in the table"),
        ({"eps": [8]}, r"eps is 8: it must be a number in \[0, 1\]"),
        ({"eps": ["8/2"]}, r"eps is '8/2': it must be a number in \[0, 1\]"),
        ({"eps": []}, "eps is empty, and attacks need a radius"),
        ({"eps": ["a"]}, "eps is 'a'"),
        ({"eps": ["1/0"]}, "eps is '1/0'"),
        ({"eps": [True]}, "eps is True"),
        ({"eps": [np.float32("nan")]}, r"eps is np.float32\(nan\)"),
        ({"corruptions": ["blurr"]}, "'blurr' is unknown"),
        ({"severities": [6]}, "severity is 6"),
        ({"num_images": 0}, "num_images must be an integer of at least 1, got 0"),
        ({"num_images": "5"}, "num_images must be .* got '5'"),
        ({"batch_size": 0}, "batch_size must be .* got 0"),
        ({"num_workers": -1}, "num_workers must be .* got -1"),
        ({"seed": None}, "seed must be .* got None"),
        ({"word_swap_keep": [0.5]}, "word_swap_keep must be .* got 0.5"),
        ({"word_swap": 2.5}, "word_swap, .* at least 0 and at most 1, got 2.5"),
        ({"word_swap": "0.5"}, "word_swap, .* got '0.5'"),
        ({"num_images": 2.5}, r"num_images must be .* got 2\.5"),
        ({"word_swap": True}, "word_swap, .* got True"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(options, says):
    with pytest.raises(ValueError, match=says):
        RobustnessEvaluation(**options)


def test_batches_of_another_kind_are_named(tmp_path):
    class Dicts(TinyImages):
        def test_dataloader(self):
            return DataLoader([{"image": torch.rand(3, 12, 12)}])

    class Normalised(TinyImages):
        def test_dataloader(self):
            images, labels = pictures(4, 12, 0)
            return DataLoader(TensorDataset(images * 4 - 2, labels))

    with pytest.raises(ValueError, match=r"needs batches \(images, labels\).* is given dict"):
        evaluate(tmp_path, TinyClassifier(), Dicts())
    with pytest.raises(ValueError, match=r"give them in \[0, 1\], and let the model normalise"):
        evaluate(tmp_path, TinyClassifier(), Normalised())


def test_a_module_without_gradients_is_named(tmp_path):
    class Detached(TinyClassifier):
        def forward(self, images):
            return super().forward(images).detach()

    with pytest.raises(ValueError, match="Detached gives no gradient for its images"):
        evaluate(tmp_path, Detached())


def test_several_processes_are_refused(tmp_path, monkeypatch):
    runner = trainer(tmp_path)
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match=r"one process, got 2; test with trainer\.devices=1"):
        RobustnessEvaluation(corruptions=[]).setup(runner, TinyClassifier(), "test")


def test_eps_and_attacks_as_written():
    assert read_eps("4 / 255") == ("4/255", 4 / 255)
    assert read_eps(0.25) == read_eps(np.float32(0.25)) == read_eps(Fraction(1, 4)) == ("0.25", 0.25)
    setting = AttackSetting.read({"name": "pgd", "steps": 5})
    assert setting.options == {"steps": 5, "step_size": None, "restarts": 1, "random_start": True}
    assert AttackSetting.read({"name": "transfer", "source": "a", "attack": "square"}).label == "transfer of square"


def test_another_version_of_a_library_makes_another_fingerprint(monkeypatch):
    module = torch.nn.Linear(2, 2)
    for name in ("torch", "torchvision", "timm", "transformers", "torchmetrics", "numpy", "pillow"):
        before = fingerprint(module, [])
        monkeypatch.setattr(suite, "version", lambda asked, name=name: "0.0.1" if asked == name else version(asked))
        assert fingerprint(module, []) != before
        monkeypatch.undo()
    subject = Subject(module, torch.rand(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
    before = corruption_measurement(subject, "fog", 1).what
    monkeypatch.setattr(suite, "version", lambda asked: "0.0.1")
    assert corruption_measurement(subject, "fog", 1).what != before


def test_a_buffer_that_no_checkpoint_holds_makes_another_fingerprint():
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(3), persistent=False)
    before = fingerprint(module, [])
    assert fingerprint(module, []) == before
    module.mean += 0.5
    assert fingerprint(module, []) != before
