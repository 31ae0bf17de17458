"""Folders of shifted and out-of-distribution images."""

import pytest
import torch
from PIL import Image
from timm.data import create_transform

from lightning_tasks.callbacks import RobustnessEvaluation
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


def transforms_of(path):
    transform = create_transform((3, 12, 12), normalize=False)
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
