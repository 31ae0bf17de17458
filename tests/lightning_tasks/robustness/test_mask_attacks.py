"""FGSM and PGD on masks: the worst case of a linear model of pixels, and pixels that do not count."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.robustness import fgsm, pgd, spsa, square
from lightning_tasks.robustness.attacks.common import IGNORED
from lightning_tasks.robustness.attacks.table import AttackSetting
from lightning_tasks.robustness.masks import MaskedImages, MaskKind, attacked_mask_measurement

EPS = 8 / 255
WHITE_BOX = {"fgsm": fgsm, "pgd": lambda *given, **options: pgd(*given, steps=5, restarts=2, **options)}
each_of = pytest.mark.parametrize("attack", WHITE_BOX.values(), ids=WHITE_BOX)


def linear_of_pixels(classes=2):
    torch.manual_seed(0)
    return nn.Conv2d(3, classes, 1).double()


def pair(count=4, size=6, classes=2):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    return images, torch.randint(0, classes, (count, size, size), generator=generator)


@each_of
def test_they_reach_the_worst_case_of_a_linear_model_of_pixels(attack):
    model, (images, masks) = linear_of_pixels(), pair()
    weight = model.weight.detach()[:, :, 0, 0]
    away = (weight[1 - masks] - weight[masks]).sign().permute(0, 3, 1, 2)
    torch.testing.assert_close(attack(model, images, masks, eps=EPS), images + EPS * away)


@each_of
def test_pixels_that_do_not_count_stay_as_they_are(attack):
    model, (images, masks) = linear_of_pixels(), pair()
    masks[:3, 2:4] = IGNORED
    masks[3] = IGNORED  # a whole image: its loss is 0, not nan
    attacked = attack(model, images, masks, eps=EPS)
    ignored = (masks == IGNORED)[:, None].expand_as(images)
    if attack is fgsm:  # PGD starts at random points
        assert torch.equal(attacked[ignored], images[ignored])
    assert ((attacked - images).abs()[~ignored] > EPS - 1e-9).all()
    assert attacked.isfinite().all()


def test_pgd_maximizes_the_mean_cross_entropy_of_each_image():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 5, 3, padding=1)).double()
    images, masks = pair(classes=5)
    masks[:, :2] = IGNORED

    def losses(points):
        return torch.stack(
            [
                functional.cross_entropy(model(point[None]), mask[None])
                for point, mask in zip(points, masks, strict=True)
            ]
        )

    clean, one, many = (
        losses(points)
        for points in (images, fgsm(model, images, masks, eps=EPS), pgd(model, images, masks, eps=EPS, steps=10))
    )
    assert (one > clean).all()
    assert (many >= one).all()


class Rounded(nn.Module):
    """Its scores do not change with a small change of the image."""

    def forward(self, images):
        return torch.round(images * 4) + 0 * images

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)


def test_an_attack_by_a_gradient_that_is_zero_is_noted():
    masks = [torch.zeros(8, 8, dtype=torch.int64)] * 4
    subject = MaskedImages(Rounded(), [*torch.rand(4, 3, 8, 8)], masks, 3, 255, torch.device("cpu"))
    measurement = attacked_mask_measurement(subject, AttackSetting.read("fgsm"), ("4/255", 4 / 255))
    (row,) = measurement.measure(lambda share: None)
    assert row.note == "the input gradient is zero: an attack by it says nothing"


def test_what_has_no_masks_says_so():
    model, (images, masks) = linear_of_pixels(), pair()
    for attack in (spsa, square):
        with pytest.raises(ValueError, match=r"labels \[B\], got .*\[4, 6, 6\]"):
            attack(model, images, masks, eps=EPS)
    with pytest.raises(ValueError, match=r"logits \[B, classes, H, W\] of 4 images, got \[4, 2\]"):
        fgsm(nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images, masks, eps=EPS)
    with pytest.raises(ValueError, match=r"logits \[B, classes\] of 4 images, got \[4, 2, 6, 6\]"):
        fgsm(model, images, masks[:, 0, 0], eps=EPS)
    with pytest.raises(ValueError, match=r"labels \[B\], or masks \[B, H, W\], got .*\[4, 6\]"):
        fgsm(model, images, masks[:, 0], eps=EPS)
    with pytest.raises(ValueError, match="labels are in 0 to 7: the model has classes 0 to 1"):
        fgsm(model, images, masks.masked_fill(masks == 1, 7), eps=EPS)


def test_what_is_of_images_with_classes_is_refused(tmp_path):
    for severity in range(1, 6):
        (tmp_path / "fog" / str(severity)).mkdir(parents=True)
    for given in ({"baseline": "alexnet"}, {"imagenet_c": str(tmp_path), "corruptions": ["fog"]}):
        (name,) = given.keys() - {"corruptions"}
        with pytest.raises(ValueError, match=f"{name} .*leave it out for a SegmentationTask"):
            MaskKind().check(RobustnessEvaluation(attacks=[], **given).settings)
