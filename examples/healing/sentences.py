"""A project of its own: a pretrained sentence encoder, the texts that it is healed on, and what is asked of it.

`compare_minilm.yaml` beside this file compares mechanisms with it; docs/results/healing.md shows what came out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoTokenizer

import attnswap


def read_texts(root: Path, name: str, split: str, count: int, skip: int = 0) -> tuple[list[str], list[int]]:
    """The first long enough texts of AG News (with their class) or WikiText-2 (class -1) after `skip` of them."""
    from datasets import load_dataset

    folder = root / {"ag_news": "ag_news/data", "wikitext": "wikitext/wikitext-2-v1"}[name]
    rows = load_dataset("parquet", data_files=[str(path) for path in sorted(folder.glob(f"{split}-*"))], split="train")
    long = [row for row in rows if len(row["text"]) > 100][skip : skip + count]
    return [row["text"] for row in long], [row.get("label", -1) for row in long]


class Sentences(pl.LightningDataModule):
    """Batches (ids, mask, class): texts of AG News and WikiText-2 to train on, others to be asked about.

    Args:
        folder: the Hugging Face folder whose tokenizer is used.
        root: folder with data sets.
        batch_size: texts in a batch; half of them are of AG News.
        num_tokens: tokens of a text; longer ones are cut.
        num_train: texts to train on.
        num_test: texts of AG News that the probe learns from, as many that it is tested on, and half as many of
            WikiText-2.
    """

    def __init__(
        self,
        folder: str,
        root: str,
        batch_size: int = 16,
        num_tokens: int = 32,
        num_train: int = 4000,
        num_test: int = 400,
    ) -> None:
        super().__init__()
        self.folder, self.root, self.batch_size, self.num_tokens = folder, Path(root), batch_size, num_tokens
        self.num_train, self.num_test = num_train, num_test

    def setup(self, stage: str) -> None:
        half, asked = self.num_train // 2, self.num_test
        self.train = self._encoded(("ag_news", "train", half, asked), ("wikitext", "train", half, 0))
        news = (("ag_news", "train", asked, 0), ("ag_news", "test", asked, 0))
        self.test = self._encoded(*news, ("wikitext", "test", asked // 2, 0))

    def _encoded(self, *parts: tuple[str, str, int, int]) -> TensorDataset:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        found = [read_texts(self.root, *part) for part in parts]
        texts, labels = ([each for pair in found for each in pair[index]] for index in (0, 1))
        ids = tokenizer(texts, padding="max_length", truncation=True, max_length=self.num_tokens, return_tensors="pt")
        return TensorDataset(ids["input_ids"], ids["attention_mask"], torch.tensor(labels))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 4 * self.batch_size)


class SentenceEncoder(pl.LightningModule):
    """A pretrained encoder whose mean token is a text's embedding; `Heal` gives it something to learn.

    Args:
        folder: a Hugging Face folder, as of all-MiniLM-L6-v2.
        mechanism: what its attention is swapped for.
        options: those of the mechanism.
        lr: learning rate of AdamW.
    """

    def __init__(
        self, folder: str, mechanism: str = "softmax", options: dict[str, Any] | None = None, lr: float = 2e-4
    ) -> None:
        super().__init__()
        self.folder, self.lr = folder, lr
        self.encoder = AutoModel.from_pretrained(folder)
        attnswap.swap_attention(self.encoder, mechanism, **(options or {}))
        self.embedded: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The embeddings ``[B, C]`` of texts ``[B, N]``, of length 1."""
        return _embedding(self.encoder, ids, mask)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, _ = batch
        return 0.0 * self(ids, mask).sum()  # Heal's loss takes its place

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)

    def on_test_start(self) -> None:
        self.before = AutoModel.from_pretrained(self.folder).eval().to(self.device)
        self.embedded = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        ids, mask, label = batch
        self.embedded.append((self(ids, mask), _embedding(self.before, ids, mask), label))

    def on_test_epoch_end(self) -> None:
        now, before, label = (torch.cat(parts).cpu() for parts in zip(*self.embedded, strict=True))
        news, (probe, asked) = label >= 0, torch.arange(int((label >= 0).sum())).chunk(2)
        self.log("test/cosine_ag_news", F.cosine_similarity(now[news], before[news]).mean())
        self.log("test/cosine_wikitext", F.cosine_similarity(now[~news], before[~news]).mean())
        self.log("test/neighbours_kept", neighbours_kept(now[asked], before[asked]))
        self.log("test/probe_accuracy", probe_accuracy(now[probe], label[probe], now[asked], label[asked]))


def _embedding(encoder: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return F.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def neighbours_kept(now: Tensor, before: Tensor, count: int = 10) -> float:
    """The share of a text's nearest texts, by cosine, that were its nearest before."""
    nearest = []
    for embedded in (now, before):
        likeness = embedded @ embedded.T
        nearest.append(likeness.fill_diagonal_(-2.0).topk(count).indices)
    return (nearest[0][:, :, None] == nearest[1][:, None]).any(-1).float().mean().item()


def probe_accuracy(train: Tensor, train_label: Tensor, test: Tensor, test_label: Tensor) -> float:
    """Accuracy of a logistic regression on the embeddings."""
    from sklearn.linear_model import LogisticRegression

    probe = LogisticRegression(max_iter=1000).fit(train.numpy(), train_label.numpy())
    return float(np.mean(probe.predict(test.numpy()) == test_label.numpy()))
