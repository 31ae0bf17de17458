"""`attnswap analyze parallel-context`: entropies are those of eager maps under the same mask."""

import csv
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from lightning_tasks.__main__ import main
from lightning_tasks.analyses.parallel_context import split_context
from tests.lightning_tasks.analyses.conftest import WORDS

SIZES = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def llama(bert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    shutil.copytree(bert, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, max_position_embeddings=64, initializer_range=0.5, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def analyze(output, model, texts, *arguments):
    given = ["--model", model, "--data", "gutenberg", "--root", texts, "--output", output, *arguments]
    main(["analyze", "parallel-context", *map(str, given)])
    with (output / "parallel_context.csv").open() as file:
        return list(csv.DictReader(file))


def test_positions_and_what_is_seen():
    seen, positions = split_context(6, 2, 3)
    assert positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    expected = torch.block_diag(*[torch.ones(2, 2).tril()] * 3, torch.zeros(2, 2))
    expected[6:] = torch.ones(2, 8).tril(6)
    assert torch.equal(seen, expected.bool())
    assert torch.equal(split_context(6, 2, 1)[0], torch.ones(8, 8).tril().bool())


@pytest.mark.figures
def test_entropies_are_those_of_eager_maps(llama, texts, tmp_path, capsys):
    given = ["--samples", 1, "--context", 12, "--rest", 4, "--parts", "1,3"]
    rows = analyze(tmp_path, llama, texts, *given)
    assert [(row["parts"], row["head"]) for row in rows] == [(p, h) for p in "13" for _ in "01" for h in "01"]
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().split()[:16]
    tokens = torch.tensor([1 + WORDS.index(word) for word in words]).view(1, 16)
    model = LlamaModel.from_pretrained(llama, attn_implementation="eager").eval()
    for parts in (1, 3):
        seen, positions = split_context(12, 4, parts)
        mask = torch.zeros(16, 16).masked_fill(~seen, -1e30).expand(1, 1, 16, 16)
        with torch.no_grad():
            maps = model(tokens, attention_mask=mask, position_ids=positions[None], output_attentions=True).attentions
        of = [float(row["entropy"]) for row in rows if row["parts"] == str(parts)]
        expected = [-torch.special.xlogy(each, each)[:, :, 12:].sum(-1).mean((0, 2)) for each in maps]
        torch.testing.assert_close(torch.tensor(of), torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert (tmp_path / "parallel_context.png").stat().st_size > 5_000
    assert "3 parts:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "5"], "--parts 5: each must be a number that divides --context 12"),
        (["--parts", "0"], "--parts 0: each must be a number"),
        (["--rest", "0"], "--rest must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_their_range_are_refused(arguments, said, llama, texts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        analyze(tmp_path, llama, texts, "--samples", 1, "--context", 12, "--rest", 4, "--parts", 1, *arguments)
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_model_that_sees_what_follows_is_refused(bert, texts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        analyze(tmp_path, bert, texts, "--samples", 1, "--context", 12, "--rest", 4, "--parts", "1,3")
    assert "(BertModel) is no causal model: 'encoder.layer.0.attention.self' sees the tokens" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
