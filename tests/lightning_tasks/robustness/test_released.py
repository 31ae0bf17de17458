"""The attacks in the convention of the code that was released with RPC-Attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_tasks.robustness import released_fgsm, released_noise, released_pgd, released_spsa
from tests.lightning_tasks.robustness.models import CLASSES, MEAN, STD, batch, convolutional


@pytest.mark.parametrize(
    ("attack", "options"),
    [(released_fgsm, {}), (released_pgd, {}), (released_spsa, {"steps": 2, "samples": 4})],
    ids=["fgsm", "pgd", "spsa"],
)
def test_the_released_convention(attack, options):
    model, (images, labels) = convolutional().eval(), batch()
    given = {"eps": 6 / 255, "std": STD, **options}
    attacked = attack(model, images, labels, **given)
    normalized = (attacked - images) / torch.tensor(STD).view(3, 1, 1)
    assert normalized.abs().max() <= 6 / 255 + 1e-5  # eps is in normalized units
    assert (normalized.abs().amax((0, 2, 3)) > 5 / 255).all()  # in every channel
    assert attacked.max() > 1  # nothing is clipped
    assert torch.equal(attacked, attack(model, images, (labels + 1) % CLASSES, **given))  # labels play no part
    with torch.no_grad():
        own = model(images).argmax(1)
        before, after = (functional.cross_entropy(model(each), own) for each in (images, attacked))
    assert after > before


def test_the_released_step_is_fgsm_of_the_normalized_network():
    model, (images, labels) = convolutional().eval(), batch()
    normalized = ((images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)).requires_grad_()
    own = model.network(normalized).argmax(1)
    functional.cross_entropy(model.network(normalized), own).backward()
    step = (released_fgsm(model, images, labels, eps=0.02, std=STD) - images) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(step, 0.02 * normalized.grad.sign(), atol=1e-6)


def test_the_released_noise_is_drawn_evenly_in_normalized_units():
    images = torch.rand(16, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    model, labels = convolutional().eval(), torch.zeros(16, dtype=torch.int64)
    attacked = released_noise(model, images, labels, eps=0.3, std=STD, seed=1)
    change = (attacked - images) / torch.tensor(STD).view(3, 1, 1)
    assert change.abs().amax((0, 2, 3)).sub(0.3).abs().max() < 0.01  # in every channel
    assert torch.allclose(change.std(), torch.tensor(0.3 / 3**0.5), rtol=0.03)
    assert abs(change.mean()) < 0.01
    assert attacked.min() < 0 < 1 < attacked.max()  # nothing is clipped
    assert torch.equal(attacked, released_noise(model, images, labels, eps=0.3, std=STD, seed=1))
    assert not torch.equal(attacked, released_noise(model, images, labels, eps=0.3, std=STD))


def test_the_released_pgd_takes_20_steps_of_15_hundredths():
    seen = []

    class Linear(nn.Module):
        def forward(self, images):
            seen.append(images.detach())
            return torch.stack([images.sum((1, 2, 3)), -images.sum((1, 2, 3))], dim=1)

    images, labels = torch.full((1, 3, 4, 4), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    attacked = released_pgd(Linear(), images, labels, eps=0.1, std=(1.0, 1.0, 1.0), random_start=False)
    moved = [round(float((points - images).abs().max()), 9) for points in (*seen, attacked)]
    steps = [round(min(0.015 * step, 0.1), 9) for step in range(21)]
    assert moved == [0.0, *steps, 0.1]  # its own prediction, the steps with the loss after the last, the answer


def test_the_released_pgd_starts_anywhere_in_the_ball():
    seen = []

    class Flat(nn.Module):
        def forward(self, images):
            seen.append(images.detach())
            return images.flatten(1)[:, :2] * 0 + torch.tensor([1.0, 0.0])

    images, labels = torch.full((4, 3, 8, 8), 0.5), torch.zeros(4, dtype=torch.int64)
    starts = []
    for seed in (0, 0, 1):
        seen.clear()
        released_pgd(Flat(), images, labels, eps=0.1, std=STD, seed=seed)
        starts.append((seen[1] - images) / torch.tensor(STD).view(3, 1, 1))  # after its own prediction
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert starts[0].abs().max() <= 0.1 + 1e-6
    assert starts[0].std().item() == pytest.approx(0.1 / 3**0.5, rel=0.1), "evenly"
