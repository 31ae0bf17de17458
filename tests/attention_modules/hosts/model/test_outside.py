"""What holds or feeds a model from outside its layers: DistributedDataParallel, and what drops its tokens."""

import copy
import inspect
import types

import pytest
import timm
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import VisionTransformer

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from attention_modules.hosts import attention_layers


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def in_fsdp(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("mechanism", ["gated", "symmetric"])
@pytest.mark.parametrize("part", ["", "layers.1"])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, in_fsdp])
def test_what_ddp_or_fsdp_holds_keeps_its_parameters(one_process, mechanism, part, wrap):
    held = wrap(encoder())
    with pytest.raises(AttentionSwapError, match=rf"{type(held).__name__} holds it, .*: swap before wrapping"):
        swap_attention(held.module.get_submodule(part), mechanism)
    swap_attention(held.module, "softmax")
    other = encoder()
    swap_attention(other, mechanism)
    restore_attention(other)
    assert other(torch.randn(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
def test_models_that_drop_tokens_take_no_mechanism_that_counts_columns(mechanism):
    dropping = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, patch_drop_rate=0.5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    masked = transformers.ViTMAEModel(transformers.ViTMAEConfig(**sizes, image_size=32, patch_size=8))
    eva = timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=1, patch_drop_rate=0.5)
    for model, name in (
        (dropping, "patch_drop drops tokens"),
        (eva, "patch_drop drops tokens"),
        (masked, "embeddings drops and shuffles tokens"),
    ):
        if mechanism == "sink":
            swap_attention(model, mechanism)
        else:
            with pytest.raises(AttentionSwapError, match=name):
                swap_attention(model, mechanism, num_tokens=17)


def test_of_a_video_model_only_what_takes_all_tokens_counts_columns():
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "crop_size": 32, "patch_size": 16}
    predictor = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    model = transformers.VJEPA2Model(transformers.VJEPA2Config(**sizes, **predictor, frames_per_clip=2))
    with pytest.raises(AttentionSwapError, match=r"predictor\.embeddings drops and shuffles tokens"):
        swap_attention(model, "position_bias", where="predictor*", num_tokens=8)
    swap_attention(model, "position_bias", where="encoder*", num_tokens=4)
    model(torch.randn(1, 2, 3, 32, 32), skip_predictor=True).last_hidden_state.sum().backward()


def of_timm(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.blocks[0](tokens)


def of_torchvision(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.encoder.layers(tokens)


def of_transformers(model: nn.Module, tokens: Tensor) -> Tensor:
    return next(module for name, module in model.named_modules() if name.endswith(("layer.0", "layers.0")))(tokens)


class Masked(nn.Module):
    """A decoder of masked autoencoders, as lightly and others build it of timm's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 32))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, 32), requires_grad=False)
        self.blocks = nn.Sequential(timm.models.vision_transformer.Block(32, 2))


SIZES = {"img_size": 64, "depth": 1, "embed_dim": 32, "num_heads": 2}
OF_IMAGES = {"image_size": 64, "patch_size": 16}
OF_WIDTH = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def of_hugging_face(name: str, **sizes: int):
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}Model")(config(**OF_IMAGES | OF_WIDTH | sizes))


IMAGE_MODELS = {
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", **SIZES), of_timm),
    "timm of any size": (lambda: timm.create_model("vit_tiny_patch16_224", **SIZES, dynamic_img_size=True), of_timm),
    "timm eva of any size": (
        lambda: timm.create_model("eva02_tiny_patch14_224", **SIZES, patch_size=16, dynamic_img_size=True),
        of_timm,
    ),
    "timm eva": (lambda: timm.create_model("eva_giant_patch14_224", **SIZES, patch_size=16, mlp_ratio=1), of_timm),
    "of timm's blocks": (Masked, of_timm),
    "torchvision": (lambda: VisionTransformer(64, 16, 1, 2, 32, 64), of_torchvision),
    "transformers vit": (of_hugging_face("ViT"), of_transformers),
    "transformers dinov2": (of_hugging_face("Dinov2"), of_transformers),
}


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
@pytest.mark.parametrize("library", IMAGE_MODELS)
def test_a_part_of_a_models_tokens_is_no_input_for_what_counts_columns(library, mechanism):
    build, layers = IMAGE_MODELS[library]  # of which lightly and others give the layers the tokens that no mask hides
    model = build().eval()
    for options in ({},) if mechanism == "sink" else ({}, {"num_tokens": 50}):
        swap_attention(model, mechanism, **options)
        tokens = torch.randn(2, 17, 32)
        assert layers(model, tokens).shape == (2, 17, 32)
        for other in (tokens[:, ::2], tokens.repeat(1, 2, 1)):  # dropped tokens, another image size
            if mechanism == "sink":
                layers(model, other)
                continue
            with pytest.raises(RuntimeError, match=r"counts columns, and the model had positions for 17 tokens"):
                layers(model, other)
    swap_attention(model, "softmax")
    layers(model, tokens[:, ::2])
    restore_attention(model)
    layers(model, tokens[:, ::2])


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("ViT", 17), ("DeiT", 18), ("Dinov2", 17), ("Dinov2WithRegisters", 21), ("CLIPVision", 17), ("SiglipVision", 16)],
)
def test_the_tokens_of_an_image_are_all_that_a_vision_transformer_gives(name, tokens):
    model = of_hugging_face(name)().eval()
    swap_attention(model, "position_bias")
    assert model(torch.randn(1, 3, 64, 64)).last_hidden_state.shape[1] == tokens
    with pytest.raises(RuntimeError, match=f"had positions for {tokens} tokens"):
        model(torch.randn(1, 3, 32, 32), **({} if name.startswith("Dino") else {"interpolate_pos_encoding": True}))


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("swin_tiny_patch4_window7_224", {"window_size": (4, 4)}),
        ("swin_tiny_patch4_window7_224", {"window_size": (4, 16)}),  # as many tokens
        ("swinv2_cr_tiny_ns_224", {"window_size": (4, 4)}),
        ("beit_base_patch16_224", {"img_size": (96, 96)}),
    ],
)
def test_windows_of_another_size_are_no_input_for_what_counts_columns(name, other, mechanism):
    windows = {} if name.startswith("beit") else {"window_size": 8}
    model = timm.create_model(name, img_size=128, **windows).eval()
    first = attention_layers(model)[0].name
    swap_attention(model, mechanism, where=first)
    model.set_input_size(**(same := {"img_size": (128, 128), **windows}))
    model(torch.randn(1, 3, 128, 128))
    model.set_input_size(**{**same, **other})
    image = torch.randn(1, 3, *other.get("img_size", (128, 128)))
    if mechanism != "sink":
        with pytest.raises(RuntimeError, match=r"at the swap, of which .* after set_input_size\(\) restore and swap"):
            model(image)
        restore_attention(model)
        swap_attention(model, mechanism, where=first)
    model(image)


@pytest.mark.parametrize("mechanism", ["position_bias", "scaled", "dam", "sink"])
@pytest.mark.parametrize(
    "library", ["timm of any size", "timm eva of any size", "transformers vit", "transformers dinov2"]
)
def test_as_many_patches_in_other_places_are_no_input_for_what_counts_columns(library, mechanism):
    model = IMAGE_MODELS[library][0]().eval()
    given = {"interpolate_pos_encoding": True} if library == "transformers vit" else {}
    swap_attention(model, mechanism)
    model = copy.deepcopy(model)
    other = torch.randn(1, 3, 32, 128)
    model(other.reshape(1, 3, 64, 64))
    if mechanism == "sink":
        model(other, **given)
        return
    with pytest.raises(RuntimeError, match=r"counts columns, which are patches in 4 rows of 4, .* 2 rows of 8"):
        model(other, **given)
    swap_attention(model, "softmax")
    model(other, **given)
    restore_attention(model)
    assert not any(module._forward_hooks for module in model.modules())
    model(other, **given)


@pytest.mark.parametrize(
    "build",
    [
        lambda: timm.create_model("vitamin_small_224", img_size=64, dynamic_img_size=True, depth=1),
        lambda: timm.create_model("vit_base_mci_224", img_size=64, dynamic_img_size=True, depth=1),
        of_hugging_face("OwlViTVision"),
        of_hugging_face("Owlv2Vision"),
        lambda: transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**OF_IMAGES, **OF_WIDTH, use_head=False)),
    ],
    ids=["vitamin", "mobileclip", "owlvit", "owlv2", "aimv2"],
)
def test_whatever_cuts_an_image_knows_its_grid(build):
    model = build().eval()
    takes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    given = {"interpolate_pos_encoding": True} if takes else {}
    swap_attention(model, "position_bias")
    model(torch.randn(1, 3, 64, 64))
    with pytest.raises(RuntimeError, match=r"counts columns, which are patches in 4 rows of 4, .* 2 rows of 8"):
        model(torch.randn(1, 3, 32, 128), **given)


@pytest.mark.parametrize("library", ["timm of any size", "transformers vit"])
def test_a_convolution_that_was_replaced_asks_for_another_swap(library):
    model = IMAGE_MODELS[library][0]().eval()
    swap_attention(model, "position_bias")
    owner, name = (
        (model.patch_embed, "proj") if "timm" in library else (model.embeddings.patch_embeddings, "projection")
    )
    setattr(owner, name, nn.Conv2d(3, 32, 16, 16))
    with pytest.raises(RuntimeError, match=f"counts columns, and '{name}' of .* was replaced after the swap"):
        model(torch.randn(1, 3, 64, 64))
    restore_attention(model)
    swap_attention(model, "position_bias")
    model(torch.randn(1, 3, 64, 64))
    restore_attention(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("stem", ["of several convolutions", "with an adapter", "with an adapter, of a folder"])
def test_a_stem_of_any_kind_knows_its_grid(stem):
    kind = "transformers vit" if "folder" in stem else "timm of any size"
    model = IMAGE_MODELS[kind][0]().eval()
    if "adapter" in stem:
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*\.(proj|projection)", r=2))
    else:
        model.patch_embed.proj = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 32, 4, 4))
    swap_attention(model, "position_bias")
    model(torch.randn(1, 3, 64, 64))
    given = {"interpolate_pos_encoding": True} if "folder" in stem else {}
    for merged in (False, True) if "adapter" in stem else (False,):
        model = adapted.merge_and_unload() if merged else model
        model(torch.randn(1, 3, 64, 64))
        with pytest.raises(RuntimeError, match=r"counts columns, which are patches in 4 rows of 4, .* 2 rows of 8"):
            model(torch.randn(1, 3, 32, 128), **given)


@pytest.mark.parametrize(("patch", "name"), [(1, None), ((4, 4), "cut"), ((4, 4), "proj")], ids=str)
def test_pixels_and_patches_that_overlap_have_a_grid_too(patch, name):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.img_size, self.grid_size = (16, 16), (4, 4)
            setattr(self, name, nn.Conv2d(3, 8, 7, 4, 3))
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

        def forward(self, image):
            return self.layer(getattr(self, name)(image).flatten(2).mT)

    given = {}
    if name is None:
        model = transformers.ViTModel(transformers.ViTConfig(**OF_WIDTH, image_size=4, patch_size=1)).eval()
        given = {"interpolate_pos_encoding": True}
    else:
        model = Own().eval()
    swap_attention(model, "position_bias", **({} if name is None else {"num_tokens": 16}))
    size = 4 if name is None else 16
    model(torch.randn(1, 3, size, size))
    with pytest.raises(RuntimeError, match=r"patches in 4 rows of 4, .* 2 rows of 8"):
        model(torch.randn(1, 3, size // 2, size * 2), **given)


@pytest.mark.parametrize("new", [nn.Conv2d(8, 7, 1), nn.Identity(), None], ids=["another", "identity", "none"])
def test_a_head_is_replaced_as_one_likes(new):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.image_size = 16
            self.cut, self.head = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 5, 3, padding=1)
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

        def forward(self, image):
            cut = self.cut(image)
            tokens = self.layer(cut.flatten(2).mT).mT.unflatten(2, cut.shape[2:])
            return tokens if self.head is None else self.head(tokens)

    model = Own().eval()
    swap_attention(model, "position_bias", num_tokens=16)
    model.head = new
    model(torch.randn(1, 3, 16, 16))
    with pytest.raises(RuntimeError, match="patches in 4 rows of 4"):
        model(torch.randn(1, 3, 8, 32))
    model.cut = None
    with pytest.raises(RuntimeError, match="'cut' of Own was replaced"):
        model(torch.randn(1, 3, 16, 16))


def test_what_only_looks_like_a_grid_is_none():
    sizes = {"window_size": 6, "depths": (1, 1, 1, 1), "num_classes": 2}  # of whose norm 96 features come last
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=(384, 192), **sizes)
    swap_attention(swin, "position_bias")
    swin(torch.randn(1, 3, 384, 192))

    class Own(nn.Module):
        """With sizes that are no pair, and a forward that is no function of Python."""

        def __init__(self, size):
            super().__init__()
            self.config = types.SimpleNamespace(image_size=size)
            self.cut, self.act = nn.Conv2d(3, 8, 4, 4), type("Act", (nn.Module,), {"forward": torch._C._nn.gelu})()
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    for size in ({"height": 64, "width": 64}, [3, 64, 64], None):
        for mechanism, options in (("sink", {}), ("position_bias", {"num_tokens": 16})):
            swap_attention(Own(size), mechanism, **options)


def test_images_of_shapes_of_their_own_have_no_place_for_what_counts_columns():
    sizes = {"patch_size": 4, "num_patches": 16, "vision_use_head": False}
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**OF_WIDTH, **sizes))
    for mechanism, options in (("position_bias", {}), ("scaled", {"num_tokens": 16}), ("dam", {})):
        with pytest.raises(ValueError, match=r"embeddings takes images of shapes of their own \(spatial_shapes\)"):
            swap_attention(model, mechanism, **options)
    swap_attention(model, "sink")


def test_queries_join_the_tokens_of_an_eomt_between_its_layers():
    sizes = OF_IMAGES | OF_WIDTH | {"num_blocks": 1, "num_queries": 5, "num_upscale_blocks": 1}
    model = transformers.EomtForUniversalSegmentation(transformers.EomtConfig(**sizes))
    with pytest.raises(ValueError, match="give it the option num_tokens"):
        swap_attention(model, "dam")
    swap_attention(model, "dam", num_tokens=26)  # 16 patches, 5 tokens before them, 5 queries in the last layer
    model(torch.randn(1, 3, 64, 64)).masks_queries_logits.sum().backward()
    assert all(layer.attention.mechanism.logits.grad.any() for layer in model.layers)


def test_texts_beside_images_may_be_shorter():
    text, vision = (
        transformers.LlamaConfig(**OF_WIDTH, vocab_size=50),
        transformers.CLIPVisionConfig(**OF_WIDTH, **OF_IMAGES),
    )
    model = transformers.LlavaModel(transformers.LlavaConfig(vision_config=vision, text_config=text)).eval()
    with pytest.raises(ValueError, match="give it the option num_tokens"):
        swap_attention(model, "position_bias", where="*language_model*")
    swap_attention(model, "position_bias", num_tokens=30)
    for length in (5, 20):
        assert model(torch.arange(length)[None]).last_hidden_state.shape == (1, length, 32)
