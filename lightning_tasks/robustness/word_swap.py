"""Word swap: a share of the words of a text replaced by one generic token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_tasks.robustness.linf import is_share

IGNORED = -100


def swap_words(
    inputs: Tensor,
    targets: Tensor,
    *,
    share: float = 0.025,
    token: int = 0,
    keep: Sequence[int] = (1,),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A text with a share of its words replaced by one generic token, wherever they stand: as input and as target.

    Our reading of the word-swap attack that RPC-Attention's language model was tested with (Teo and Nguyen, NeurIPS
    2024): words are drawn at random, independently of the model, and the generic token is `<unk>`. Special tokens,
    those that are the generic token already among them, are no words and are never drawn, so that ``share`` is the
    share of the words that change. A word that ends one window and begins the next is replaced in both or in neither.

    Args:
        inputs: ``[N, T]`` int64, the windows of a text in order, as the text data modules of this project cut it.
        targets: ``[N, T]``, each the token after its input; -100 where there is none.
        share: share of the words to replace, in [0, 1].
        token: id of the generic token (`<unk>`), itself no word.
        keep: ids of further special tokens (`<eos>`), never replaced.
        seed: of the draw.

    Returns:
        Inputs, targets, and which targets were replaced (bool), each ``[N, T]``.

    Raises:
        ValueError: if ``share`` is not in [0, 1], or the shapes are not those of windows.
    """
    if not is_share(share):
        raise ValueError(f"share is {share!r}: give the share of words to swap, in [0, 1]; 2.5% is 0.025")
    if inputs.ndim != 2 or inputs.shape != targets.shape:
        raise ValueError(f"inputs and targets must both be [N, T], got {list(inputs.shape)} and {list(targets.shape)}")
    # Position p of the text is target p of all windows in a row, and the input right after it.
    drawn = torch.rand(targets.numel() + 1, generator=torch.Generator().manual_seed(seed)) < share
    drawn = drawn.to(inputs.device)
    drawn[0] = False  # what stands before the text
    special = torch.tensor([token, *keep], dtype=inputs.dtype, device=inputs.device)

    def replaced(tokens: Tensor, chosen: Tensor) -> Tensor:
        return chosen.view(tokens.shape) & ~torch.isin(tokens, special) & (tokens != IGNORED)

    in_inputs, in_targets = replaced(inputs, drawn[:-1]), replaced(targets, drawn[1:])
    return inputs.masked_fill(in_inputs, token), targets.masked_fill(in_targets, token), in_targets
