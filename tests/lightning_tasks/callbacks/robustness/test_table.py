"""The table of RobustnessEvaluation in Lightning's test loop."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, TensorDataset

from attention_modules import swap_attention
from attention_modules.mechanisms.shared.held_options import other_options
from lightning_tasks import LanguageModelingTask
from lightning_tasks.callbacks import RobustnessEvaluation, SwapAttention
from lightning_tasks.robustness import fgsm, input_gradient_norms, pgd, square
from lightning_tasks.robustness.tested_model import gradient_note, mechanisms_of
from lightning_tasks.robustness.text import (
    Text,
    clean_text_measurement,
    perplexity,
    swap_words,
    word_swap_measurement,
)
from lightning_tasks.runs.robustness import GIVES_NAN, Row, figure, read_csv, write_csv
from tests.lightning_tasks.callbacks.robustness.evaluations import QUICK, evaluate, trainer, values
from tests.lightning_tasks.language_data import SMALL, VOCAB, RandomText
from tests.lightning_tasks.robustness.modules import CLASSES, TinyClassifier, TinyImages, random_images


@pytest.mark.parametrize("inference_mode", [True, False])
def test_the_table_is_what_the_attacks_give_by_hand(tmp_path, module, inference_mode):
    callback = RobustnessEvaluation(
        attacks=["fgsm", {"name": "pgd", "steps": 3}, {"name": "square", "queries": 5}], eps=["4/255"], corruptions=[]
    )
    runner = trainer(tmp_path, callback, inference_mode=inference_mode)
    runner.test(module, TinyImages(), verbose=False)
    images, labels = random_images(24, 12, seed=1)
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


def test_the_rows_say_where_a_gradient_is_not_that_of_the_output(tmp_path, module):
    said = "the gradient of HardAttention is not that of the output"
    attacks = ["fgsm", {"name": "square", "queries": 2}, {"name": "autoattack", "attacks": ["apgd-ce"]}]
    rows = {row.name: row for row in evaluate(tmp_path / "plain", module, attacks=attacks, eps=[0.1])}
    assert not any(said in row.note for row in rows.values())
    swap_attention(module, "hard")
    rows = {row.name: row for row in evaluate(tmp_path / "hard", module, attacks=attacks, eps=[0.1])}
    assert rows["fgsm"].note == said
    assert rows["square"].note == ""
    assert f"flags: {said}" in rows["autoattack"].note.replace("some gradients are zero; ", "")


def test_whose_gradients_are_not_those_of_the_output():
    def said(mechanism, **options):
        model = TinyClassifier()
        swap_attention(model, mechanism, **options)
        return gradient_note(model)

    assert said("elliptical").startswith("the gradient of ")
    assert said("sinkhorn") == "the gradient of SinkhornAttention is not that of the output"
    assert said("sinkhorn", detach=False) == said("sinkhorn", iterations=1) == said("rpc") == ""
    assert said("dam", num_tokens=16) == "", "in evaluation it draws nothing"
    model = TinyClassifier()
    swap_attention(model, "sinkhorn")
    with other_options(mechanisms_of(model), {"detach": False}):
        assert gradient_note(model) == ""


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
    images, labels = random_images(24, 12, seed=1)
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
            images, labels = random_images(24, 12, seed=1)
            return DataLoader(TensorDataset(images, labels * 0), batch_size=10)

    with pytest.warns(UserWarning, match=f"of 1 of {CLASSES} classes only"):
        evaluate(tmp_path, TinyClassifier(), Sorted(), attacks=[])


@pytest.mark.parametrize("swapped", [False, True])
def test_transfer_from_the_checkpoint_of_a_twin(tmp_path, module, swapped):
    callbacks = [SwapAttention("rpc", {"iterations": 2})] if swapped else []
    twin = TinyClassifier(seed=3)
    fit = trainer(tmp_path, *callbacks, max_steps=1)
    fit.fit(twin, TinyImages())
    fit.save_checkpoint(tmp_path / "twin.ckpt")
    transferred = {"name": "transfer", "source": str(tmp_path / "twin.ckpt"), "steps": 2}
    rows = evaluate(tmp_path, module, attacks=[transferred], eps=[0.1])
    images, labels = random_images(24, 12, seed=1)
    attacked = pgd(twin, images, labels, eps=0.1, steps=2)
    assert rows[1].value == (module.eval()(attacked).argmax(1) == labels).double().mean().item()
    assert (rows[1].name, rows[1].gradient_l2 > 0) == ("transfer of pgd", False)


def test_perplexity_with_words_swapped(tmp_path):
    data = RandomText(val_windows=30)
    task = LanguageModelingTask(SMALL, vocab_size=VOCAB, mechanism="rpc", options={"iterations": 2})
    callback = RobustnessEvaluation(word_swap=np.float32(0.3), word_swap_token=0, batch_size=7)
    metrics = trainer(tmp_path, callback).test(task, data, verbose=False)[0]
    found = values(callback.table)
    assert found["clean", "", "", "perplexity"] == pytest.approx(metrics["test/perplexity"], rel=1e-5)
    assert set(found) == {
        ("clean", "", "", "perplexity"),
        ("word swap", "token 0", "30%", "perplexity"),
        ("word swap", "token 0", "30%", "perplexity of the words that stayed"),
        ("word swap", "token 0", "30%", "clean perplexity of the words that stayed"),
    }
    samples = [row.samples for row in callback.table]
    assert samples[0] == samples[1] == 30 * 8 - 5
    assert samples[2] == samples[3] == pytest.approx(0.7 * samples[0], abs=20)
    assert found["word swap", "token 0", "30%", "perplexity"] != found["clean", "", "", "perplexity"]
    shown = next(tmp_path.rglob("*.md")).read_text()
    assert "| word swap: token 0 | 30% | perplexity |" in shown
    assert f"| clean perplexity of the words that stayed | {callback.table[3].value:.2f} |" in shown
    unswapped = RobustnessEvaluation(word_swap=0.0)
    trainer(tmp_path, unswapped).test(task, data, verbose=False)
    assert len({row.value for row in unswapped.table}) == 1


def test_the_words_that_stay_are_measured_in_swapped_and_in_clean_text():
    inputs = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    targets = torch.tensor([[2, 3, 4, 5, 6, 7, 8, -100]])

    def predict_step(batch, index):  # ln p of a target falls with its input, and is lower where the input is token 0
        return -torch.where(batch[1] == -100, 0, torch.where(batch[0] == 0, 9.0, batch[0] / 10))

    shares = []
    text = Text(SimpleNamespace(predict_step=predict_step), inputs, targets, "cpu", seed=3)
    rows = word_swap_measurement(text, 0.4, 0, ()).measure(shares.append)
    swapped_inputs, _, swapped = swap_words(inputs, targets, share=0.4, token=0, keep=(), seed=3)
    stayed = (targets != -100) & ~swapped
    assert 0 < int(stayed.sum()) < 7
    losses = [-predict_step(each, 0)[stayed].mean() for each in ((swapped_inputs, targets), (inputs, targets))]
    assert [row.value for row in rows[1:]] == pytest.approx([float(each.exp()) for each in losses])
    assert [row.samples for row in rows] == [7, int(stayed.sum()), int(stayed.sum())]
    assert sum(shares) == pytest.approx(1.0)


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


class InPlace(TinyClassifier):
    def forward(self, images):
        return super().forward(images.sub_(0.5))


def test_a_model_that_changes_its_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"InPlace changes its images in place .*: compute a new tensor"):
        evaluate(tmp_path, InPlace())
    attacked, labels = random_images(4, 12, seed=0)
    with pytest.raises(ValueError, match="changes its images in place"):
        square(InPlace().forward, attacked, labels, eps=0.1, queries=2)


class Logs(TinyClassifier):
    def forward(self, images):
        found = super().forward(images)
        self.log("norm", found.norm(dim=1).mean())
        return found


def test_what_forward_logs_is_of_the_test_alone(tmp_path):
    alone = trainer(tmp_path / "alone").test(Logs(), TinyImages(), verbose=False)[0]["norm"]
    module = Logs()
    both = trainer(tmp_path / "both", RobustnessEvaluation(**QUICK)).test(module, TinyImages(), verbose=False)
    assert both[0]["norm"] == alone
    assert module.log.__self__ is module


class Rounds(TinyClassifier):
    def forward(self, images):
        return super().forward((images * 255).round() / 255)


def test_a_gradient_that_is_zero_is_noted(tmp_path):
    notes = {row.name: row.note for row in evaluate(tmp_path, Rounds())}
    assert notes["fgsm"] == "the input gradient is zero: an attack by it says nothing"
    assert notes["square"] == ""


def test_a_module_that_was_swapped_before_is_told(tmp_path):
    module = TinyClassifier()
    swap_attention(module, "symmetric", layers=[0])
    evaluate(tmp_path, module)
    assert "swapped_attention:" in (tmp_path / "demo" / "version_0" / "hparams.yaml").read_text()
    evaluate(tmp_path, TinyClassifier())
    assert "swapped_attention:" not in (tmp_path / "demo" / "version_1" / "hparams.yaml").read_text()


class Diverged(TinyClassifier):
    """Gives nan for every image, or for those that are bright."""

    limit = -1.0

    def forward(self, images):
        bright = images.flatten(1).mean(1, keepdim=True) > self.limit
        return super().forward(images).masked_fill(bright, float("nan"))


def lines(table):
    return [(row.test, row.name, row.setting, row.metric) for row in table]


def test_a_model_whose_logits_are_nan_has_a_table_of_nan(tmp_path):
    """With the lines of a model that gives numbers, so that means over seeds lose none unsaid."""
    finite = lines(evaluate(tmp_path / "finite", TinyClassifier()))
    with pytest.warns(UserWarning, match="all figures are nan: Diverged gives logits that are not finite"):
        table = evaluate(tmp_path / "all", Diverged())
    assert lines(table) == finite
    assert {(math.isnan(row.value), row.note) for row in table} == {(True, GIVES_NAN)}
    assert "| clean |  | accuracy | NaN |" in (tmp_path / "all/demo/version_0/robustness.md").read_text()

    some = Diverged()
    first, second = (each.flatten(1).mean(1) for each in random_images(24, 12, seed=1)[0].split([10, 14]))
    some.limit = (first.max().item() + second.max().item()) / 2
    assert first.max() < some.limit < second.max(), "the first batch tells nothing"
    with pytest.warns(UserWarning, match="robustness/clean/accuracy is nan: Diverged gives logits"):
        table = evaluate(tmp_path / "some", some, batch_size=10)
    assert lines(table) == finite
    assert {(math.isnan(row.value), row.note) for row in table} == {(True, GIVES_NAN)}


def test_a_gradient_that_is_not_finite_is_a_figure_of_nan(tmp_path):
    module = TinyClassifier()
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1e6)
    with pytest.warns(UserWarning, match=r"robustness/fgsm/4_255/accuracy is nan: .* a gradient that is not finite"):
        table = evaluate(tmp_path, module)
    notes = {(row.test, row.name): row.note for row in table}
    assert (notes["clean", ""], notes["attack", "square"]) == ("", "")
    assert notes["attack", "fgsm"] == notes["input gradient", ""] == GIVES_NAN


def test_log_is_left_alone_where_it_is_no_method(tmp_path):
    class OwnLog(TinyClassifier):
        log = property(lambda self: lambda *given, **options: None)

    assert evaluate(tmp_path, OwnLog(), logger=False)[0].test == "clean"
