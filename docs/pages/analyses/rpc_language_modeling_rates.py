"""RPC-Attention at tuned rates: the learning rate that was tried after the runs."""

from __future__ import annotations

from collections.abc import Callable

from docs.pages.errors import PageError
from docs.pages.language import Folder
from docs.pages.numbers import signed
from lightning_tasks.compare.record import read_record


def words(folder: Folder) -> dict[str, Callable[..., str]]:
    """`larger`, of the scores in `edge/comparison.json`, on the seed of the choice alone."""

    def larger(config: str, digits: int = 2) -> str:
        """By how much the largest rate that was tried after the runs changes the score of the largest before."""
        record = read_record(folder.path / "edge")
        scores = (
            {choice.variant: [tried.score for tried in choice.tried] for choice in record.choices} if record else {}
        )
        if config not in scores:
            raise PageError(f"{folder.path / 'edge'} has no scores of {config}")
        return signed(scores[config][-1] - scores[config][-2], digits)

    return {"larger": larger}
