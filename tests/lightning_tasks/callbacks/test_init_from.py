"""--init_from: a head of other classes is left out, and nothing else is."""

import pickle
import re
import warnings

import pytest
import torch
from attnswap.datamodules import DigitsDataModule
from lightning.pytorch.callbacks import ModelPruning

from attention_modules import swap_attention
from lightning_tasks import ImageClassificationTask
from lightning_tasks.callbacks import SwapAttention
from lightning_tasks.callbacks.init_from import InitFromCheckpoint
from tests.lightning_tasks.callbacks.modules import BuildsInSetup, TinyLM, fit
from tests.lightning_tasks.language_data import trainer
from tests.rows import each_row

TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}


def task(num_classes, **options):
    given = {"model_options": {**TINY, **options}, "mechanism": "rpc", "layers": [0]}
    return ImageClassificationTask(num_classes=num_classes, **given)


def saved(path, num_classes, inner=False, **options):
    """The weights of a new task, all 0.5, in a file, and the file."""
    module = task(num_classes, **options)
    module.configure_model()
    torch.nn.init.constant_(module.model.head.weight, 0.5)
    torch.nn.init.constant_(module.model.pos_embed, 0.5)
    weights = module.state_dict()
    if inner:
        weights = {name.removeprefix("model."): value for name, value in weights.items()}
    torch.save(weights if inner else {"state_dict": weights}, path)
    return weights


def started(path, num_classes=10, **options):
    module = task(num_classes, **options)
    run = trainer(path.parent, callbacks=[InitFromCheckpoint(str(path))], limit_val_batches=1)
    run.validate(module, DigitsDataModule(batch_size=10), verbose=False)
    return module.state_dict()


@pytest.mark.parametrize("inner", [False, True], ids=["of the task", "of its model"])
def test_weights_of_the_same_classes_are_all_taken_silently(tmp_path, inner):
    weights = saved(tmp_path / "a.ckpt", 10, inner)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "--init_from")
        own = started(tmp_path / "a.ckpt")
    assert all(torch.equal(own[name if name in own else f"model.{name}"], value) for name, value in weights.items())


@each_row("inner", [False, True])
def test_a_head_of_other_classes_is_left_out_with_a_warning(tmp_path, inner):
    saved(tmp_path / "a.ckpt", 7, inner)
    text = "its head (model.head.bias [7], model.head.weight [7, 16]) is not that of this model (model.head.bias [10]"
    with pytest.warns(UserWarning, match=re.escape(text)):
        own = started(tmp_path / "a.ckpt")
    assert (own["model.pos_embed"] == 0.5).all()
    assert not (own["model.head.weight"] == 0.5).any()


def test_a_file_without_weights_is_named(tmp_path):
    torch.save({"state_dict": None}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a\.ckpt: its state_dict is a NoneType; give weights by name"):
        started(tmp_path / "a.ckpt")


def test_a_file_without_a_head_is_taken(tmp_path):
    weights = saved(tmp_path / "a.ckpt", 10)
    torch.save({name: value for name, value in weights.items() if "head" not in name}, tmp_path / "b.ckpt")
    with pytest.warns(UserWarning, match=r"its head \(none\) is not that of this model"):
        assert (started(tmp_path / "b.ckpt")["model.pos_embed"] == 0.5).all()


@pytest.mark.parametrize("num_classes", [7, 10])
@pytest.mark.parametrize("change", [{"depth": 3}, {"depth": 1}, {"embed_dim": 32}], ids=str)
def test_where_more_than_the_head_differs_it_is_an_error(tmp_path, num_classes, change):
    saved(tmp_path / "a.ckpt", num_classes, **change)
    with pytest.raises(ValueError, match=r"a\.ckpt: its weights do not fit ImageClassificationTask"):
        started(tmp_path / "a.ckpt")


def test_each_module_gets_the_weights_and_none_twice(tmp_path):
    torch.save(TinyLM().state_dict(), tmp_path / "a.ckpt")
    load = InitFromCheckpoint(str(tmp_path / "a.ckpt"))
    for _ in range(2):
        module = TinyLM(lr=0.0)
        torch.nn.init.zeros_(module.net["head"].weight)
        fit(module, [load])
        assert torch.equal(module.net["head"].weight, TinyLM().net["head"].weight)
    torch.nn.init.zeros_(module.net["head"].weight)
    fit(module, [load])
    assert not module.net["head"].weight.any()


def test_what_pruning_rewinds_to_are_the_weights_of_the_file(tmp_path):
    torch.save(TinyLM().state_dict(), tmp_path / "a.ckpt")
    load = InitFromCheckpoint(str(tmp_path / "a.ckpt"))
    module = TinyLM(lr=0.0)
    torch.nn.init.ones_(module.net["head"].weight)
    fit(module, [load, ModelPruning("l1_unstructured", amount=0.3)])
    weight, given = module.net["head"].weight, TinyLM().net["head"].weight
    assert torch.equal(weight[weight != 0], given[weight != 0])
    with pytest.raises(ValueError, match="list InitFromCheckpoint before ModelPruning"):
        fit(TinyLM(), [ModelPruning("l1_unstructured"), load])
    with pytest.raises(ValueError, match="ModelPruning copies the module before its setup and configure_model"):
        fit(BuildsInSetup(), [load, ModelPruning("l1_unstructured")])


def test_weights_of_a_swapped_module_come_after_the_last_swap(tmp_path):
    trained, path = TinyLM(), tmp_path / "a.ckpt"
    for layer in (0, 1):
        swap_attention(trained, "gated", layers=[layer])
    torch.save(trained.state_dict(), path)
    first, second = (SwapAttention("gated", layers=[layer]) for layer in (0, 1))
    load, module = InitFromCheckpoint(str(path)), TinyLM(lr=0.0)
    fit(module, [first, load, second])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in trained.state_dict().items())
    assert pickle.loads(pickle.dumps(load)).path == load.path  # as for processes that are spawned
