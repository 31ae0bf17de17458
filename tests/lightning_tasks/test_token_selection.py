"""The task: what learns, by which steps, and what a checkpoint keeps."""

import lightning.pytorch as pl
import pytest
import torch
from attnswap.datamodules import TokenSelectionDataModule

from lightning_tasks import TokenSelectionTask
from lightning_tasks.analyses.descent import gradient_path
from lightning_tasks.token_selection import LOSSES, NormalizedGradientDescent, unit
from tests.rows import each_row


def fit(folder, steps=20, construction="multi", precision=None, **options):
    task, data = TokenSelectionTask(**options), TokenSelectionDataModule(construction, steps_per_epoch=steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(task, data)
    return task, data, trainer


def test_only_p_learns_by_steps_of_one_length(tmp_path):
    task, data, trainer = fit(tmp_path)
    assert torch.equal(task.model.v, data.problem.v)
    assert torch.equal(task.model.w, data.problem.w)
    torch.testing.assert_close(task.model.p.detach(), gradient_path(data.problem, steps=20).p[-1])
    assert 0 < task.model.p.norm() <= 20 * 0.1 + 1e-9
    assert trainer.callback_metrics["val/loss"] < 0.7
    probability = task.model.probabilities(data.problem.x).amax(-1).mean()
    assert trainer.callback_metrics["val/probability"].item() == pytest.approx(probability.item(), rel=1e-5)


def test_joint_and_plain_gradient_descent(tmp_path):
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}
    task, data, _ = fit(tmp_path, construction="joint", learn=["p", "v"], optimizer=sgd, form="plain")
    path = gradient_path(data.problem, joint=True, steps=20, normalized=False, lr=1.0, form="plain")
    torch.testing.assert_close(task.model.p.detach(), path.p[-1])
    torch.testing.assert_close(task.model.v.detach(), path.v[-1])
    assert task.model.p.norm() > 0


def test_checkpoint_loads_without_the_data(tmp_path):
    task, data, trainer = fit(tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = TokenSelectionTask.load_from_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(again(data.problem.x), task(data.problem.x))


def test_unit_does_not_underflow_and_keeps_zero():
    tiny = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    torch.testing.assert_close(unit(tiny), torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert unit(torch.zeros(3)).eq(0).all()


def test_losses_fall_as_the_margin_grows():
    x = torch.linspace(-2, 400, 50, dtype=torch.float64).requires_grad_()
    for name, loss in LOSSES.items():
        (slope,) = torch.autograd.grad(loss(x).sum(), x)
        assert slope.lt(0).all(), name  # also where softplus(-x) would have been rounded to zero


@each_row(
    ("options", "words"),
    [
        ({"learn": ["q"]}, "learn must name some of p, v, w"),
        ({"learn": []}, "learn must name some"),
        ({"learn": "pv"}, r"learn must be a list of names, got 'pv': give \[p, v, w\] or some"),
        ({"dim": 0}, "dim must be an integer of at least 1, got 0"),
        ({"dim": 2.5}, "dim must be an integer of at least 1, got 2.5"),
        ({"loss": "hinge"}, "loss must be one of logistic"),
        ({"form": "exact"}, "form must be one of difference"),
    ],
)
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        TokenSelectionTask(**options)


def test_bad_widths_and_rates(tmp_path):
    with pytest.raises(ValueError, match="the width is unknown"):
        TokenSelectionTask().configure_model()
    with pytest.raises(ValueError, match="dim=5 is not the 3 of the data module"):
        fit(tmp_path, dim=5)
    for lr in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="lr must be positive and finite"):
            NormalizedGradientDescent([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@each_row("precision", ["16-true", "bf16-true"])
def test_less_than_float64_is_refused(tmp_path, precision):
    with pytest.raises(ValueError, match=rf"precision is '{precision}': token selection needs float64.*give 64-true"):
        fit(tmp_path, precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_float64_under_the_other_precisions(tmp_path, precision):
    task, _, _ = fit(tmp_path, precision=precision)
    assert task.model.p.dtype == torch.float64
    assert torch.equal(task.model.p.detach(), fit(tmp_path)[0].model.p.detach())
