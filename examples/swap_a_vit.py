"""Swap the attention of a timm ViT; print the entropy before and after, and draw both attention maps.

``python examples/swap_a_vit.py`` writes attention.png. The weights are random, so that nothing is downloaded: with
``pretrained=True`` the rest is the same.
"""

import timm
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_sample_image

import attnswap
from attnswap.analysis import attention_entropy, attention_map

LAYER = 0


def queries_and_keys(model, image):
    """What the mechanism of the layer is given, each [B, H, N, d]."""
    seen = []
    mechanism = model.blocks[LAYER].attn.mechanism
    handle = mechanism.register_forward_hook(lambda module, args, output: seen.extend(args[:2]))
    with torch.no_grad():
        model(image)
    handle.remove()
    q, k = seen
    return (q if mechanism.uses_query else k), k  # symmetric attention compares keys with keys


torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
photograph = torch.tensor(load_sample_image("flower.jpg")).permute(2, 0, 1).float() / 255
image = torch.nn.functional.interpolate(photograph[None], size=(224, 224), mode="bilinear", antialias=True)
with torch.no_grad():
    original = model(image)

figure, axes = plt.subplots(1, 3, figsize=(9, 3))
axes[0].imshow(image[0].permute(1, 2, 0).clamp(0, 1))
for axis, name in zip(axes[1:], ("softmax", "symmetric"), strict=True):
    print(attnswap.swap_attention(model, name, layers=[LAYER]))
    q, k = queries_and_keys(model, image)
    print(f"{name}: entropy of each head {attention_entropy(q, k)[0].numpy().round(3)} nats")
    of_the_class_token = attention_map(q, k)[0, :, 0, 1:].mean(0)  # over the patches, mean of the heads
    axis.imshow(of_the_class_token.reshape(14, 14))
    axis.set_title(name)
figure.savefig("attention.png")

attnswap.restore_attention(model)
with torch.no_grad():
    print("restored, bitwise:", torch.equal(model(image), original))
