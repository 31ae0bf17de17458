"""Layers that keep their attention: every n-th, or those that a drift ranks as the dearest."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from attention_modules.analysis import swap_drift
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.drift_report import rows_of, write_report
from lightning_tasks.callbacks import SwapAttention
from lightning_tasks.files.load import load_swapped
from lightning_tasks.language_modeling import LanguageModelingTask
from lightning_tasks.training.kept_layers import check_swapped_layers, to_swap
from tests.lightning_tasks.callbacks.healing.healed import LAYERS, TOKENS, Task, data
from tests.lightning_tasks.callbacks.modules import fit
from tests.rows import each_row

NAMES = ["0", "1", "2", "3", "4", "5", "6"]
TABLE = "mechanism,layer,output_error\n"


@pytest.fixture
def ranking(tmp_path):
    """Of all layers of `Task`'s network but under names of its own, the first layer's error made the largest."""
    drift = swap_drift(Task().net, "symmetric", torch.randn(4, TOKENS, 8))
    write_report(rows_of("symmetric", "", drift), "", tmp_path)
    return tmp_path / "drift.csv", drift.ranked()[-1].layer


def kept(names, every, ranking=None):
    layers = check_swapped_layers({"keep_every": every, "ranking": ranking}, "rpc")
    assert check_swapped_layers(layers, "rpc") == layers  # as a checkpoint brings them
    swapped = to_swap(names, layers)
    return [name for name in names if name not in swapped]


@pytest.mark.parametrize(("every", "expected"), [(2, ["1", "3", "5"]), (3, ["2", "5"]), (7, ["6"])])
def test_the_last_of_every_group_is_kept(every, expected):
    assert kept(NAMES, every) == expected


def test_a_ranking_says_which(tmp_path):
    path = tmp_path / "drift.csv"
    errors = [0.1, 0.7, 0.2, float("nan"), 0.3, 0.4, 0.5]
    rows = "".join(f"rpc,{name},{error}\nsink,{name},1\n" for name, error in zip(NAMES, errors, strict=True))
    path.write_text(TABLE + rows + "rpc,all,9\n")
    assert kept([f"net.{name}" for name in NAMES], 3, path) == ["net.1", "net.3"]


@each_row(
    ("text", "every", "message"),
    [
        (TABLE + "rpc,0,1\n", 8, "keep_every=8 keeps none of 7 layers: give at most 7"),
        ("layer,epoch\n0,1\n", 2, "is no drift.csv of attnswap drift"),
        ("", 2, "is no drift.csv of attnswap drift"),
        (TABLE + "sink,0,1\n", 2, "has no rows of 'rpc', but of sink: rank it"),
        (TABLE + "rpc,0,1\n", 2, "has 0 rows for layer '1'; it ranks 0"),
        (
            TABLE + "rpc,0,many\n",
            2,
            "is no drift.csv of attnswap drift: could not convert .*many",
        ),
        (TABLE + "rpc,0,1\nrpc,0,2\n", 2, "is no drift.csv of attnswap drift: it has two rows of 'rpc' for layer '0'"),
        (TABLE + "rpc,0\n", 2, "is no drift.csv of attnswap drift"),
        (TABLE + "rpc,0,\0\n", 2, "is no drift.csv of attnswap drift"),
        ("\udcff", 2, "is no drift.csv of attnswap drift"),
    ],
)
def test_what_does_not_say_it_is_refused(tmp_path, text, every, message):
    path = tmp_path / "drift.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        kept(NAMES, every, path)


def test_a_fit_swaps_the_others_and_its_checkpoint_knows_them(tmp_path, ranking):
    path, dearest = ranking
    swap = SwapAttention("symmetric", layers={"keep_every": 2, "ranking": path})
    trainer = fit(Task(), [swap], data())
    assert [row.name for row in swap.report] == [
        name for name in (f"net.{each}" for each in LAYERS) if dearest not in name
    ]
    checkpoint = tmp_path / "after.ckpt"
    trainer.save_checkpoint(checkpoint)
    loaded = load_swapped(Task, checkpoint)
    assert [dearest in name for name, part in loaded.named_modules() if hasattr(part, "mechanism")] == [False]


@each_row(
    ("layers", "message"),
    [
        ({"ranking": "drift.csv"}, "layers must be integers, None for all, or a mapping such as"),
        ({"keep_every": 2, "where": "*"}, "layers must be integers, None for all, or a mapping such as"),
        ({"keep_every": 1}, "keep_every must be an integer of at least 2, got 1"),
        ({"keep_every": 2, "ranking": "nowhere.csv"}, "ranking: nowhere.csv is no file; give the drift.csv"),
        ({"keep_every": 2, "ranking": 3}, "ranking must be the path of a drift.csv that attnswap drift wrote, got 3"),
        ({"keep_every": 2, "ranking": {"0": float("nan")}}, r"ranking\['0'\] must be"),
    ],
)
@pytest.mark.parametrize(
    "taker", [lambda layers: SwapAttention("sink", layers=layers), partial(LanguageModelingTask, vocab_size=9)]
)
def test_choices_that_say_nothing_are_refused(taker, layers, message):
    with pytest.raises(ValueError, match=message):
        taker(layers=layers)


@pytest.mark.parametrize("model", [{"model_type": "llama"}, "TransformerLM"])
def test_a_task_swaps_all_but_the_kept_layers(model):
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    own = {"class_path": "TransformerLM", "init_args": {"dim": 8, "num_heads": 2, "mlp_dim": 8, "num_tokens": 8}}
    spec = {**model, **small} if isinstance(model, dict) else own | {"init_args": {**own["init_args"], "num_layers": 4}}
    task = LanguageModelingTask(spec, 9, "sink", layers={"keep_every": 2}, other_attention="softmax")
    task.configure_model()
    found = [type(part.mechanism).__name__ == "SinkAttention" for part in task.modules() if hasattr(part, "mechanism")]
    assert found.count(True) == 2
    assert len(attention_layers(task.model)) == 4


def test_a_checkpoint_knows_the_ranking_without_its_file(tmp_path):
    path = tmp_path / "drift.csv"
    path.write_text(TABLE + "sink,layers.0.self_attn,2\nsink,layers.1.self_attn,1\n")
    spec = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    task = LanguageModelingTask(
        {**spec, "num_attention_heads": 2}, 9, "sink", layers={"keep_every": 2, "ranking": path}
    )
    trainer = fit(task, (), DataLoader(TensorDataset(*torch.randint(9, (2, 4, 6)))))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    path.unlink()
    loaded = LanguageModelingTask.load_from_checkpoint(tmp_path / "after.ckpt")
    swapped = [name for name, part in loaded.named_modules() if hasattr(part, "mechanism")]
    assert swapped == ["model.model.layers.1.self_attn"]
