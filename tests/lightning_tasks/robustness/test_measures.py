"""Out-of-distribution metrics, folders of classes, and the word swap, against hand-made cases."""

import math

import pytest
import torch
from PIL import Image

from lightning_tasks.robustness.class_folders import (
    class_subset,
    files_digest,
    folder_images,
    imagenet_wnids,
    read_wnids,
)
from lightning_tasks.robustness.scores import anomaly_scores, detection_metrics
from lightning_tasks.robustness.text import swap_words
from tests.rows import each_row

# -- out of distribution -----------------------------------------------------------------------------------------------


def test_perfect_and_reversed_detection():
    low, high = torch.linspace(0, 0.4, 50), torch.linspace(0.6, 1, 50)
    assert detection_metrics(low, high) == pytest.approx({"auroc": 1, "aupr": 1, "fpr95": 0})
    reversed_ = detection_metrics(high, low)
    assert (reversed_["auroc"], reversed_["fpr95"]) == pytest.approx((0, 1))


def test_outside_is_the_positive_class():
    inside, outside = torch.tensor([0.1, 0.2, 0.3, 0.7]), torch.tensor([0.6, 0.8])
    found = detection_metrics(inside, outside)
    assert found["auroc"] == pytest.approx(7 / 8)  # pairs in order
    assert found["aupr"] == pytest.approx((1 / 1 + 2 / 3) / 2)  # precision at each outside image
    assert found["fpr95"] == pytest.approx(1 / 4)
    assert detection_metrics(torch.full((30,), 0.5), torch.full((10,), 0.5))["aupr"] == pytest.approx(1 / 4)  # chance


def test_scores_are_one_minus_the_highest_probability_and_keep_sure_ones_apart():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 60.0, 0.0], [0.0, 0.0, 70.0]])
    scores = anomaly_scores(logits)
    assert scores[0] == pytest.approx(1 - logits[0].softmax(0).max().item())
    assert scores[1] > scores[2] > 0


def test_empty_sides_and_scores_out_of_range_are_named():
    with pytest.raises(ValueError, match="0 images inside and 2 outside"):
        detection_metrics(torch.tensor([]), torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match=r"scores are in \[0, 3\]"):
        detection_metrics(torch.tensor([0.0]), torch.tensor([3.0]))


# -- folders of classes ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "imagenet-a"
    for index, name in enumerate(("n01498041", "n01531178")):
        (root / name).mkdir(parents=True)
        for count in range(index + 1):
            Image.new("RGB", (40, 30), (255 * index, 0, 0)).save(root / name / f"{count}.png")
    return root


def test_folders_name_classes_of_imagenet(folder):
    wnids = imagenet_wnids()
    assert len(set(wnids)) == 1000
    subset = class_subset(folder, wnids)
    assert subset == [6, 11]  # stingray and goldfinch
    assert [wnids[index] for index in subset] == ["n01498041", "n01531178"]


def test_folders_that_name_no_class_are_an_error(folder, tmp_path):
    with pytest.raises(ValueError, match="1 folders that name no class of the model's 1, 'n01531178' first"):
        class_subset(folder, ["n01498041"])
    for nothing in (tmp_path / "nothing", folder / "n01498041"):
        with pytest.raises(ValueError, match="must be a folder with one folder of images per class"):
            class_subset(nothing, imagenet_wnids())


def test_images_of_a_folder(folder):
    (folder / "n01498041" / "more").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "n01498041" / "more" / "0.png")
    images = folder_images(folder, (16, 16))
    assert [images[index][1] for index in range(len(images))] == [0, 0, 1, 1]
    assert torch.equal(images[2][0], torch.tensor([255, 0, 0]).view(3, 1, 1).expand(3, 16, 16))  # not normalized
    assert folder_images(folder, (16, 12), channels=1)[0][0].shape == (1, 16, 12)


def test_the_digest_of_a_folder_changes_with_its_files(folder):
    def digest():
        return files_digest(folder_images(folder, (16, 16)).images, folder)

    before = digest()
    assert before == digest()
    Image.new("RGB", (9, 9)).save(folder / "n01498041" / "more.png")
    more = digest()
    assert more != before
    path = folder / "n01498041" / "more.png"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert digest() not in (before, more)
    path.rename(folder / "n01531178" / "more.png")
    assert digest() not in (before, more)


def test_wnids_from_a_file(tmp_path):
    path = tmp_path / "classes.tsv"
    path.write_text("0\tn01498041\tstingray\n1\tn01531178\tgoldfinch\n")
    assert read_wnids(path) == ["n01498041", "n01531178"]
    path.write_text("cat\ndog\n\n")
    assert read_wnids(path) == ["cat", "dog"]
    for bad in ("", "cat\ncat\n"):
        path.write_text(bad)
        with pytest.raises(ValueError, match="one class name a line, none twice"):
            read_wnids(path)


def test_the_wnids_of_the_shared_sample_are_timm_s(data_folder):
    path = data_folder / "imagenet_sample_classes.tsv"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    wnids = imagenet_wnids()
    listed = {int(row[0]): row[1] for row in rows if row[0].isdigit()}
    assert len(listed) == 1000
    assert all(wnids[index] == wnid for index, wnid in listed.items())
    assert class_subset(data_folder / "imagenet_sample", wnids) == list(range(1000))


# -- word swap ---------------------------------------------------------------------------------------------------------


def windows(count=50, tokens=20):
    """A stream of ids 1 to 9 cut into windows, the last five targets missing; 1 ends a line."""
    stream = torch.randint(1, 10, (count * tokens,), generator=torch.Generator().manual_seed(2))
    inputs = torch.cat([torch.tensor([1]), stream[:-1]]).view(count, tokens)
    targets = stream.clone()
    targets[-5:] = -100
    return inputs, targets.view(count, tokens)


def test_a_share_of_the_words_is_replaced_as_input_and_as_target():
    inputs, targets = windows()
    new_inputs, new_targets, swapped = swap_words(inputs, targets, share=0.3, seed=4)
    words = (targets != 1) & (targets != -100)
    assert swapped.sum() / words.sum() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(new_targets[swapped], torch.zeros_like(new_targets[swapped]))
    assert torch.equal(new_targets[~swapped], targets[~swapped])
    assert not swapped[~words].any()
    # the same text in both, across the borders of windows too
    assert torch.equal(new_inputs.flatten()[1:][:-4], new_targets.flatten()[:-1][:-4])
    assert new_inputs[0, 0] == 1


def test_the_seed_decides_and_the_share_has_its_limits():
    inputs, targets = windows()
    first, again, other = (swap_words(inputs, targets, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(swap_words(inputs, targets, share=0)[0], inputs)
    everything = swap_words(inputs, targets, share=1, token=7, keep=())
    assert (everything[1][targets != -100] == 7).all()
    assert everything[0].flatten()[1:].eq(7).all()


def test_special_tokens_are_no_words():
    inputs, targets = windows(count=400)
    everything = swap_words(inputs, targets, share=1, token=7, keep=(1, 2))
    special = torch.isin(targets, torch.tensor([7, 1, 2, -100]))
    assert torch.equal(everything[2], ~special)
    assert torch.equal(everything[1][special], targets[special])
    changed = swap_words(inputs, targets, share=0.3, token=7)[1] != targets
    words = ~torch.isin(targets, torch.tensor([7, 1, -100]))
    assert changed.sum() / words.sum() == pytest.approx(0.3, abs=0.02)


def test_random_state_and_text_are_left_alone():
    inputs, targets = windows()
    copies, state = (inputs.clone(), targets.clone()), torch.get_rng_state()
    swap_words(inputs, targets, share=0.5)
    assert torch.equal(inputs, copies[0])
    assert torch.equal(targets, copies[1])
    assert torch.equal(torch.get_rng_state(), state)


@each_row("share", [2.5, -0.1, math.nan, "2.5%", True])
def test_a_share_outside_of_0_to_1_is_an_error(share):
    with pytest.raises(ValueError, match=r"share is .*2\.5% is 0\.025"):
        swap_words(*windows(), share=share)


def test_other_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"must both be \[N, T\]"):
        swap_words(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
