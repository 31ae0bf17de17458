"""Small models on images in [0, 1], for tests of the attacks and of what is measured with them."""

import timm
import torch
from torch import nn

from attention_modules import swap_attention

CLASSES = 5
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class Normalized(nn.Module):
    """A network behind the normalization of its input."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))

    def forward(self, images):
        return self.network((images - self.mean) / self.std)


def convolutional(seed=0, scale=3.0):
    """Convolution, batch norm, dropout and a head with large logits."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    network.eval()(torch.zeros(1, 3, 12, 12))
    network[-1].weight.data.mul_(scale)
    return Normalized(network)


def vit(mechanism=None, seed=0, **options):
    """A timm ViT of two layers for 12 x 12 pixels and others, swapped where a mechanism is named."""
    torch.manual_seed(seed)
    size = {
        "img_size": 12,
        "dynamic_img_size": True,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": CLASSES,
    }
    network = timm.create_model("vit_tiny_patch16_224", **size)
    network.head.weight.data.normal_(std=1.0)
    if mechanism:
        swap_attention(network, mechanism, **options)
    return Normalized(network)


def batch(count=8, size=12, dtype=torch.float32):
    """Images and labels; some values stand at 0 and at 1."""
    generator = torch.Generator().manual_seed(1)
    images = (torch.rand(count, 3, size, size, generator=generator, dtype=dtype) * 1.2 - 0.1).clamp(0, 1)
    return images, torch.randint(0, CLASSES, (count,), generator=generator)
