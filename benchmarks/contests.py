"""Our tasks and the models that users would take in their place, each with its own training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask

DIM, HEADS, IMAGE_CLASSES, PIXEL_CLASSES = 128, 8, 1000, 150
MMSEG_CONFIG = "segmenter_vit-t_mask_8xb1-160k_ade20k-512x512"
ADAMW: dict[str, Any] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "fused": True}}
SGD: dict[str, Any] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-3, "momentum": 0.9}}

Batch = tuple[Tensor, Tensor]
Peer = tuple[nn.Module, Callable[[], object]]


@dataclass(frozen=True)
class Contest:
    """One of our tasks against one peer.

    Args:
        name: what is compared.
        task: builds ours.
        peer: builds the peer's model and its training step, from our batch.
        batch: what both train on.
        rounds: timed steps of each.
        goal: how many times as fast ours is to be.
    """

    name: str
    task: Callable[[], pl.LightningModule]
    peer: Callable[[Batch], Peer]
    batch: Callable[[], Batch]
    rounds: int
    goal: float


@dataclass(frozen=True)
class Text:
    """A language model's shape: layers, tokens T, vocabulary V, windows a batch, width and heads."""

    layers: int
    tokens: int
    vocabulary: int
    windows: int
    dim: int = DIM
    heads: int = HEADS

    @property
    def amount(self) -> int:
        """Tokens of a step."""
        return self.windows * self.tokens

    def __str__(self) -> str:
        return f"{self.layers} layers, T {self.tokens}, V {self.vocabulary:,}, batch {self.windows}"

    def batch(self) -> Batch:
        """Random tokens and the ones that follow them."""
        tokens = torch.randint(self.vocabulary, (self.windows, self.tokens + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def task(self, **options: Any) -> pl.LightningModule:
        """Ours, without dropout."""
        sizes = {"num_layers": self.layers, "dim": self.dim, "num_heads": self.heads, "mlp_dim": 4 * self.dim}
        arguments = {**sizes, "num_tokens": self.tokens, "dropout": 0.0, **options}
        model = {"class_path": "lightning_tasks.models.TransformerLM", "init_args": arguments}
        return LanguageModelingTask(model, vocab_size=self.vocabulary, optimizer=ADAMW)

    def litgpt(self, batch: Batch) -> Peer:
        """litgpt's GPT in the step of its `pretrain`: learned weights as ours, without rotary positions."""
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy

        config = Config(
            block_size=self.tokens,
            padded_vocab_size=self.vocabulary,
            n_layer=self.layers,
            n_head=self.heads,
            n_embd=self.dim,
            rotary_percentage=0.0,
            parallel_residual=False,
        )
        model = GPT(config)
        return model, _bare_step(model, lambda: chunked_cross_entropy(model(batch[0]), batch[1]))

    def gpt2(self, batch: Batch) -> Peer:
        """transformers' GPT-2 with its own loss and its SDPA attention."""
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.tokens,
            n_embd=self.dim,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function="relu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        inputs, labels = batch  # shifted already
        return model, _bare_step(model, lambda: model(input_ids=inputs, shift_labels=labels, labels=labels).loss)


@dataclass(frozen=True)
class Images:
    """Images of H = W pixels, how many per batch, and timm's model of them."""

    size: int
    count: int
    model: str = "deit_tiny_patch16_224"

    @property
    def amount(self) -> int:
        """Images of a step."""
        return self.count

    def classified(self) -> Batch:
        """Random images and labels."""
        return torch.rand(self.count, 3, self.size, self.size), torch.randint(IMAGE_CLASSES, (self.count,))

    def masked(self) -> Batch:
        """Random images and masks."""
        shape = (self.count, self.size, self.size)
        return torch.rand(self.count, 3, self.size, self.size), torch.randint(PIXEL_CLASSES, shape)

    def classification(self) -> pl.LightningModule:
        """The model with DeiT's mixup, cutmix and label smoothing."""
        return ImageClassificationTask(
            self.model,
            num_classes=IMAGE_CLASSES,
            model_options={"img_size": self.size, "drop_path_rate": 0.1},
            mixup=0.8,
            cutmix=1.0,
            label_smoothing=0.1,
            optimizer=ADAMW,
        )

    def timm(self, batch: Batch) -> Peer:
        """timm's model in a bare loop: its mixup, its loss, its groups of parameters; images come normalized."""
        import timm
        from timm.data.mixup import Mixup
        from timm.loss import SoftTargetCrossEntropy
        from timm.optim import param_groups_weight_decay

        model = timm.create_model(self.model, num_classes=IMAGE_CLASSES, img_size=self.size, drop_path_rate=0.1)
        mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=IMAGE_CLASSES)
        loss_fn = SoftTargetCrossEntropy()
        images, labels = batch[0].clone(), batch[1]

        def loss() -> Tensor:
            mixed, targets = mix(images, labels)
            return loss_fn(model(mixed), targets)

        return model, _bare_step(model, loss, param_groups_weight_decay(model, 0.01))

    def segmentation(self) -> pl.LightningModule:
        """Segmenter with ViT-tiny and a mask transformer of two layers."""
        model = {
            "backbone": "vit_tiny_patch16_224",
            "img_size": self.size,
            "backbone_options": {"drop_path_rate": 0.1},
        }
        return SegmentationTask(model, num_classes=PIXEL_CLASSES, optimizer=SGD, param_groups=[])

    def mmsegmentation(self, batch: Batch) -> Peer:
        """Segmenter ViT-T of mmsegmentation in its own `train_step`, which its loop calls."""
        from lightning_tasks.models.mmseg_config import config_file, load_mmseg, model_config, set_crop_size

        load_mmseg()
        from mmengine.optim import OptimWrapper
        from mmengine.registry import DefaultScope
        from mmengine.structures import PixelData
        from mmseg.registry import MODELS
        from mmseg.structures import SegDataSample

        config = model_config(config_file(MMSEG_CONFIG), {})
        config.pretrained = None
        set_crop_size(config, self.size)
        with DefaultScope.overwrite_default_scope("mmseg"):
            model: Any = MODELS.build(config)
            model.init_weights()
        samples = [SegDataSample(gt_sem_seg=PixelData(data=mask[None])) for mask in batch[1]]
        data = {"inputs": list((batch[0].flip(1) * 255).byte()), "data_samples": samples}
        wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), **SGD["init_args"]))
        return model, lambda: model.train_step(data, wrapper)


def _bare_step(model: nn.Module, loss: Callable[[], Tensor], groups: Any = None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters() if groups is None else groups, **ADAMW["init_args"])

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
