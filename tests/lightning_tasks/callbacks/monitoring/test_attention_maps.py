"""Figures of attention: what is in them, where they go, and that the run is as without them."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import DigitsDataModule
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

import attnswap
from attention_modules import AttentionMechanism
from attention_modules.analysis import attention_rollout
from attention_modules.hosts import attention_layers
from lightning_tasks import ImageClassificationTask
from lightning_tasks.callbacks import AttentionMapLogger, AttentionMonitor, SwapAttention
from lightning_tasks.figures.attention import draw_over_images, draw_token_maps, no_rasters, patch_grid
from lightning_tasks.models.segmenter import MaskTransformer
from tests.lightning_tasks.callbacks.modules import (
    DIM,
    HEADS,
    PROMPTS,
    TOKENS,
    InTwoCalls,
    TinyLM,
    batches,
    decoder,
    fit,
    shown,
    weights_of,
)
from tests.lightning_tasks.explore.pages import Translator, data_of, vit
from tests.lightning_tasks.language_data import trainer
from tests.rows import each_row

TINY = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
TARGET = "lightning_tasks.callbacks.attention_maps"


class WandbLogger(CSVLogger):
    """Takes images as W&B's logger does; loggers are known by the names of their classes."""

    def __init__(self, folder):
        super().__init__(folder)
        self.images = []

    def log_image(self, key, images, step):
        self.images.append(key)


@pytest.fixture
def drawn(monkeypatch):
    """The arguments of each figure."""
    import lightning_tasks.callbacks.attention_maps as module

    calls = []

    def recording(draw, *args):
        calls.append(args)
        return draw(*args)

    for name in ("draw_over_images", "draw_token_maps"):
        monkeypatch.setattr(module, name, partial(recording, getattr(module, name)))
    return calls


def first_layer_map(module, tokens):
    """Softmax of the causal logits of the first layer, from its weights, ``[B, H, N, N]``."""
    with torch.no_grad():
        attention = module.net["encoder"].layers[0].self_attn
        packed = module.net["embed"](tokens) @ attention.in_proj_weight.T + attention.in_proj_bias
        q, k, _ = (part.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2) for part in packed.chunk(3, -1))
        logits = q @ k.mT * (DIM // HEADS) ** -0.5
        return logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.figures
def test_token_maps_of_text_are_those_of_the_layer(tmp_path, drawn):
    logger = WandbLogger(tmp_path)
    callback = AttentionMapLogger(every_n_epochs=2, heads=[1], queries=[0, -1], max_tokens=4, rollout=True)
    fit(TinyLM(lr=0.0), [callback], batches(2), batches(2), logger=logger, max_epochs=3)
    assert logger.images == ["attention_maps/layer_00", "attention_maps/layer_01", "attention_maps/rollout"]
    for name in ("layer_00", "layer_01", "rollout"):
        with Image.open(f"{logger.log_dir}/attention_maps_{name}_step_000003.png") as figure:
            assert min(figure.size) > 50
    tokens = next(iter(batches(2)))[0]
    maps, rows, columns, title = drawn[0]
    torch.testing.assert_close(maps, first_layer_map(TinyLM(), tokens)[:, [1]][:, :, [0, -1], :4])
    assert (rows, columns) == ([0, TOKENS - 1], ["head 1"])
    assert title == "step 3, net.encoder.layers.0.self_attn: the map of SoftmaxAttention"


def test_training_is_untouched_and_nothing_stays_hooked():
    watched, plain = TinyLM(), TinyLM()
    fit(watched, [SwapAttention("softmax"), AttentionMapLogger(rollout=True)], val_loader=batches(2))
    fit(plain, [SwapAttention("softmax")], val_loader=batches(2))
    assert torch.equal(weights_of(watched), weights_of(plain))
    found = [module for module in watched.modules() if isinstance(module, AttentionMechanism)]
    assert found
    assert not any(module._forward_pre_hooks for module in found)


def test_an_empty_first_batch_has_no_maps_and_is_said(drawn):
    whole = next(iter(batches(1)))
    loader = DataLoader([[part[:0] for part in whole], whole], batch_size=None)
    with pytest.warns(UserWarning, match="AttentionMapLogger: no layer got a sample in the first batch"):
        fit(TinyLM(), [AttentionMapLogger(rollout=True)], val_loader=loader)
    assert not drawn


def test_only_the_first_batch_is_hooked():
    hooks = []

    class Records(TinyLM):
        def validation_step(self, batch, batch_idx):
            found = [module for module in self.modules() if isinstance(module, AttentionMechanism)]
            hooks.append([len(module._forward_pre_hooks) for module in found])
            return super().validation_step(batch, batch_idx)

    fit(Records(), [AttentionMapLogger(every_n_epochs=2, layers=[1])], val_loader=batches(2), max_epochs=2)
    # The sanity check, which tries it, the first epoch, the second.
    assert [sum(one) for one in hooks] == [1, 0, 0, 0, 1, 0]


def test_a_file_per_step(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    fit(TinyLM(), [AttentionMapLogger(layers=[1])], batches(2), batches(1), logger=logger, max_epochs=2)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        f"attention_maps_layer_01_step_00000{step}.png" for step in (1, 3)
    ]


def test_each_map_has_its_color_bar():
    maps = torch.rand(2, 3, 4, 5)
    bars = [
        axes for axes in draw_token_maps(maps, range(4), ["a", "b", "c"], "").axes if axes.get_label() == "<colorbar>"
    ]
    assert [axes.get_ylim()[1] for axes in bars] == pytest.approx([float(one.max()) for one in maps.flatten(0, 1)])
    maps[0, 0] = torch.nan  # white
    assert len(draw_token_maps(maps, range(4), ["a", "b", "c"], "").axes) == 6 + 5
    images = draw_over_images(torch.rand(1, 3, 8, 8), torch.rand(1, 1, 2, 4, 4), ["mean"], ["a", "b"], "")
    assert len(images.axes) == 3 + 2


@pytest.mark.parametrize(("queries", "precision"), [(None, "32-true"), ([0, 3], "32-true"), (None, "bf16-true")])
def test_maps_over_images(tmp_path, drawn, queries, precision):
    logger = CSVLogger(tmp_path)
    callbacks = [AttentionMapLogger(num_samples=3, queries=queries, rollout=True), AttentionMonitor(stages=["test"])]
    options = {"logger": logger, "callbacks": callbacks, "max_epochs": 1, "limit_train_batches": 1}
    run = trainer(tmp_path, precision=precision, **options)
    data = DigitsDataModule(batch_size=8)
    run.fit(ImageClassificationTask(model_options=TINY), data)
    assert len(drawn) == 3
    images, maps, rows, *_ = drawn[0]
    torch.testing.assert_close(images, next(iter(data.val_dataloader()))[0][:3], atol=0.01, rtol=0.01)
    assert maps.dtype == torch.float32
    queries_drawn = 1 if queries is None else 2
    assert maps.shape == (3, queries_drawn, 1, 4, 4)
    assert rows == (["mean of tokens"] if queries is None else ["token 0", "token 3"])
    assert ((maps.sum((-2, -1)) < 1) & (maps.sum((-2, -1)) > 0.5)).all()  # without the class token
    assert (tmp_path / "lightning_logs/version_0/attention_maps_rollout_step_000000.png").is_file()


def test_rollout_is_that_of_the_layers_maps(drawn, tmp_path, monkeypatch):
    seen = []

    def recording(maps):
        seen.append(list(maps))
        return attention_rollout(maps)

    monkeypatch.setattr(f"{TARGET}.attention_rollout", recording)
    fit(TinyLM(lr=0.0), [AttentionMapLogger(rollout=True)], None, batches(1), logger=CSVLogger(tmp_path))
    first, second = seen[0]
    expected = first_layer_map(TinyLM(), next(iter(batches(1)))[0]).mean(1)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(drawn[2][0][:, 0], attention_rollout([first, second]))


def test_class_tokens_behind_the_patches_make_no_grid():
    """As in the decoder of a Segmenter: a grid would be shifted by the number of classes."""
    model = nn.ModuleDict({"decode": MaskTransformer(8, 3, 8, 1, 2), "encode": nn.ModuleDict({"attn": nn.Identity()})})
    assert no_rasters(model, ["decode.blocks.0.attn", "encode.attn"]) == {"decode.blocks.0.attn"}
    page = attnswap.explore(Decoded(), torch.rand(1, 3, 16, 16))
    assert data_of(page.html)["grids"] == {"16": [0, 4, 4]}


def hiera():
    import timm

    return timm.create_model("hiera_tiny_224", embed_dim=12, num_heads=1, stages=(1, 1, 1, 1))


def hugging_face(kind, **parts):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = {name: {**sizes, **options} for name, options in parts.items()} or sizes
    return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**own))


@pytest.mark.parametrize(
    ("build", "others"),
    [
        (vit, set()),
        (hiera, {"blocks.0.attn"}),
        (lambda: hugging_face("ViTMAE"), {"layers.0.attention", "layers.1.attention"}),
        (lambda: hugging_face("ViT"), set()),
        (
            lambda: hugging_face("Siglip", text_config={"vocab_size": 9}, vision_config={}),
            {f"text_model.encoder.layers.{layer}.self_attn" for layer in range(2)},
        ),
        (lambda: Translator().whole, {"decoder.layers.0.self_attn"}),
    ],
)
def test_tokens_that_are_no_raster_of_the_image_make_no_grid(build, others):
    """An order of their own, words, and what asks the image."""
    model = build()
    assert no_rasters(model, [layer.name for layer in attention_layers(model)]) == others


@pytest.mark.parametrize(
    ("name", "is_words"),
    [("abspos", False), ("token_type", False), ("y_embed", False), ("words", True), ("region_words", True)],
)
def test_an_embedding_of_words_is_told_by_its_name(name, is_words):
    model = nn.ModuleDict({"patch": nn.Linear(8, 8), name: nn.Embedding(3, 8)})
    model["attn"] = nn.MultiheadAttention(8, 2, batch_first=True)
    assert no_rasters(model, ["attn"]) == ({"attn"} if is_words else set())


class Decoded(nn.Module):
    """16 patches through a layer, then through a decoder of 3 classes."""

    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Conv2d(3, 8, 4, 4), attnswap.SelfAttention(8, 2)
        self.decode = MaskTransformer(8, 3, 8, 1, 2)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.decode(self.attn(tokens).unflatten(1, (4, 4)))


@pytest.mark.parametrize(
    ("tokens", "size", "grid"),
    [
        (197, (224, 224), (1, 14, 14)),
        (196, (224, 224), (0, 14, 14)),
        (198, (224, 224), (2, 14, 14)),
        (1 + 8 * 16, (128, 256), (1, 8, 16)),
        (3, (224, 224), (2, 1, 1)),
        (7 * 11, (224, 224), (13, 8, 8)),
        (60, (64, 640), (20, 2, 20)),
    ],
)
def test_patch_grid(tokens, size, grid):
    assert patch_grid(tokens, *size) == (None if grid[0] > 9 else grid)


@each_row(
    ("options", "message"),
    [
        ({"every_n_epochs": 0}, "every_n_epochs must be an integer of at least 1, got 0"),
        ({"heads": [-1]}, "heads must be an integer of at least 0, got -1"),
        ({"heads": []}, "heads is empty"),
        ({"queries": []}, "queries is empty"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMapLogger(**options)


@each_row(
    ("options", "message"),
    [
        ({"heads": [HEADS]}, r"heads \[2\] do not fit .*self_attn', which has 2, counted from 0"),
        ({"queries": [TOKENS]}, r"queries \[6\] on .* which has 6 tokens"),
        ({"where": "blocks.*"}, "blocks"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(options, message):
    trained = []

    class Counts(TinyLM):
        def on_train_start(self):
            trained.append(self)

    with pytest.raises(ValueError, match=message):
        fit(Counts(), [AttentionMapLogger(every_n_epochs=3, **options)], val_loader=batches(1))
    assert not trained


@pytest.mark.figures
def test_panels_say_what_their_colors_stand_for():
    maps = torch.tensor([[0.1, 0.9], [0.5, 0.5]]).expand(2, 3, 2, 2)
    figure = draw_token_maps(maps, [0, 1], ["head 0", "head 1", "head 2"], "layer")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels[:3]] == [f"head {head}\n0.1 to 0.9" for head in range(3)]
    assert [axes.get_xlabel() for axes in panels] == [""] * 3 + ["key"] * 3
    assert [axes.get_ylabel() for axes in panels] == ["query", "", ""] * 2
    words = "model.blocks.1.attn: softmax(q kᵀ) of the q and k given to SymmetricAttention"
    narrow = draw_token_maps(maps[:, :1], [0, 1], ["mean"], words)
    assert " ".join(narrow.get_suptitle().split()) == words  # on several lines, none wider than the figure
    narrow.draw_without_rendering()
    assert narrow._suptitle.get_window_extent().width <= narrow.bbox.width
    over = torch.tensor([[0.06, 0.061], [0.0625, 0.063]]).expand(1, 1, 1, 2, 2)
    figure = draw_over_images(torch.rand(1, 1, 8, 8), over, ["mean of tokens"], ["rollout"], "rollout")
    assert [axes.get_title() for axes in figure.axes[:2]] == ["image", "rollout\n0.06 to 0.063"]
    assert figure.axes[1].images[1].get_clim() == pytest.approx((0.0, 0.063))


class Padded(InTwoCalls):
    """Reads padded prompts in one call."""

    def validation_step(self, batch, batch_idx):
        loss = self.model(**shown(batch), labels=batch).loss
        self.log("val", loss)
        return loss

    training_step = validation_step


STATES = ("linear", "retention", "gla", "delta", "gated_delta", "kda", "performer", "hedgehog", "window")


@pytest.mark.figures
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "forgetting", "gated", "value_residual", *STATES])
def test_maps_of_the_first_samples_of_a_padded_batch(tmp_path, drawn, mechanism, alone):
    """Also where a later sample alone is padded, whose mask is for all."""
    prompts = PROMPTS.flip(0) if alone else PROMPTS
    module = Padded(decoder())
    attnswap.swap_attention(module, mechanism)
    loader, options = DataLoader(prompts, batch_size=4), {"accelerator": "cpu", "enable_progress_bar": False}
    plain = pl.Trainer(logger=False, **options).validate(module, loader, verbose=False)
    watched = pl.Trainer(logger=CSVLogger(tmp_path), callbacks=[AttentionMapLogger()], **options)
    assert watched.validate(module, loader, verbose=False) == plain
    wanted = attnswap.attention_maps(module.model, shown(prompts))
    for (maps, *_), whole in zip(drawn, wanted.values(), strict=True):
        torch.testing.assert_close(maps, whole[:2].mean(1, keepdim=True), rtol=1e-4, atol=1e-5)
