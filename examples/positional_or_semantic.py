"""Attention learns positions from few samples and meaning from many: the toy task of Cui et al. (NeurIPS 2024), drawn.

Of two tokens the target mixes attention by meaning with a fixed map of positions. A layer with tied query and key
weights is trained on n = alpha · d samples from a positional and from a semantic start. Which of them ends at the lower
loss changes with alpha. Sizes, scales and the fixed map are our choice, as we could not read the paper's.
"""

import torch
from matplotlib.figure import Figure

WIDTH, SEEDS, ALPHAS = 100, 3, (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
POSITIONAL, RIDGE = 0.5, 1e-2  # share of positions in the target; weight of |q|² in the loss
FIXED = torch.tensor([[0.6, 0.4], [0.4, 0.6]])


def attention(tokens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The map ``[n, 2, 2]`` of tokens ``[n, 2, d]`` whose queries and keys have the weights q ``[d]``."""
    scores = tokens @ q / WIDTH**0.5
    return torch.softmax(scores[:, :, None] * scores[:, None], -1)


def trained(alpha: float, seed: int) -> tuple[float, float]:
    """The loss that is reached from the positional and from the semantic start."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(int(alpha * WIDTH), 2, WIDTH, generator=generator)
    meaning = torch.randn(WIDTH, generator=generator)
    places = torch.stack([torch.ones(WIDTH), -torch.ones(WIDTH)])
    target = ((1 - POSITIONAL) * attention(tokens, meaning) + POSITIONAL * FIXED) @ tokens

    def loss(q: torch.Tensor) -> torch.Tensor:
        error = attention(tokens + places, q) @ tokens - target
        return error.square().sum() / (2 * WIDTH) + RIDGE / 2 * q @ q

    def descend(q: torch.Tensor) -> float:
        q.requires_grad_()
        optimizer = torch.optim.LBFGS([q], max_iter=300, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(q)
            value.backward()
            return value

        optimizer.step(closure)
        return float(loss(q).detach())

    return descend(places[0] / WIDTH**0.5), descend(meaning.clone())


found = {alpha: [trained(alpha, seed) for seed in range(SEEDS)] for alpha in ALPHAS}
difference = {alpha: [(b - a) / (a + b) for a, b in losses] for alpha, losses in found.items()}
axes = (figure := Figure(figsize=(5, 3), layout="constrained")).subplots()
axes.axhline(0)
axes.plot(ALPHAS, list(difference.values()), "o", color="C0", markersize=4)
axes.set_xlabel("samples per dimension, alpha")
axes.set_ylabel("positional lower (> 0)")
figure.savefig("transition.png", dpi=110)
learned = [alpha for alpha, values in difference.items() if max(values) < 0]
print(f"meaning wins in all {SEEDS} draws from alpha = {min(learned)} on")
