"""Models of mmsegmentation as tasks: their own loss and prediction, swapped layers, scores, and what does not fit."""

import copy
import io
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmseg", reason="the extra [mmseg] is not installed")

from attnswap.datamodules import DigitScenesDataModule

from attention_modules import AttentionMechanism, RPCAttention, restore_attention
from attention_modules.hosts.layer_call import LayerCall
from lightning_tasks import SegmentationTask
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from lightning_tasks.models.mmcv_ops import MissingOps, provide_ops
from lightning_tasks.models.mmseg_builder import preprocessed
from lightning_tasks.models.mmseg_config import set_num_classes, shipped_configs
from lightning_tasks.training.segmentation_metrics import class_accuracy, class_iou, scores
from tests.attention_modules.hosts.test_mmseg import LargestMap
from tests.lightning_tasks.language_data import trainer
from tests.rows import each_row

SEGMENTER = "segmenter_vit-t_mask_8xb1-160k_ade20k-512x512"
SEGFORMER = "segformer_mit-b0_8xb2-160k_ade20k-512x512"
SETR = "setr_vit-l_naive_8xb2-160k_ade20k-512x512"
ENCNET = "encnet_r50-d8_4xb4-80k_ade20k-512x512"
UPERNET = "vit_vit-b16_mln_upernet_8xb2-80k_ade20k-512x512"
# SETR's backbone is ViT-L, UPerNet's ViT-B: 4 layers of 32 features in place of 24 of 1,024, and of 12 of 768.
BACKBONE = {
    "model.backbone.num_layers": 4,
    "model.backbone.out_indices": [0, 1, 2, 3],
    "model.backbone.embed_dims": 32,
    "model.backbone.num_heads": 2,
}
NARROW = {
    SETR: {
        **BACKBONE,
        "model.decode_head.in_channels": 32,
        **{f"model.auxiliary_head.{index}.in_channels": 32 for index in range(3)},
    },
    UPERNET: {
        **BACKBONE,
        "model.neck.in_channels": [32] * 4,
        "model.neck.out_channels": 32,
        "model.decode_head.in_channels": [32] * 4,
        "model.decode_head.channels": 32,
        "model.auxiliary_head.in_channels": 32,
    },
}
MODELS = {SEGMENTER: {}, SEGFORMER: {}, **NARROW}
LAYERS = {SEGMENTER: 14, SEGFORMER: 8, SETR: 4, UPERNET: 4}
SHALLOW = {"model.backbone.num_layers": 2, "model.decode_head.num_layers": 1}

pytestmark = [
    pytest.mark.filterwarnings("ignore:``build_loss`` would be deprecated"),
    pytest.mark.filterwarnings("ignore:Default ``avg_non_ignore`` is False"),
]


def task(name=SEGMENTER, crop_size=64, num_classes=5, cfg_options=None, **options):
    options_of_model = MODELS.get(name, {}) if cfg_options is None else cfg_options
    model = {"mmseg_config": name, "crop_size": crop_size, "cfg_options": options_of_model}
    return SegmentationTask(model=model, num_classes=num_classes, **options)


def built(*arguments, **options):
    torch.manual_seed(0)
    module = task(*arguments, **options)
    module.configure_model()
    return module.eval()


def batch(height=64, width=64, ignored=255):
    """What mmsegmentation's loader gives, and the same as ours."""
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    generator = torch.Generator().manual_seed(1)
    bgr = torch.randint(0, 256, (2, 3, height, width), generator=generator, dtype=torch.uint8)
    masks = torch.randint(0, 5, (2, height, width), generator=generator)
    masks[:, :9] = ignored
    size = {"ori_shape": (height, width), "img_shape": (height, width), "pad_shape": (height, width)}
    samples = [SegDataSample(metainfo=size, gt_sem_seg=PixelData(data=mask[None].clone())) for mask in masks]
    return {"inputs": list(bgr), "data_samples": samples}, bgr.flip(1).float() / 255, masks


# -- the model's own loss and prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_forward_loss_and_backward_are_the_model_s_own(name):
    module = built(name)
    theirs, images, masks = batch()
    network = module.model.train()
    torch.manual_seed(1)
    expected = network(**network.data_preprocessor(theirs, True), mode="loss")
    torch.manual_seed(1)
    called = []
    hook = network.register_forward_hook(lambda *_: called.append("hook"))
    found = network.losses(images, masks, 255)
    hook.remove()
    assert called == ["hook"]
    assert set(found) == {key for key in expected if "loss" in key}
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    torch.stack(list(found.values())).sum().backward()
    unused = [key for key, value in network.named_parameters() if value.grad is None]
    assert not [key for key in unused if "conv_seg" not in key and "cls_token" not in key], unused
    network.eval()
    theirs, images, _ = batch(80, 72)  # larger than the window, where there is one
    with torch.no_grad():
        results = network.test_step(theirs)
        logits = module(images)
    torch.testing.assert_close(logits, torch.stack([r.seg_logits.data for r in results]), rtol=1e-4, atol=1e-4)
    own = torch.cat([result.pred_sem_seg.data for result in results])
    assert (module.predict_masks(images) == own).float().mean() > 0.999  # 255 · (x / 255) is x but for rounding
    assert logits.shape == (2, 5, 80, 72)


@pytest.mark.parametrize("name", MODELS)
def test_softmax_for_softmax_changes_nothing(name):
    module = built(name)
    _, images, _ = batch(80, 72)
    with torch.no_grad():
        ours = module(images)
        assert len(restore_attention(module.model)) == LAYERS[name]
        torch.testing.assert_close(ours, module(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"mechanism": "rpc", "layers": [0]}])
def test_no_layer_of_a_task_makes_a_map(options):
    module = built(cfg_options=SHALLOW, **options)
    _, images, _ = batch()
    for size in (17, 21):  # 16 patches with the class token, and with the five classes in the decoder
        with LargestMap(size, size) as maps, torch.no_grad():
            module(images)
        assert maps.seen == 0
    restore_attention(module.model)
    with LargestMap(17, 17) as maps, torch.no_grad():
        module(images)
    assert maps.seen > 0


def test_another_label_is_ignored_as_the_model_s_own():
    module = built(cfg_options=SHALLOW)
    (_, images, masks), (_, _, others) = batch(), batch(ignored=7)
    network = module.model.eval()
    ours = network.losses(images, others, 7)
    torch.testing.assert_close(ours, network.losses(images, masks, 255))


def test_the_preprocessor_follows_the_model_to_another_device():
    module = built(cfg_options=SHALLOW).to("meta")
    images = torch.zeros(2, 3, 64, 64, device="meta")
    found = preprocessed(module.model, images, [], training=False)["inputs"]
    assert (found.device.type, found.dtype) == ("meta", torch.float32)


# -- swapped layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SEGMENTER, SETR, UPERNET])
def test_any_mechanism_trains(name):
    options = {"mechanism": "rpc", "options": {"iterations": 2}, "layers": [0, -1]}
    module = built(name, **options, other_attention="symmetric")
    kinds = [type(part) for part in module.model.modules() if isinstance(part, AttentionMechanism)]
    assert len(kinds) == LAYERS[name]
    assert [index for index, kind in enumerate(kinds) if kind is RPCAttention] == [0, LAYERS[name] - 1]
    _, images, masks = batch()
    torch.stack(list(module.model.losses(images, masks, 255).values())).sum().backward()
    assert module.model.backbone.layers[0].attn.attn.in_proj_weight.grad.abs().sum() > 0


def call_of(layer, module):
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        module(batch()[1])
    hook.remove()
    return LayerCall.of(layer, *seen[0])


def test_a_layer_s_call_is_a_function_of_all_its_input():
    module = built(cfg_options=SHALLOW)
    layer = module.model.backbone.layers[0].attn.attn
    call = call_of(layer, module)
    assert call.x.shape == (2, 17, 192)
    x = torch.randn(2, 17, 192)
    expected = layer(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)  # query, key and value
    torch.testing.assert_close(call(x), expected)


def test_a_layer_on_reduced_keys_has_no_call_of_its_input_alone():
    module = built(SEGFORMER)
    stages = module.model.backbone.layers
    with pytest.raises(ValueError, match=r"its key \(4, 2, 32\) is another tensor than its input \(256, 2, 32\)"):
        call_of(stages[0][1][0].attn.attn, module)
    assert call_of(stages[-1][1][0].attn.attn, module).x.shape == (2, 4, 256)


def test_segformer_takes_symmetric_attention_in_its_last_stage_alone():
    with pytest.raises(ValueError, match=r"backbone\.layers\.0\.1\.0\.attn\.attn': SymmetricAttention needs one query"):
        built(SEGFORMER, mechanism="symmetric")
    module = built(SEGFORMER, mechanism="symmetric", layers=[-2, -1])
    _, images, masks = batch()
    torch.stack(list(module.model.losses(images, masks, 255).values())).sum().backward()


# -- scores and runs ---------------------------------------------------------------------------------------------------


def test_scores_are_those_of_iou_metric():
    provide_ops()
    from mmseg.evaluation import IoUMetric

    from lightning_tasks.training.segmentation_metrics import SegmentationScores

    generator = torch.Generator().manual_seed(2)
    masks = torch.randint(0, 4, (3, 20, 30), generator=generator)  # class 4 is never there, 5 neither there nor found
    found = torch.where(torch.rand(masks.shape, generator=generator) < 0.5, masks, (masks + 1) % 5)
    masks[:, :4] = 255
    ours, theirs = SegmentationScores(6, 255), IoUMetric(iou_metrics=["mIoU"])
    theirs.dataset_meta = {"classes": list("abcdef")}
    for mask, prediction in zip(masks, found, strict=True):
        ours.update(prediction[None], mask[None])
        theirs.process({}, [{"pred_sem_seg": {"data": prediction[None]}, "gt_sem_seg": {"data": mask[None]}}])
    areas = [sum(part) for part in zip(*theirs.results, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = IoUMetric.total_area_to_metrics(*areas, ["mIoU"])
    confusion = ours.compute()
    torch.testing.assert_close(
        class_iou(confusion), torch.as_tensor(expected["IoU"]).double(), equal_nan=True, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        class_accuracy(confusion), torch.as_tensor(expected["Acc"]).double(), equal_nan=True, rtol=1e-6, atol=0
    )
    rounded = theirs.evaluate(len(masks))
    names = {"miou": "mIoU", "mean_accuracy": "mAcc", "overall_accuracy": "aAcc"}
    assert scores(confusion) == pytest.approx({ours: rounded[name] / 100 for ours, name in names.items()}, abs=5.1e-5)


def test_a_run_and_its_checkpoint(tmp_path):
    sizes = {"num_train": 4, "num_val": 2, "num_test": 2, "batch_size": 2, "img_size": 40, "crop_size": 32}
    module = task(crop_size=32, num_classes=None, cfg_options=SHALLOW, mechanism="rpc", layers=[0])
    run = trainer(tmp_path)
    run.fit(module, DigitScenesDataModule(**sizes))
    assert run.callback_metrics["val/loss"] > 0
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = SegmentationTask.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    images = torch.rand(2, 3, 40, 40)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(images), module.eval()(images))
    other = task(crop_size=48, num_classes=None, cfg_options=SHALLOW)
    with pytest.raises(ValueError, match="crop_size=48, or the model crop_size=32"):
        trainer(tmp_path).fit(other, DigitScenesDataModule(**sizes))


@pytest.mark.parametrize("name", [SEGMENTER, SEGFORMER, SETR])
def test_a_checkpoint_of_other_classes_gives_all_but_what_has_a_part_for_each(tmp_path, name):
    """In the layout of OpenMMLab's files: weights by mmsegmentation's own names, beside `meta`."""
    before, now = (built(name, num_classes=classes).model.state_dict() for classes in (7, 5))
    torch.save(
        {"meta": {"CLASSES": ["a"]}, "state_dict": {key: value + 1 for key, value in before.items()}}, tmp_path / "a"
    )
    module = task(name, num_classes=5)
    InitFromCheckpoint(str(tmp_path / "a")).setup(trainer(tmp_path), module, "fit")
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="is not that of this model"):
        module.configure_model()
    other = {key for key, value in now.items() if value.shape != before[key].shape}
    assert other
    for key, value in module.model.state_dict().items():
        assert torch.equal(value, now[key] if key in other else before[key] + 1), key


def test_parts_for_each_class_go_by_many_names():
    """`conv_seg`, and EncNet's `se_layer`; all of them, and no other."""
    five, nine = (built(ENCNET, num_classes=classes, crop_size=None, cfg_options={}).model for classes in (5, 9))
    shapes = {name: parameter.shape for name, parameter in nine.named_parameters()}
    other = {name for name, parameter in five.named_parameters() if parameter.shape != shapes[name]}
    assert any("se_layer" in name for name in other)
    assert set(five.head_names()) == other


def test_every_head_and_the_positions_are_built_for_the_task():
    config = task(SETR, crop_size=64)._builder.config
    assert tuple(config.backbone.img_size) == (64, 64)
    set_num_classes(config, 7)
    heads = [config.decode_head, *config.auxiliary_head]
    assert [head.num_classes for head in heads] == [7] * len(heads)
    assert len(heads) > 1


def test_embeddings_of_positions_and_classes_have_no_weight_decay():
    module = built()
    module.hparams["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.3}}
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    groups = {
        group["weight_decay"]: [names[id(each)] for each in group["params"]] for group in module.optimizer_groups()
    }
    assert {"backbone.cls_token", "backbone.pos_embed", "decode_head.cls_emb"} <= set(groups[0.0])
    assert all(name.endswith("weight") for name in groups[0.3])


def test_a_batch_of_damaged_images_alone_trains_nothing():
    module = built()
    module.log = lambda *args, **kwargs: None
    module.training_step((torch.zeros(0, 3, 64, 64), torch.zeros(0, 64, 64, dtype=torch.int64)), 0).backward()
    assert not any(parameter.grad.any() for parameter in module.parameters() if parameter.requires_grad)


def test_the_configuration_is_changed_where_it_was_asked():
    plain, changed = task(crop_size=None)._builder, task(stride=24)._builder
    assert (plain.crop_size, changed.crop_size) == (512, 64)
    assert tuple(plain.config.test_cfg.stride) == (480, 480)
    assert tuple(task()._builder.config.test_cfg.stride) == (60, 60)
    assert tuple(changed.config.test_cfg.stride) == (24, 24)
    assert plain.config.pretrained is None
    given = SegmentationTask(model={"mmseg_config": SEGFORMER, "pretrained": True})._builder.config
    assert given.backbone.init_cfg.type == "Pretrained"
    assert task(SEGFORMER)._builder.config.backbone.init_cfg is None


# -- what does not fit -------------------------------------------------------------------------------------------------


@each_row(
    ("options", "text"),
    [
        ({"name": "segmenter_vit-t_mask_8xb1-160k_ade20k"}, f"the nearest are {SEGMENTER}"),
        ({"name": "segmenter_vit-q"}, "the nearest are segmenter_vit-"),
        ({"name": "zzzzzz"}, "its folder .mim/configs has them"),
        ({"crop_size": 0}, "crop_size must be an integer of at least 1, got 0"),
        ({"crop_size": "64"}, "crop_size must be an integer of at least 1, got '64'"),
        ({"name": None}, "mmseg_config is None: give the name"),
        ({"name": "san-vit-b16_coco-stuff164k-640x640"}, "has no `backbone`"),
        ({"stride": 65}, "the stride 65 must be at least 1, and at most the window"),
        ({"name": SETR, "stride": 0}, "the stride 0 must be at least 1"),
        ({"name": SEGFORMER, "stride": 8}, "stride=8: mmseg_config=segformer.* predicts whole images"),
        ({"flip": True}, "flip=True: mmsegmentation's own prediction knows none"),
        ({"windows_at_once": 2}, "windows_at_once=2"),
        ({"cfg_options": {"model.test_cfg.strides": [3, 3]}}, r"model\.test_cfg\.strides; .* crop_size, mode, stride"),
        ({"cfg_options": {"backbone.num_layers": 6}}, "cfg_options has 'backbone.num_layers', .* begin with model"),
        ({"cfg_options": {"model.auxiliary_head.3.in_channels": 2}, "name": SETR}, "do not fit setr_vit-l_naive"),
    ],
)
def test_bad_descriptions(options, text):
    with pytest.raises(ValueError, match=text):
        task(**options)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "own.py").write_text("model = dict(")
    with pytest.raises(ValueError, match=r"mmseg_config=.*own\.py cannot be read: SyntaxError"):
        task(str(tmp_path / "own.py"))


def test_a_file_of_one_s_own(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"mmseg_config=nothing\.py: no such file"):
        task("nothing.py")
    own = tmp_path / "own.py"
    own.write_text("crop_size = 3\n")
    with pytest.raises(ValueError, match=r"own\.py: it has no `model`"):
        task(str(own))
    own.write_text(f"_base_ = [{str(shipped_configs()[SEGMENTER])!r}]\nmodel = dict(backbone=dict(num_layers=1))\n")
    assert len(built(str(own)).model.backbone.layers) == 1


def test_weights_that_cannot_be_had_are_named(tmp_path):
    options = {**SHALLOW, "model.pretrained": str(tmp_path / "nothing.pth")}
    module = SegmentationTask(
        model={"mmseg_config": SEGMENTER, "cfg_options": options, "pretrained": True}, num_classes=5
    )
    with pytest.raises(ValueError, match=r"names cannot be had \(.*nothing\.pth"):
        module.configure_model()
    torch.save({"state_dict": {"model.pos_embed": torch.zeros(1)}}, tmp_path / "a.ckpt")
    data = DigitScenesDataModule(num_train=2, num_val=2, num_test=2, batch_size=2, img_size=40, crop_size=32)
    other = task(crop_size=32, num_classes=None, cfg_options=SHALLOW, backbone_checkpoint=str(tmp_path / "a.ckpt"))
    with pytest.raises(ValueError, match="goes into a timm backbone, and this one is a VisionTransformer"):
        trainer(tmp_path).fit(other, data)


def test_code_in_the_place_of_weights_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": {}, "meta": Path()}, path)
    options = {**SHALLOW, "model.pretrained": str(path)}
    module = SegmentationTask({"mmseg_config": SEGMENTER, "cfg_options": options, "pretrained": True}, num_classes=5)
    with pytest.raises(
        ValueError,
        match=r"cannot be had \(UnpicklingError: it is cut short, is of another kind, or holds more than ten",
    ):
        module.configure_model()


@each_row("content", [b"", b"<html>no such page</html>"])
def test_weights_that_cannot_be_read_are_named(tmp_path, content):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    options = {**SHALLOW, "model.pretrained": str(path)}
    module = SegmentationTask({"mmseg_config": SEGMENTER, "cfg_options": options, "pretrained": True}, num_classes=5)
    with pytest.raises(ValueError, match=rf"the weights that mmseg_config={SEGMENTER} names cannot be had"):
        module.configure_model()


def test_what_mmsegmentation_cannot_build_is_named():
    with pytest.raises(ValueError, match="num_classes=300: the heads of mmsegmentation leave out the label 255"):
        built(num_classes=300, ignore_index=-1)
    with pytest.raises(ValueError, match=rf"mmseg_config={SEGMENTER} could not be built: .*depth"):
        built(cfg_options={"model.backbone.depth": 1})
    with pytest.raises(ValueError, match=r"has 1 channels for 2 classes"):
        built(
            SEGFORMER,
            num_classes=2,
            cfg_options={"model.decode_head.out_channels": 1, "model.decode_head.threshold": 0.3},
        )


# -- operators that are not there --------------------------------------------------------------------------------------


def test_a_missing_operator_names_itself_and_who_wants_it():
    provide_ops()
    from mmcv.ops import CrissCrossAttention, carafe

    if not isinstance(sys.modules["mmcv._ext"], MissingOps):
        pytest.skip("mmcv has its operators here")

    class Neck(torch.nn.Module):
        def forward(self, x):
            return carafe(x, torch.rand(1, 9, 4, 4), 3, 1, 2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.neck = Neck()

        def forward(self, x):
            return self.neck(x)

    assert CrissCrossAttention
    with pytest.raises(NotImplementedError, match=r"'carafe_forward' is not here .* and Neck in Model wants it"):
        Model()(torch.rand(1, 4, 2, 2))
    with pytest.raises(NotImplementedError, match="no module of a model wants it"):
        MissingOps("mmcv._ext").nms()


def test_the_stand_in_leaves_operators_that_could_be_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "mmcv._ext", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    provide_ops()
    assert "mmcv._ext" not in sys.modules


def test_the_stand_in_leaves_what_is_there(monkeypatch):
    there = object()
    monkeypatch.setitem(sys.modules, "mmcv._ext", there)
    provide_ops()
    assert sys.modules["mmcv._ext"] is there


def test_the_network_is_copied_and_pickled_whole():
    module = built(cfg_options=SHALLOW)
    _, images, _ = batch()
    file = io.BytesIO()
    torch.save(module.model, file)
    file.seek(0)
    with torch.no_grad():
        expected = next(module.model.bands(images))
        for other in (copy.deepcopy(module.model), torch.load(file, weights_only=False)):
            assert type(other) is type(module.model)
            assert torch.equal(next(other.eval().bands(images)), expected)
    assert type(module.model).__name__ == "EncoderDecoder"
