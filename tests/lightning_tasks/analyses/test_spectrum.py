"""`attnswap analyze spectrum`: eigenvalues are those of the whole matrix, whatever holds q and k."""

import csv

import pytest
import torch

pytest.importorskip("transformers")

from transformers import BertModel, LlamaConfig

from lightning_tasks.__main__ import main


def analyze(output, *arguments):
    main(["analyze", "spectrum", "--output", str(output), *map(str, arguments)])
    found = []
    for name in ("spectrum", "eigenvalues"):
        with (output / f"{name}.csv").open() as file:
            found.append(list(csv.DictReader(file)))
    return found


@pytest.mark.figures
def test_before_and_after_stand_side_by_side(bert, tmp_path, capsys):
    rows, values = analyze(tmp_path, "--model", bert, bert, "--random", "--seed", 3)
    assert [(row["model"], row["layer"][14], row["head"]) for row in rows] == [
        (model, layer, head) for model in ("before", "after") for layer in "01" for head in "01"
    ]
    layer = BertModel.from_pretrained(bert).encoder.layer[1].attention.self
    w_q, w_k = (part.weight.detach().double()[6:] for part in (layer.query, layer.key))
    whole = torch.linalg.eigvals(w_q.T @ w_k)  # all twelve, of which six are zero
    (row,) = (row for row in rows if (row["model"], row["layer"][14], row["head"]) == ("after", "1", "1"))
    mean = whole.mean()
    assert float(row["mean"]) == pytest.approx(mean.real.item(), rel=1e-6)
    assert float(row["variance"]) == pytest.approx((whole - mean).abs().square().mean().item(), rel=1e-6)
    assert float(row["scale"]) == pytest.approx((w_q.T @ w_k).square().sum().item(), rel=1e-6)
    of = [each for each in values if (each["model"], each["layer"][14], each["head"]) == ("after", "1", "1")]
    sizes = sorted(abs(complex(float(each["real"]), float(each["imaginary"]))) for each in of)
    assert sizes == pytest.approx(sorted(whole.abs().tolist())[6:], rel=1e-6)
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "summary.md").read_text()
    assert f"before: {bert} (BertModel, random weights, seed 3); after: {bert} (BertModel, its own weights)" in printed
    both = [float(row["mean"]) for row in rows if row["model"] == "after" and row["layer"][14] == "1"]
    assert f"{sum(both) / 2:.3g} [{min(both):.3g}, {max(both):.3g}]" in printed
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000


def test_one_model_whatever_it_takes(tmp_path):
    rows, _ = analyze(tmp_path, "--model", "test_vit", "--random", "--layers", "0,-1")
    assert {row["model"] for row in rows} == {"model"}
    assert {row["layer"] for row in rows} == {"blocks.0.attn", "blocks.5.attn"}


def test_a_spectrum_that_is_not_that_of_the_logits_is_said(tmp_path, capsys):
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 20}
    LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes).save_pretrained(tmp_path)
    rows, _ = analyze(tmp_path / "out", "--model", tmp_path, "--random")
    assert len(rows) == 4  # grouped keys are those of each query head
    printed = capsys.readouterr().out
    assert printed.count("Not the spectrum of the logits in layers.0.self_attn and layers like it: ") == 1
    assert printed.count("Not the spectrum") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "a", "b", "c"], "--model takes one model, or two side by side, got 3"),
        (["--model", "test_vit", "test_vit"], "--model test_vit is given twice: name another, or --random"),
        (
            ["--model", "test_vit", "{bert}", "--random"],
            "test_vit has [2, 2, 2, 2, 2, 2] and {bert} has [2, 2]; give --layers",
        ),
        (["--model", "test_vit", "--random", "--layers", "head"], "'head' is no attention layer that a host knows"),
        (["--model", "test_resnet", "--random"], "has no attention layer"),
        (["--model", "gone.ckpt"], "gone.ckpt: no such file"),
    ],
)
def test_refusals(arguments, said, bert, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "out", *(each.format(bert=bert) for each in arguments))
    assert said.format(bert=bert) in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
