"""A tiny ViT as an ImageClassificationTask, and images for it."""

import torch

from lightning_tasks import ImageClassificationTask

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}


RPC = {"mechanism": "rpc", "options": {"iterations": 2}, "layers": [0]}


COSINE = {"class_path": "timm.scheduler.create_scheduler_v2", "init_args": {"warmup_epochs": 1, "min_lr": 1e-4}}


MIXED = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "random_erasing": 0.5}


def task(**options):
    given = {"model": "vit_tiny_patch16_224", "model_options": TINY, "optimizer": "AdamW", **options}
    return ImageClassificationTask(**given)


def built(num_classes=10, **options):
    result = task(num_classes=num_classes, **options)
    result.configure_model()
    return result.eval()


def images(count=6, size=8, chans=1):
    return torch.rand(count, chans, size, size, generator=torch.Generator().manual_seed(1))


DECAY = {"class_path": "AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.3}}
