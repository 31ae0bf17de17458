"""Segmenter: a vision transformer of timm's, and a decoder from its tokens to a class for each pixel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.models.pixel_loss import upsampled_cross_entropy
from lightning_tasks.models.sliding_window import Prediction, Windows
from lightning_tasks.models.timm_model import build_timm_model, check_model_name, normalization

DECODERS = ("mask_transformer", "linear")


class Segmenter(nn.Module):
    """Logits of every pixel from a backbone's tokens (Strudel et al., ICCV 2021).

    Class and register tokens of the backbone are left out of what is decoded. Every self-attention layer, those of the
    mask transformer too, can be swapped by `swap_attention`; the backbone's come first in module order.

    Args:
        backbone: name of a timm model whose `forward_features` returns tokens `[B, prefix + N, C]` in the order of the
            image's rows: vision_transformer, deit, eva, beit, ...
        num_classes: number of classes, K.
        img_size: H = W that the backbone is built for; position embeddings of pretrained weights are resized to it.
        pretrained: whether the backbone starts from timm's weights.
        backbone_options: further arguments of ``timm.create_model``: patch_size, embed_dim, drop_path_rate,
            dynamic_img_size (position embeddings are resized for each image), ...
        decoder: "mask_transformer" or "linear".
        decoder_depth: transformer layers of the mask transformer.
        decoder_dim: width of the mask transformer; the backbone's where None.
        decoder_heads: its heads; where None, one for each 64 of its width.
        decoder_drop_path: drop-path rate of its layers.
        mean, std: a channel, for the normalization; where None, those of the backbone.

    Raises:
        ValueError: for an unknown backbone (the nearest names are given) or decoder, a backbone without tokens, or
            arguments that it does not take.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(
        self,
        backbone: str,
        num_classes: int,
        img_size: int = 512,
        pretrained: bool = False,
        backbone_options: Mapping[str, Any] | None = None,
        decoder: str = "mask_transformer",
        decoder_depth: int = 2,
        decoder_dim: int | None = None,
        decoder_heads: int | None = None,
        decoder_drop_path: float = 0.0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if decoder not in DECODERS:
            raise ValueError(f"decoder is {decoder!r}: give one of {', '.join(map(repr, DECODERS))}")
        for name, value in (("decoder_dim", decoder_dim), ("decoder_heads", decoder_heads)):
            if value is not None:
                check_integer(name, value, 1)
        super().__init__()
        self.num_classes, self.img_size = num_classes, img_size
        self.prediction = Prediction(Windows(img_size, max(1, img_size // 2)))  # of whole images
        self.backbone = build_backbone(backbone, img_size, pretrained, backbone_options or {})
        width = self.backbone.num_features
        dim = decoder_dim or width
        self.decoder: nn.Module = (
            nn.Linear(width, num_classes)
            if decoder == "linear"
            else MaskTransformer(
                width, num_classes, dim, decoder_depth, decoder_heads or max(1, dim // 64), decoder_drop_path
            )
        )
        for name, values in zip(("mean", "std"), normalization(self.backbone, 3, mean, std), strict=True):
            self.register_buffer(f"image_{name}", torch.tensor(values).view(-1, 1, 1), persistent=False)

    def head_names(self) -> list[str]:
        """Names of the modules and Parameters whose shape follows from the number of classes."""
        return ["decoder"] if isinstance(self.decoder, nn.Linear) else ["decoder.class_tokens", "decoder.mask_norm"]

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings that no weight decay should act on."""
        names: Any = getattr(self.backbone, "no_weight_decay", set)
        return {f"backbone.{name}" for name in names()} | {"decoder.class_tokens"}

    def tokens(self, images: Tensor) -> Tensor:
        """The backbone's features on the grid of its patches, ``[B, h, w, C]``, of normalized images.

        Raises:
            ValueError: if the image is not made up of whole patches, or has another size than the backbone takes.
        """
        height, width = images.shape[-2:]
        try:
            found = self.backbone.forward_features(images)
        except AssertionError as error:  # timm's check of the size
            raise ValueError(f"the backbone is built for {self.img_size} x {self.img_size} pixels: {error}") from error
        found = _fc_norm(self.backbone)(found)[:, self.backbone.num_prefix_tokens :]
        patch = int(self.backbone.feature_info[-1]["reduction"])  # by the number of tokens, a part might be left over
        if height % patch or width % patch or (height // patch) * (width // patch) != found.shape[1]:
            cure = f"give a multiple, such as img_size={max(patch, height // patch * patch)}"
            if not (height % patch or width % patch):
                cure = "this backbone's tokens are not those of its patches; take another"
            raise ValueError(
                f"{height} x {width} pixels give {found.shape[1]} tokens, which are no grid of whole patches of "
                f"{patch} pixels: {cure}"
            )
        return found.unflatten(1, (height // patch, width // patch))

    def patch_logits(self, images: Tensor) -> Tensor:
        """Logits of the patches, ``[B, h, w, K]``, of images ``[B, 3, H, W]`` in [0, 1]; normalized inside.

        Raises:
            ValueError: for images of another shape or size than the backbone takes.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be [B, 3, H, W], got {list(images.shape)}")
        return self.decoder(self.tokens((images - self.image_mean) / self.image_std))

    def forward(
        self, images: Tensor, masks: Tensor | None = None, ignore_index: int = 255
    ) -> Tensor | dict[str, Tensor]:
        """Logits ``[B, K, H, W]`` of images ``[B, 3, H, W]`` in [0, 1], or with masks the loss.

        Logits are those of the patches, interpolated. With masks ``[B, H, W]``, as torchvision's detectors with
        targets, :meth:`losses`, which never holds the interpolated ones; hooks on the network see both calls.

        Raises:
            ValueError: as :meth:`patch_logits`.
        """
        if masks is not None:
            return {"loss": upsampled_cross_entropy(self.patch_logits(images), masks, ignore_index)}
        # Contiguous while it is small: the large map would inherit the order of its axes, and softmax would copy it.
        logits = self.patch_logits(images).permute(0, 3, 1, 2).contiguous()
        return functional.interpolate(logits, size=images.shape[-2:], mode="bilinear")

    def losses(self, images: Tensor, masks: Tensor, ignore_index: int) -> dict[str, Tensor]:
        """The mean cross-entropy in nats over the pixels of masks ``[B, H, W]`` that count, 0 where none does."""
        found: dict[str, Tensor] = self(images, masks, ignore_index)  # called as a module, so that its hooks run
        return found

    def bands(self, images: Tensor) -> Iterator[Tensor]:
        """Logits ``[B, K, rows, W]`` of whole images ``[B, 3, H, W]`` of any size, band by band from the top."""
        return self.prediction.bands(self, images)


class MaskTransformer(nn.Module):
    """Patch and class tokens through transformer layers; the logits are cosines of the two, scaled and shifted.

    Args:
        in_dim: width of the tokens, C.
        num_classes: K.
        dim: width of the layers, D.
        depth: number of layers.
        num_heads: their heads.
        drop_path: drop-path rate, growing from 0 over the layers.

    Raises:
        ValueError: if there is no layer, or the width is not a multiple of the heads.
    """

    def __init__(
        self, in_dim: int, num_classes: int, dim: int, depth: int, num_heads: int, drop_path: float = 0.0
    ) -> None:
        if depth < 1:
            raise ValueError(f"decoder_depth is {depth}: give at least 1, or decoder='linear'")
        if dim % num_heads:
            raise ValueError(f"decoder_dim={dim} is not a multiple of decoder_heads={num_heads}")
        super().__init__()
        self.num_classes = num_classes
        self.embed = nn.Linear(in_dim, dim)
        self.class_tokens = nn.Parameter(torch.zeros(1, num_classes, dim))
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(dim, num_heads, qkv_bias=True, drop_path=rate) for rate in rates)
        self.norm = nn.LayerNorm(dim)
        self.patch_proj = nn.Linear(dim, dim, bias=False)
        self.class_proj = nn.Linear(dim, dim, bias=False)
        self.mask_norm = nn.LayerNorm(num_classes)
        self.apply(_initialize)
        trunc_normal_(self.class_tokens, std=0.02)
        for projection in (self.patch_proj, self.class_proj):
            nn.init.normal_(projection.weight, std=dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, h, w, K]`` of tokens ``[B, h, w, C]``."""
        grid = tokens.shape[1:3]
        x = self.embed(tokens.flatten(1, 2))
        x = torch.cat([x, self.class_tokens.expand(len(x), -1, -1).to(x.dtype)], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = functional.normalize(self.patch_proj(x[:, : -self.num_classes]), dim=-1)
        classes = functional.normalize(self.class_proj(x[:, -self.num_classes :]), dim=-1)
        return self.mask_norm(patches @ classes.transpose(1, 2)).unflatten(1, grid)


def build_backbone(name: str, img_size: int, pretrained: bool, options: Mapping[str, Any]) -> Any:
    """A timm model without head and pooling, whose `forward_features` returns tokens.

    Raises:
        ValueError: if timm has no such model, it does not take the arguments, or it has no tokens.
    """
    given = {"img_size": img_size, **options}
    cure = "take a plain vision transformer such as deit_tiny_patch16_224"
    try:
        model: Any = build_timm_model(check_model_name(name), 0, pretrained, given, key="backbone_options")
    except ValueError as error:
        if "unexpected keyword argument 'img_size'" not in str(error):
            raise
        raise ValueError(f"{name} is no backbone for Segmenter: it is built for no img_size; {cure}") from error
    if not isinstance(getattr(model, "num_prefix_tokens", None), int):
        raise ValueError(
            f"{name} ({type(model).__name__}) is no backbone for Segmenter: its features are no sequence of tokens (it "
            f"has no num_prefix_tokens); {cure}"
        )
    model.reset_classifier(0, "")  # no pooling, whose weights would train nothing
    return model


def _fc_norm(backbone: nn.Module) -> nn.Module:
    """The norm that models which average their tokens have after the average, in the place of the one before."""
    norm = getattr(backbone, "fc_norm", None)
    return nn.Identity() if norm is None else norm


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
