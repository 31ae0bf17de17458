"""Random text in fixed order, with a padded last window, for tests of the language-modeling task."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, TOKENS = 29, 8
SMALL = {
    "class_path": "lightning_tasks.models.TransformerLM",
    "init_args": {"num_layers": 1, "dim": 8, "num_heads": 2, "mlp_dim": 8, "num_tokens": TOKENS, "dropout": 0.0},
}


def windows(count, seed):
    """(inputs, targets), each ``[count, TOKENS]``; most of the last window is padding."""
    ids = torch.randint(0, VOCAB, (count, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
    targets[-1, 3:] = -100
    return inputs, targets


class RandomText(pl.LightningDataModule):
    vocab_size = VOCAB

    def __init__(self, batch_size: int = 4, train_windows: int = 16, val_windows: int = 7):
        super().__init__()
        self.batch_size, self.train_windows, self.val_windows = batch_size, train_windows, val_windows

    def prepare_data(self):
        print("data prepared", flush=True)

    def _loader(self, count, seed):
        return DataLoader(TensorDataset(*windows(count, seed)), batch_size=self.batch_size)

    def train_dataloader(self):
        inputs, targets = windows(self.train_windows + 1, 0)
        data = TensorDataset(inputs[:-1], targets[:-1])  # whole windows only
        run = self.trainer
        # Given here because Lightning's own sampler shuffles training data whatever the loader says.
        sampler = DistributedSampler(data, run.world_size, run.global_rank, shuffle=False)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self):
        return self._loader(self.val_windows, 1)

    def test_dataloader(self):
        return self._loader(self.val_windows, 2)

    predict_dataloader = test_dataloader


def trainer(folder, **options):
    """A trainer on one CPU process that shows nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return pl.Trainer(**{"max_epochs": 1, "default_root_dir": folder, "devices": 1, **quiet, **options})
