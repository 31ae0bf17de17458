"""Swap the attention of a timm ViT; print the entropy before and after, and draw both attention maps.

``python examples/swap_a_vit.py`` writes attention.png. The weights are random, so that nothing is downloaded: with
``pretrained=True`` the rest is the same.
"""

import timm
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_sample_image

import attnswap

LAYER = 0


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
    (weights,) = attnswap.attention_maps(model, image, layers=[LAYER]).values()  # [1, heads, 197, 197]
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    print(f"{name}: entropy of each head {entropy[0].numpy().round(3)} nats")
    of_the_class_token = weights[0, :, 0, 1:].mean(0)  # over the patches, mean of the heads
    axis.imshow(of_the_class_token.reshape(14, 14))
    axis.set_title(name)
figure.savefig("attention.png")

attnswap.restore_attention(model)
with torch.no_grad():
    print("restored, bitwise:", torch.equal(model(image), original))
