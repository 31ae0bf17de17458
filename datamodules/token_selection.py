"""Token selection: small sets of tokens with labels, of the sizes that the paper's experiments have, or of any."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .shared.base import DataModule, check_at_least

# n, T, d of the paper's experiments (Tarzanagh et al., NeurIPS 2023).
CONSTRUCTIONS = {"single": (1, 3, 3), "multi": (3, 7, 3), "joint": (3, 2, 2)}
GAP = 0.2  # by how much the planted token leads along the hidden direction
_TRIES = 100_000


@dataclass(frozen=True)
class TokenProblem:
    """Inputs and what is held fixed, in float64.

    Args:
        x: tokens ``[n, T, d]``.
        labels: 1 or -1, ``[n]``.
        w: key weights ``[d, d]``, keys are x @ w.
        v: head ``[d]``, by which scores are labels * (x @ v).
        start_p, start_v: where descent starts, ``[d]``; zero where None.
    """

    x: Tensor
    labels: Tensor
    w: Tensor
    v: Tensor
    start_p: Tensor | None = None
    start_v: Tensor | None = None


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _unit(direction: Tensor) -> Tensor:
    return direction / direction.norm()


def _labels(n: int) -> Tensor:
    return torch.tensor([1.0, -1.0], dtype=torch.float64).repeat((n + 1) // 2)[:n]


def random_problem(n: int, num_tokens: int, dim: int, seed: int) -> TokenProblem:
    """Normal tokens and (divided by √d) key weights, a head of norm 1; nothing says that a selection is separable."""
    generator = torch.Generator().manual_seed(seed)
    w, v = _normal(generator, dim, dim) / dim**0.5, _unit(_normal(generator, dim))
    return TokenProblem(_normal(generator, n, num_tokens, dim), _labels(n), w, v)


def planted_problem(n: int, num_tokens: int, dim: int, seed: int) -> TokenProblem:
    """Tokens whose best selection is separable: in each input the token of the highest score leads along one direction.

    An input of normal tokens is drawn until its token of the highest score, which must be positive, leads every other
    by GAP along a hidden direction at right angles to the head. W is the identity; the head has norm 1.

    Raises:
        ValueError: if ``dim`` is 1, or no such input is found in 100,000 draws.
    """
    if dim < 2:
        raise ValueError(f"dim is {dim}: a planted problem needs at least 2")
    generator = torch.Generator().manual_seed(seed)
    v, hidden, labels = _unit(_normal(generator, dim)), _normal(generator, dim), _labels(n)
    ahead = _unit(hidden - (hidden @ v) * v)  # along the head itself, inputs of opposite labels would contradict
    x = _normal(generator, n, num_tokens, dim)
    for index, label in enumerate(labels):
        for _ in range(_TRIES):
            score, lead = (label * (x[index] @ v)).max(0), x[index] @ ahead
            rest = torch.cat([lead[: score.indices], lead[score.indices + 1 :]])
            if score.values > 0 and bool((lead[score.indices] - rest >= GAP).all()):
                break
            x[index] = _normal(generator, num_tokens, dim)
        else:
            raise ValueError(
                f"no separable input with num_tokens={num_tokens}, dim={dim} in {_TRIES} draws: take fewer tokens, "
                "more dimensions, or construction='random'"
            )
    return TokenProblem(x, labels, torch.eye(dim, dtype=torch.float64), v)


# Of the released notebooks (github.com/ucr-optml/max_margin_attention), whose W is diag(1, 1, 0): tokens and first p.
_SINGLE = {"global": [[-0.1, 1, 1], [1, 0, 0.9], [0, 0, 0.9]], "local": [[-0.1, 1, 1], [1, 0, 0.9], [0, 0, 0]]}
_SINGLE_STARTS = [[0.0, y, 0] for y in (1.0, 0.5, 0.0, -0.5, -1.0, -1.5)]
_MULTI_STARTS = [[x, 0.0, 0] for x in (1.0, 0.5, 0.0, -0.5, -1.0, -1.5)]
_MULTI_CENTERS = [[1.0, 0, 0], *[[-1.0, 1, 0]] * 3, *[[-0.5, -0.5, 0]] * 3]
_LOSSES = [*range(1, 11), 100]  # C, the score of the first input's selected token
_JOINT = {"tight": [[1.0, 1], [1, -1], [0.5, 1]], "relaxed": [[1.0, 1], [1, -1], [0.5, 1.5]]}


def released_problems(construction: str) -> dict[str, TokenProblem]:
    """The problems of the code released with the paper, with their starts, by name.

    Args:
        construction: ``"single"``: 2 sets of tokens, each from 6 starts; ``"multi"``: 6 starts; ``"joint"``: 2 sets;
            ``"losses"``: n = T = 2 with a score C of 1 to 10 and of 100, on which the released code compares losses.
    """
    if construction == "losses":
        rest = (_double([1, 1]), torch.diag(_double([1, 1, 0])), _double([0, 0, 1]), _double([0, 0, 0]))
        return {
            f"C = {c}": TokenProblem(_double([[[0, 0, 0], [1, 1, c]], [[0, 0, 0], [1, -1, 1]]]), *rest) for c in _LOSSES
        }
    if construction == "joint":
        return {
            name: TokenProblem(
                _double([[[0.0, 0], token] for token in tokens]),
                *(_double([1, -1, 1]), _double([[1, 0], [0, 1]]), _double([0, 1]), _double([0, -1]), _double([-1, 0])),
            )
            for name, tokens in _JOINT.items()
        }
    if construction == "single":
        inputs, starts = {f"{name} ": _double([tokens]) for name, tokens in _SINGLE.items()}, _SINGLE_STARTS
    else:
        drawn = 0.2 * torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(0)).double()
        drawn += _double(_MULTI_CENTERS)
        drawn[..., 2] = _double([1.0, *[0.5] * 6])
        inputs, starts = {"": drawn}, _MULTI_STARTS
    w, head = torch.diag(_double([1, 1, 0])), _double([0, 0, 1])
    return {
        f"{name}{index}": TokenProblem(x, torch.ones_like(x[:, 0, 0]), w, head, _double(start))
        for name, x in inputs.items()
        for index, start in enumerate(starts)
    }


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TokenSelectionDataModule(DataModule):
    """All inputs in one batch ``(x [n, T, d], labels [n])``, float64, ``steps_per_epoch`` times per epoch.

    ``single``, ``multi`` and ``joint`` have the sizes of the paper's experiments; the tokens are drawn by
    us, as its own are not printed. ``problem`` holds the inputs, W and v.

    Args:
        construction: ``"single"`` (n = 1, T = d = 3), ``"multi"`` (3, 7, 3), ``"joint"`` (3, 2, 2): planted; or
            ``"random"``.
        seed: draws tokens, W and v; not the seed of the run.
        steps_per_epoch: how often an epoch shows the inputs.
        num_inputs, num_tokens, dim: sizes of ``"random"``.

    Raises:
        ValueError: a number is outside its limits, the construction is unknown, or has sizes of its own.

    Example:
        >>> from attnswap.datamodules import TokenSelectionDataModule
        >>> data = TokenSelectionDataModule("single", steps_per_epoch=1)
    """

    def __init__(
        self,
        construction: str = "single",
        seed: int = 0,
        steps_per_epoch: int = 1000,
        num_inputs: int | None = None,
        num_tokens: int | None = None,
        dim: int | None = None,
    ) -> None:
        super().__init__(batch_size=1, num_workers=0)
        sizes = {"num_inputs": num_inputs, "num_tokens": num_tokens, "dim": dim}
        if construction not in (*CONSTRUCTIONS, "random"):
            raise ValueError(f"construction is {construction!r}: give {', '.join(CONSTRUCTIONS)} or random")
        if construction != "random":
            given = [name for name, size in sizes.items() if size is not None]
            if given:
                raise ValueError(f"{', '.join(given)} cannot be set: construction {construction!r} has its own sizes")
            shape = CONSTRUCTIONS[construction]
        else:
            n, tokens, width = (check_at_least(name, size, 1) for name, size in sizes.items())
            shape = (n, tokens, width)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}: give an integer from 0 to 2**63 - 1")
        self.steps_per_epoch = check_at_least("steps_per_epoch", steps_per_epoch, 1)
        self.problem = (random_problem if construction == "random" else planted_problem)(*shape, seed)
        self.batch_size = shape[0]

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.problem.x.shape[-1]

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        """The inputs, ``steps_per_epoch`` times."""
        return self._loader(self.steps_per_epoch)

    def val_dataloader(self) -> TRAIN_DATALOADERS:
        """The inputs, once."""
        return self._loader(1)

    def test_dataloader(self) -> TRAIN_DATALOADERS:
        """The inputs, once: there are no others."""
        return self._loader(1)

    def predict_dataloader(self) -> TRAIN_DATALOADERS:
        """The inputs, once.

        Raises:
            ValueError: on several processes, which cannot share the one batch that there is.
        """
        if self.world_size > 1:
            raise ValueError(
                f"{type(self).__name__} has one batch, which {self.world_size} processes cannot share: predict with "
                "trainer.devices=1"
            )
        return self._loader(1)

    def _loader(self, times: int) -> DataLoader[tuple[Tensor, ...]]:
        x, labels = self.problem.x, self.problem.labels
        shown = TensorDataset(x.expand(times, *x.shape), labels.expand(times, *labels.shape))
        return DataLoader(shown, batch_size=None)
