"""Compare softmax and symmetric attention on digits: the same seeds, and so the same images in the same order.

``python examples/compare_two_mechanisms.py`` trains six small ViTs, in seconds. Three seeds show how it is done and
decide little; ``attnswap compare`` runs many, resumes, and writes tables and figures.
"""

import lightning as L
import torch
from attnswap.datamodules import DigitsDataModule
from scipy.stats import ttest_rel

from attnswap.tasks import ImageClassificationTask

SEEDS = range(3)
SIZE = dict(
    img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=1, num_heads=4, class_token=False, global_pool="avg"
)
QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


def top1(mechanism, seed):
    """Top-1 accuracy on the validation images after training with this seed."""
    L.seed_everything(seed, verbose=False)
    task = ImageClassificationTask(
        num_classes=10,
        mechanism=mechanism,
        model_options=SIZE,
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
    )
    trainer = L.Trainer(max_epochs=4, accelerator="cpu", **QUIET)
    trainer.fit(task, DigitsDataModule())
    return trainer.callback_metrics["val/top1"].item()


softmax = [top1("softmax", seed) for seed in SEEDS]
symmetric = [top1("symmetric", seed) for seed in SEEDS]
for name, values in (("softmax", softmax), ("symmetric", symmetric)):
    std, mean = torch.std_mean(torch.tensor(values))
    print(f"{name:10} top-1 accuracy {mean:.3f} ± {std:.3f}")

paired = ttest_rel(symmetric, softmax)
interval = paired.confidence_interval()
print(f"symmetric - softmax: 95% interval [{interval.low:+.3f}, {interval.high:+.3f}], p = {paired.pvalue:.2f}")
