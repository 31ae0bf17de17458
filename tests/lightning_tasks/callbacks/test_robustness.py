"""RobustnessEvaluation in Lightning's test loop: its table, what it keeps when killed, and what it refuses."""

import csv
import inspect
import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import swap_attention
from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import RobustnessEvaluation, SwapAttention
from lightning_tasks.robustness import fgsm, pgd, square
from lightning_tasks.robustness.attack_table import ATTACKS, AttackSetting, read_eps
from lightning_tasks.robustness.suite import fingerprint
from lightning_tasks.robustness.table import read_csv, write_csv
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
    with (tmp_path / "demo" / "version_0" / "robustness.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["", "fgsm", "pgd", "square"]
    assert (
        f"| attack: pgd | 4/255 | accuracy | {100 * expected:.1f}% | 24 |"
        in (tmp_path / "demo" / "version_0" / "robustness.md").read_text()
    )


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
    text = (tmp_path / "a" / "demo" / "version_0" / "robustness.md").read_text()
    assert "| corruption, accuracy at severity | 1 | 5 |" in text
    assert "2 of 15 corruptions, severities 1, 5" in text
    with pytest.raises(ValueError, match="no fog at severity 1"):
        RobustnessEvaluation(corruptions=["fog"], severities=[1], baseline=str(baseline))
    with pytest.raises(ValueError, match="no such file"):
        RobustnessEvaluation(baseline=str(tmp_path))


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
    assert [row.name for row in read_csv(tmp_path / "cut/demo/version_0/robustness.csv")] == ["", "fgsm", "fgsm"]
    failing.clear()
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == ["square", "square"]
    calls.clear()
    assert values(evaluate(tmp_path / "cut", module)) == whole
    assert calls == []
    assert len((tmp_path / "cut/demo/robustness_rows.jsonl").read_text().splitlines()) == 5


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
    with pytest.warns(UserWarning, match="line 5, is cut short"):
        assert values(evaluate(tmp_path, module, rows=str(rows))) == whole
    assert len(calls) == 1
    calls.clear()
    with pytest.warns(UserWarning, match="line 5"):
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
    callback = RobustnessEvaluation(word_swap=0.3, word_swap_token=0, batch_size=7)
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
        ({"eps": [8]}, r"eps is 8: it must be in \[0, 1\]"),
        ({"eps": ["8/2"]}, r"eps is '8/2': it must be in \[0, 1\]"),
        ({"eps": ["a"]}, "eps is 'a'"),
        ({"eps": ["1/0"]}, "eps is '1/0'"),
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

    with pytest.raises(ValueError, match="gives no gradient for its images"):
        evaluate(tmp_path, Detached())


def test_several_processes_are_refused(tmp_path, monkeypatch):
    runner = trainer(tmp_path)
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match=r"one process, got 2; test with trainer\.devices=1"):
        RobustnessEvaluation(corruptions=[]).setup(runner, TinyClassifier(), "test")


def test_eps_and_attacks_as_written():
    assert read_eps("4 / 255") == ("4/255", 4 / 255)
    assert read_eps(0.25) == ("0.25", 0.25)
    setting = AttackSetting.read({"name": "pgd", "steps": 5})
    assert setting.options == {"steps": 5, "step_size": None, "restarts": 1, "random_start": True}
    assert AttackSetting.read({"name": "transfer", "source": "a", "attack": "square"}).label == "transfer of square"


def test_a_buffer_that_no_checkpoint_holds_makes_another_fingerprint():
    module = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(3), persistent=False)
    before = fingerprint(module, [])
    assert fingerprint(module, []) == before
    module.mean += 0.5
    assert fingerprint(module, []) != before
