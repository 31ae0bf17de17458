"""What RobustnessEvaluation refuses, and how settings are written."""

from fractions import Fraction

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.robustness.attacks.table import AttackSetting, read_eps
from tests.lightning_tasks.callbacks.robustness.evaluations import evaluate, trainer
from tests.lightning_tasks.robustness.modules import TinyClassifier, TinyImages, random_images
from tests.rows import each_row


@each_row(
    ("options", "says"),
    [
        ({"attacks": ["pgdd"]}, "unknown attack 'pgdd'; did you mean 'pgd'"),
        ({"attacks": [{"name": "pgd", "step": 3}]}, "unknown option of pgd 'step'; did you mean 'steps'"),
        ({"attacks": [{"name": "fgsm", "eps": 3}]}, "'fgsm' has eps=3: give a list of radii in the Linf norm"),
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
        ({"corruptions": None}, "corruptions must be .common., .all. or a list of names, empty for none; got None"),
        ({"corruptions": 3}, "corruptions must be .common., .all. or a list of names, empty for none; got 3"),
        ({"corruptions": [3]}, r"corruptions must be .common., .all. or a list of names, .*; got \[3\]"),
        ({"corruptions": {"fog": 1}}, "corruptions must be .common., .all. or a list of names, .*; got {'fog': 1}"),
        ({"corruptions": b"fog"}, "corruptions must be .common., .all. or a list of names, .*; got b'fog'"),
        ({"corruptions": "blur"}, "corruptions must be .common., .all. or a list of names, empty for none; got .blur."),
        ({"eps": ["a"]}, "eps is 'a'"),
        ({"eps": ["1/0"]}, "eps is '1/0'"),
        ({"eps": [True]}, "eps is True"),
        ({"eps": [np.float32("nan")]}, r"eps is np.float32\(nan\)"),
        ({"corruptions": ["blurr"]}, "'blurr' is unknown"),
        ({"severities": [6]}, "severity is 6"),
        ({"severities": [1, 3, 1]}, "severities has 1 twice"),
        ({"corruptions": ["fog", "snow", "fog"]}, "corruptions has 'fog' twice"),
        ({"eps": ["1/255", "1 / 255"]}, "eps has '1/255' twice"),
        ({"shifts": {"clean": "folder"}}, "two rows would be logged as 'robustness/clean'"),
        (
            {"attacks": [{"name": "pgd", "label": "a b"}, {"name": "pgd", "label": "a_b"}]},
            "two rows would be logged as 'robustness/a_b'",
        ),
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
        ({"baseline": 3}, "baseline must be a run's table .its path., 'alexnet', or a list of both, got 3"),
        ({"baseline": ["alexnet", None]}, r"baseline must be .* got \['alexnet', None\]"),
        ({"imagenet_c": 3}, "imagenet_c must be the path of a folder, got 3"),
        ({"imagenet_c": "imagenet-c", "corruptions": []}, "imagenet_c is given, and corruptions is empty"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(options, says):
    with pytest.raises(ValueError, match=says):
        RobustnessEvaluation(**options)


def test_batches_of_another_kind_are_named(tmp_path):
    class Dicts(TinyImages):
        def test_dataloader(self):
            return DataLoader([{"image": torch.rand(3, 12, 12)}])

    class Normalized(TinyImages):
        def test_dataloader(self):
            images, labels = random_images(4, 12, 0)
            return DataLoader(TensorDataset(images * 4 - 2, labels))

    with pytest.raises(ValueError, match=r"needs batches \(images, labels\).* is given a dict of image: give"):
        evaluate(tmp_path, TinyClassifier(), Dicts())
    with pytest.raises(ValueError, match=r"give them in \[0, 1\], and let the model normalize"):
        evaluate(tmp_path, TinyClassifier(), Normalized())


def test_a_module_without_gradients_is_named(tmp_path):
    class Detached(TinyClassifier):
        def forward(self, images):
            return super().forward(images).detach()

    with pytest.raises(ValueError, match="Detached gives no gradient for its images"):
        evaluate(tmp_path, Detached())


def test_an_adaptive_attack_on_a_model_without_such_mechanisms_is_refused_before_anything_is_measured(tmp_path):
    attacks = ["fgsm", {"name": "transfer", "mechanism": {"iterations": 1}}]
    with pytest.raises(
        ValueError, match=r"no mechanism of the model reads an option 'iterations' at each call \(none\)"
    ):
        evaluate(tmp_path, TinyClassifier(), attacks=attacks)
    assert not list(tmp_path.rglob("robustness_rows.jsonl"))


@each_row(
    ("given", "said"),
    [
        ({"attacks": "pgd"}, r"attacks must be a list, got 'pgd': give \['pgd'\]"),
        ({"eps": "4/255"}, r"eps must be a list, got '4/255'"),
        ({"attacks": [{"steps": 3}]}, r"the attack \{'steps': 3\} has no name"),
        ({"corruptions": ["fog"], "severities": []}, "severities is empty"),
    ],
)
def test_a_text_for_a_list_and_an_empty_list_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        RobustnessEvaluation(**given)


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


ONE = RobustnessEvaluation(corruptions=[])


@each_row(
    "both",
    [
        [ONE, RobustnessEvaluation(attacks=["fgsm"], corruptions=[])],
        [ONE, ONE],
        [type(name, (RobustnessEvaluation,), {})(corruptions=[]) for name in ("First", "Second")],
    ],
)
def test_a_second_evaluation_is_refused_as_both_write_one_table(tmp_path, both):
    runner = trainer(tmp_path, *both, max_steps=1)
    for run in (runner.test, runner.fit):
        with pytest.raises(ValueError, match="the trainer has 2 callbacks RobustnessEvaluation"):
            run(TinyClassifier(), TinyImages())
    assert not list(tmp_path.rglob("robustness.*"))


def test_half_precision_of_images_is_refused_and_a_fit_warns(tmp_path):
    runner = trainer(tmp_path, RobustnessEvaluation(corruptions=[]), precision="bf16-true", max_steps=1)
    with pytest.warns(UserWarning, match="a test will be refused: trainer.precision is bf16-true"):
        runner.fit(TinyClassifier(), TinyImages())
    with pytest.raises(ValueError, match=r"trainer\.precision is bf16-true, .*: use bf16-mixed, or 32-true"):
        runner.test(TinyClassifier(), TinyImages())
