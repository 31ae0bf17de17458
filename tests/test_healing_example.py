"""examples/healing on a tiny encoder: the comparison runs, and what the module asks of embeddings is what it says."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

from examples.healing import sentences
from lightning_tasks.__main__ import main
from lightning_tasks.recipes import read_settings
from tests.lightning_tasks.programs import ROOT

FILE = ROOT / "examples" / "healing" / "compare_minilm.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random BERT and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", "and", "a", "in", "news"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), initializer_range=0.3, **sizes)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.slow
def test_it_compares_heals_and_asks(folder, tmp_path, data_folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = tmp_path / "compare.yaml"
    text = FILE.read_text(encoding="utf-8").replace("examples/healing/minilm.yaml", str(FILE.parent / "minilm.yaml"))
    kept = "variants:\n  softmax: {}\n  gated: {model.init_args.mechanism: gated}\n"
    last = '  "gated, not healed": {model.init_args.mechanism: gated, trainer.limit_train_batches: 0}\n'
    start = text.index("references:")
    references = 'references: {gated: ["gated, not healed"]}\n'
    chosen.write_text(text[:start] + references + kept + last, encoding="utf-8")
    sizes = {"num_train": 64, "num_test": 40, "batch_size": 8}
    given = {"model.init_args.folder": folder, "data.init_args.folder": folder, "data.init_args.root": data_folder}
    given |= {f"data.init_args.{name}": value for name, value in sizes.items()} | {"trainer.max_steps": 6}
    stages = '[{"match": "layers", "steps": 3}, {"match": "output"}]'
    callback = (
        f'[{{"class_path": "attnswap.callbacks.Heal", "init_args": {{"network": "encoder", "stages": {stages}}}}}]'
    )
    settings = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    settings += ["--set", f"trainer.callbacks={callback}"]
    main(["compare", str(chosen), "--seeds", "0", "--output", str(tmp_path / "out"), *settings])
    rows = (tmp_path / "out" / "summary.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert {row.split(",")[0] for row in rows} == set(read_settings(FILE)["metrics"])


def test_neighbours_kept_and_the_probe():
    before = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert sentences.neighbours_kept(before, before) == 1.0
    assert sentences.neighbours_kept(torch.roll(before, 1, 0), before) < 0.6
    label = (before[:, 0] > 0).long()
    assert sentences.probe_accuracy(before[:30], label[:30], before[30:], label[30:]) >= 0.8
    assert sentences.probe_accuracy(before[:30], label[:30], before[30:], 1 - label[30:]) <= 0.2
