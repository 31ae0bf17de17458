"""Images from outside, told by scores of pytorch-ood: each row by hand, what is fitted to what, and refusals."""

import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from attnswap.datamodules import DigitsDataModule
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn
from torch.nn import functional

from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.robustness.class_folders import imagenet_wnids
from lightning_tasks.robustness.detection import SCORES
from lightning_tasks.robustness.outside import Outside, overlapping_wnids
from tests.lightning_tasks.callbacks.robustness.evaluations import evaluate, values
from tests.lightning_tasks.robustness.modules import TinyImages


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
            self.head = nn.Linear(12, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def test_step(self, batch, batch_idx):
        pass


def told(folder, **options):
    options = {"attacks": [], "num_images": None, "ood_scores": list(SCORES), **options}
    return evaluate(folder, Digits(), DigitsDataModule(num_workers=0), **options)


def images_of(split):
    pixels = DigitsDataModule().load(split).pixels
    return torch.from_numpy(pixels).float().unsqueeze(1) / 255


@pytest.fixture
def library():
    return pytest.importorskip("pytorch_ood", reason="pytorch-ood is not installed (extra `robustness`)")


@torch.no_grad()
def by_hand(model, outside):
    """Scores inside and outside by their definitions."""
    train, inside = model.body(images_of("train")).double(), images_of("test")
    weight, bias = model.head.weight.double(), model.head.bias.double()
    origin = -torch.linalg.pinv(weight) @ bias
    vectors = torch.linalg.svd(train - origin, full_matrices=False)[2]
    residual = vectors[6:].mT  # of twelve features, the six along which training images lie least
    alpha = (train @ weight.mT + bias).amax(1).mean() / ((train - origin) @ residual).norm(dim=1).mean()
    found = []
    for images in (inside, outside):
        features = model.body(images).double()
        logits = features @ weight.mT + bias
        near = torch.cdist(functional.normalize(features), functional.normalize(train)).sort(1).values[:, 49]
        virtual = alpha * ((features - origin) @ residual).norm(dim=1)
        scores = {"msp": -logits.softmax(1).amax(1), "energy": -logits.logsumexp(1), "knn": near}
        found.append(scores | {"vim": virtual - logits.logsumexp(1)})
    return found


def test_scores_are_those_of_their_definitions_fitted_to_training_images(library, folders, tmp_path):
    ood = {"far": {"folder": str(folders / "outside"), "classes": ["y"]}, "same": {"data": "digits"}}
    table = told(tmp_path, ood=ood)
    rows = values(table)
    module = DigitsDataModule()
    dataset = Outside.read("far", ood["far"]).images(8, 8, 1)[0]
    outside = torch.stack([dataset[place][0] for place in range(3)]).float() / 255
    inside, away = by_hand(Digits(), outside)
    target = np.repeat([0, 1], [len(inside["msp"]), 3])
    for score in SCORES:
        joined = torch.cat([inside[score], away[score]]).numpy()
        auroc, fpr95 = (rows["out of distribution", "far", score, metric] for metric in ("auroc", "fpr95"))
        assert auroc == pytest.approx(roc_auc_score(target, joined), abs=2e-3), score
        fpr, tpr, _ = roc_curve(target, joined, drop_intermediate=False)
        assert fpr95 == pytest.approx(fpr[tpr >= 0.95][0], abs=6e-3), score
        assert rows["out of distribution", "same", score, "auroc"] == pytest.approx(0.5)
    notes = {(row.name, row.setting): row.note for row in table}
    assert "3 outside (positive), among all classes; pytorch-ood" in notes["far", "msp"]
    assert notes["far", "knn"].endswith(f", fitted to {len(module.images('train')):,} training images")
    few = values(told(tmp_path / "few", ood=ood, ood_fit_images=60))
    assert few["out of distribution", "far", "msp", "auroc"] == rows["out of distribution", "far", "msp", "auroc"]
    assert few["out of distribution", "far", "knn", "auroc"] != rows["out of distribution", "far", "knn", "auroc"]


def test_what_scores_need_is_said_before_anything_is_measured(library, tmp_path, module, monkeypatch):
    given = {"attacks": [], "ood": {"same": {"data": "digits"}}}
    with pytest.raises(
        ValueError, match=r"fitted to training images.* got TinyImages: test with one, or leave them out"
    ):
        evaluate(tmp_path, module, TinyImages(), ood_scores=["vim"], **given)
    monkeypatch.setattr(Digits, "forward", lambda self, images: 2 * self.head(self.body(images)))
    with pytest.raises(ValueError, match="the logits of Digits are those of no linear layer: leave them out"):
        told(tmp_path, ood=given["ood"])
    monkeypatch.setitem(sys.modules, "pytorch_ood", None)
    with pytest.raises(ImportError, match=r"needs pytorch-ood: pip install 'attnswap\[robustness\]'"):
        told(tmp_path, ood=given["ood"], ood_scores=["msp"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ood_scores": ["mps"]}, "ood_scores has 'mps'; known are msp, energy, vim, knn"),
        ({"ood_scores": ["msp", "msp"]}, "one of them twice"),
        ({"ood_scores": ["msp"], "ood": None}, "ood names nothing that is to be told"),
        ({"ood_fit_images": 0}, "ood_fit_images"),
        ({"ood": {"a": {"data": "mnist"}}}, "ood 'a' is .*: data is cifar10 or digits"),
        ({"ood": {"a": {"classes": ["x"]}}}, "either a folder, or data"),
        ({"ood": {"a": {"folder": "{outside}", "class": ["x"]}}}, "ood 'a' has 'class'"),
        (
            {"ood": {"a": {"folder": "{outside}", "classes": ["z"]}}},
            r"has no folder 'z', which classes names; it has \[",
        ),
        ({"ood": {"a": {"folder": "{outside}", "without": "cifar"}}}, "is without 'cifar': known is cifar10"),
        ({"ood": {"a": "nowhere"}}, r"ood 'a': no folder nowhere or .*nowhere; is \$ATTNSWAP_DATA where"),
    ],
)
def test_refusals(options, says, folders):
    given = {"ood": {"far": {"data": "digits"}}, **options}
    for each in (given["ood"] or {}).values():
        if isinstance(each, dict) and "folder" in each:
            each["folder"] = str(folders / "outside")
    with pytest.raises(ValueError, match=says):
        RobustnessEvaluation(**given)


def test_folders_are_looked_for_where_data_sets_are_and_overlapping_classes_are_left_out(tmp_path, monkeypatch):
    wnids = imagenet_wnids()
    airliner, tench = wnids[404], wnids[0]
    for name in (airliner, tench):
        (tmp_path / "sample" / name).mkdir(parents=True)
    monkeypatch.setenv("ATTNSWAP_DATA", str(tmp_path))
    assert Outside.read("a", "sample").names() == sorted((airliner, tench))
    assert Outside.read("a", {"folder": "sample", "without": "cifar10"}).names() == [tench]
    with pytest.raises(ValueError, match="has no class that is outside of cifar10"):
        Outside.read("a", {"folder": "sample", "classes": [airliner], "without": "cifar10"})
    taken = overlapping_wnids("cifar10")
    assert len(taken) == len(set(taken)) == 287
