"""A small recipe, a comparison of three variants of it, and its cells of one seed."""

import pytest
import yaml

from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.recipes.variants import read_variants

DEMO = "tests.lightning_tasks.demo.DemoModule"


@pytest.fixture
def demo(tmp_path):
    trainer = {"accelerator": "cpu", "max_steps": 2, "limit_train_batches": 2, "limit_val_batches": 1}
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": DEMO}, "trainer": trainer}))
    return path


@pytest.fixture
def comparison(demo, tmp_path):
    variants = {
        "slow": None,
        "fast 1e-1": {"model.rate": 0.5},
        "watched": {"trainer.callbacks+": {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}},
    }
    path = tmp_path / "comparison.yaml"
    path.write_text(yaml.safe_dump({"base": str(demo), "variants": variants}, sort_keys=False))
    return path


@pytest.fixture
def cells(comparison, tmp_path):
    return plan_cells(read_variants(str(comparison)), [0], tmp_path / "out")
