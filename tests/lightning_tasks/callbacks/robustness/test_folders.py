"""Folders of shifted and out-of-distribution images."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.runs.robustness import CORRUPTIONS
from tests.lightning_tasks.callbacks.robustness.evaluations import evaluate
from tests.lightning_tasks.robustness.modules import TinyImages


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
    with pytest.raises(ValueError, match=r"ood 'O': no folder .*nowhere"):
        RobustnessEvaluation(ood={"O": str(tmp_path / "nowhere")})


def test_images_of_a_folder_that_cannot_be_read_are_left_out_and_counted(folders, tmp_path, module):
    whole = (folders / "shifted" / "n01" / "1.png").read_bytes()
    (folders / "shifted" / "n01" / "1.png").write_bytes(whole[: len(whole) // 2])
    (folders / "outside" / "y" / "0.png").write_bytes(b"")
    options = {"shifts": {"A": str(folders / "shifted")}, "ood": {"far": str(folders / "outside")}, "batch_size": 1}
    with (
        pytest.warns(
            UserWarning, match=r"1 of 6 images cannot be read.*n01/1\.png \(the first: OSError: image file is"
        ),
        pytest.warns(
            UserWarning,
            match=r"1 of 6 images cannot be read.*y/0\.png \(the first: UnidentifiedImageError: cannot .* file '/",
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
    assert next(row.value for row in rows if row.name == "A") == right  # labels stayed beside their images


def transforms_of(path, **others):
    """As timm's configuration of vit_tiny_patch16_224 asks."""
    asked = {"interpolation": "bicubic", "crop_pct": 0.9, **others}
    transform = create_transform((3, 12, 12), normalize=False, **asked)
    return transform(Image.open(path).convert("RGB")).float() / 255


def test_a_folder_of_unreadable_images_is_an_error_before_anything_is_measured(folders, tmp_path, module, counted):
    calls, _ = counted
    for path in (folders / "outside").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 6 images can be read, e\.g\. .*outside/x/0\.png"):
        evaluate(tmp_path, module, ood={"far": str(folders / "outside")})
    assert calls == []


def test_another_number_of_class_names_than_classes_is_an_error(folders, tmp_path, module):
    (folders / "wnids.txt").write_text("n01\nn04\n")
    with pytest.raises(ValueError, match="the model has 5 classes, and 2 wnids were given"):
        evaluate(tmp_path, module, shifts={"A": str(folders / "shifted")}, wnids=str(folders / "wnids.txt"))


class AskedImages(TinyImages):
    eval_transform = {"crop_pct": 0.5}  # noqa: RUF012


@pytest.mark.parametrize(("data", "asked"), [(TinyImages, {}), (AskedImages, {"crop_pct": 0.5})])
def test_images_are_resized_as_the_evaluation_of_the_model_asks(folders, tmp_path, module, monkeypatch, data, asked):
    seen = []
    monkeypatch.setattr(type(module), "forward", lambda self, images: seen.append(images) or self.model(images))
    options = {"attacks": [], "wnids": str(folders / "wnids.txt"), "batch_size": 6}
    evaluate(tmp_path, module, data(count=5), shifts={"A": str(folders / "shifted")}, **options)
    paths = [folders / "shifted" / name / f"{place}.png" for name in ("n01", "n04") for place in range(3)]
    assert torch.equal(seen[-1], torch.stack([transforms_of(path, **asked) for path in paths]))


# -- the released ImageNet-C -------------------------------------------------------------------------------------------


@pytest.fixture
def imagenet_c(tmp_path):
    """Two corruptions at five severities, one of them below the name of its archive; images of the model's size."""
    generator = torch.Generator().manual_seed(0)
    for place in ("fog", "noise/gaussian_noise"):
        for severity in range(1, 6):
            for name in ("n01", "n04"):
                folder = tmp_path / "imagenet-c" / place / str(severity) / name
                folder.mkdir(parents=True)
                for count in range(2):
                    pixels = torch.randint(0, 256, (12, 12, 3), generator=generator, dtype=torch.uint8).numpy()
                    Image.fromarray(pixels).save(folder / f"{count}.png")
    (tmp_path / "wnids.txt").write_text("n00\nn01\nn02\nn03\nn04\n")
    return tmp_path / "imagenet-c"


def test_the_released_images_are_read_as_they_come(imagenet_c, tmp_path, module, monkeypatch):
    monkeypatch.setenv("ATTNSWAP_DATA", str(tmp_path))
    asked = {"attacks": [], "corruptions": ["fog", "gaussian_noise"], "wnids": str(tmp_path / "wnids.txt")}
    rows = evaluate(tmp_path, module, imagenet_c="imagenet-c", baseline="alexnet", num_images=None, **asked)
    found = {(row.name, row.setting, row.metric): row for row in rows}
    paths = sorted((imagenet_c / "noise" / "gaussian_noise" / "3").rglob("*.png"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255 for path in paths])
    right = (module.eval()(pixels).argmax(1) == torch.tensor([1, 1, 4, 4])).double().mean().item()
    row = found["gaussian_noise", "3", "accuracy"]
    assert (row.value, row.samples, row.note) == (right, 4, "released images of 2 classes")
    fog, noise = (
        1 - sum(found[name, str(severity), "accuracy"].value for severity in range(1, 6)) / 5
        for name in ("fog", "gaussian_noise")
    )
    mce = found["", "alexnet", "mCE"]
    assert mce.value == pytest.approx((fog / 0.819324 + noise / 0.886428) / 2)
    assert (mce.note, mce.label) == ("against AlexNet's published errors", "robustness/mean_corruption/alexnet/mCE")
    clean = 1 - rows[0].value
    relative = ((fog - clean) / (0.819324 - 0.435) + (noise - clean) / (0.886428 - 0.435)) / 2
    assert found["", "alexnet", "relative mCE"].value == pytest.approx(relative)
    few = evaluate(tmp_path / "few", module, imagenet_c=str(imagenet_c), num_images=3, severities=[2], **asked)
    assert {row.samples for row in few if row.test == "corruption"} == {3}


def test_both_baselines_stand_side_by_side(imagenet_c, tmp_path, module):
    asked = {"attacks": [], "imagenet_c": str(imagenet_c), "wnids": str(tmp_path / "wnids.txt"), "corruptions": ["fog"]}
    evaluate(tmp_path / "a", module, **asked)
    own = str(tmp_path / "a" / "demo" / "version_0")
    rows = evaluate(tmp_path / "b", module, baseline=["alexnet", own], **asked)
    found = {row.setting: row.value for row in rows if row.metric == "mCE"}
    mean = next(row.value for row in rows if row.test == "mean corruption" and row.metric == "accuracy")
    assert found == {"": pytest.approx(1), "alexnet": pytest.approx((1 - mean) / 0.819324)}


def test_what_the_released_images_lack_is_named(imagenet_c, tmp_path, module):
    def refused(**options):
        return RobustnessEvaluation(**{"corruptions": ["fog"], "imagenet_c": str(imagenet_c), **options})

    with pytest.raises(ValueError, match=r"imagenet_c: .* has no folder snow/1: give the released ImageNet-C"):
        refused(corruptions=["snow"])
    with pytest.raises(ValueError, match=r"imagenet_c: no folder .*nowhere"):
        refused(imagenet_c=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"means over severities 1 to 5 .*; severities are \[2, 3\]: give"):
        refused(severities=[2, 3], baseline="alexnet")
    with pytest.raises(ValueError, match=r"at most one run's table, and 'alexnet'"):
        refused(baseline=["alexnet", "alexnet"])
    with pytest.raises(ValueError, match="imagenet_c needs the class names of the model"):
        evaluate(tmp_path, module, attacks=[], corruptions=["fog"], imagenet_c=str(imagenet_c))


def test_the_published_errors_of_alexnet_are_those_of_the_fifteen():
    """Three of them, and the mean of all."""
    baseline = RobustnessEvaluation(baseline="alexnet").settings.baselines[0]
    means = {name: baseline.errors[name, 1] for name in CORRUPTIONS}
    assert sum(means.values()) / 15 == pytest.approx(0.788993, abs=1e-6)
    assert (means["brightness"], means["impulse_noise"], means["jpeg_compression"]) == (0.564592, 0.92264, 0.6065)
