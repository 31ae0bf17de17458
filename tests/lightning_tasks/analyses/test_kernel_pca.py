"""`attnswap analyze kernel-pca`: its rows are the measures of what the layers see."""

import csv
import re
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import BertModel, DeiTConfig, DeiTModel, GPT2Config, ViTImageProcessor

from attention_modules.analysis import compare_values, kernel_pca, projection_loss
from lightning_tasks.__main__ import main
from lightning_tasks.analyses.kernel_pca import Seen, measure, observe, refuse_other_maps
from lightning_tasks.analyses.made_by import read_made_by
from lightning_tasks.analyses.subjects import load_subject, with_mechanism


def test_images_are_normalized_as_the_processor_of_a_model_does(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    DeiTModel(DeiTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(tmp_path)
    images, half = torch.rand(2, 3, 16, 16), torch.full((3, 1, 1), 0.5)
    torch.testing.assert_close(load_subject(str(tmp_path)).prepare(images), (images - half) / half)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    ViTImageProcessor(image_mean=mean, image_std=std).save_pretrained(tmp_path)
    expected = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(load_subject(str(tmp_path)).prepare(images), expected)


def analyze(output, *arguments):
    main(["analyze", "kernel-pca", "--output", str(output), *map(str, arguments)])
    with (output / "kernel_pca.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.figures
def test_rows_of_a_text_model(bert, texts, tmp_path, capsys):
    given = ["--model", bert, "--data", "gutenberg", "--root", texts, "--samples", 2, "--length", 16]
    rows = analyze(tmp_path, *given)
    assert len(rows) == 2 * 2 * 2 * 3  # layers, heads, samples, and the two controls
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "summary.md").read_text()
    assert (tmp_path / "kernel_pca.png").stat().st_size > 10_000
    (made,) = read_made_by(tmp_path)
    assert made.command.startswith("attnswap analyze kernel-pca --output ")
    # By hand, of the second head of the second layer on the first sample.
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().split()[:16]
    ids = torch.tensor([[1 + int(word.removeprefix("word")) for word in words]])
    model, seen = BertModel.from_pretrained(bert, attn_implementation="eager").eval(), {}
    layer = model.encoder.layer[1].attention.self
    for name in ("query", "key", "value"):
        projection = getattr(layer, name)
        projection.register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
    layer.register_forward_hook(lambda module, args, out: seen.update(h=out[0]))
    with torch.no_grad():
        model(ids)
    q, k, v, h = (seen[name][None, :, :, 6:] for name in ("query", "key", "value", "h"))
    (row,) = (
        row
        for row in rows
        if (row["layer"], row["head"], row["sample"], row["values"])
        == ("encoder.layer.1.attention.self", "1", "0", "layer")
    )
    expected = {name: each.item() for name, each in compare_values(v, kernel_pca(k).values).items()}
    expected |= {"signed_loss": projection_loss(q, k, h).signed.item(), "h": h.double().square().sum(-1).mean().item()}
    for name, value in expected.items():
        assert float(row[name]) == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_causal_layers_have_a_projection_loss_and_no_predicted_values(texts, tmp_path):
    GPT2Config(vocab_size=400, n_positions=32, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    given = ["--data", "ag_news", "--root", texts, "--samples", 2, "--length", 12]
    rows = analyze(tmp_path, "--model", tmp_path / "gpt2", "--random", *given)
    assert len(rows) == 4
    assert all(row["matched_cosine"] == "nan" and float(row["absolute_loss"]) > 0 for row in rows)
    assert (
        "Causal, masked or with a position bias, so that V̂ is not defined: h.0.attn."
        in (tmp_path / "summary.md").read_text()
    )


def test_controls_of_many_draws_have_intervals(bert, texts, tmp_path, capsys):
    given = ["--model", bert, "--data", "gutenberg", "--root", texts, "--samples", 2, "--length", 16]
    one, rows = analyze(tmp_path / "one", *given), analyze(tmp_path, *given, "--draws", 3)
    assert rows == one  # the table has the first draw
    assert not (tmp_path / "one" / "draws.csv").exists()
    draws, intervals = ([*csv.DictReader((tmp_path / name).open())] for name in ("draws.csv", "intervals.csv"))
    assert len(draws) == 2 * (1 + 2 * 3)  # layers; own values, and two controls
    assert len(intervals) == 3 * 9 * 2  # both layers and all of them; measures; controls
    layer = {"layer": "encoder.layer.1.attention.self", "values": "random linear map"}
    cka = [float(row["linear_cka"]) for row in draws if layer.items() <= row.items()]
    first = [float(row["linear_cka"]) for row in rows if layer.items() <= row.items()]
    assert cka[0] == pytest.approx(np.mean(first))
    assert len(set(cka)) == 3
    (found,) = (row for row in intervals if {**layer, "measure": "linear_cka"}.items() <= row.items())
    half = 4.302653 * np.std(cka, ddof=1) / 3**0.5  # the quantile of Student's t with two degrees of freedom
    expected = {"mean": np.mean(cka), "low": np.mean(cka) - half, "high": np.mean(cka) + half, "most": max(cka)}
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, rel=1e-6)
    assert int(found["below"]) == sum(value < float(found["own"]) for value in cka)
    layers = [float(row["linear_cka"]) for row in draws if row["values"] == "layer"]
    assert any(
        row["layer"] == "all layers" and float(row["own"]) == pytest.approx(np.mean(layers)) for row in intervals
    )
    assert f"[{expected['low']:.3g}, {expected['high']:.3g}] | {found['below']} of 3" in capsys.readouterr().out


def test_scaled_attention_has_the_values_that_it_mixes(bert, texts, tmp_path):
    given = ["--model", bert, "--data", "gutenberg", "--root", texts, "--samples", 1, "--length", 16, "--layers", 0]
    subject = with_mechanism(load_subject(str(bert)), None, "scaled", {"num_tokens": 16})
    mechanism = subject.model.encoder.layer[0].attention.self.mechanism
    torch.nn.init.normal_(mechanism.s)
    ids, name = torch.arange(16).view(1, -1), "encoder.layer.0.attention.self"
    seen = observe(subject, ids, [name])[name]
    plain = observe(load_subject(str(bert)), ids, [name])[name]
    torch.testing.assert_close(seen.v, plain.v - mechanism.s @ plain.v)
    refuse_other_maps({name: seen})
    rows = analyze(tmp_path, *given, "--mechanism", "scaled", "--options", "{num_tokens: 16}")  # where S is 0
    other = analyze(tmp_path / "plain", *given)
    assert float(rows[0]["rbf_cka"]) == pytest.approx(float(other[0]["rbf_cka"]), rel=1e-4)


def test_vision_models(texts, tmp_path):
    rows = analyze(
        tmp_path, "--model", "test_vit", "--random", "--data", "cifar10", "--root", texts, "--samples", 1, "--layers", 0
    )
    assert {row["values"] for row in rows} == {"layer", "random values", "random linear map"}
    assert all(0 <= float(row["linear_cka"]) <= 1 for row in rows)


def test_queries_that_are_the_very_keys_are_brought_to_the_scale_of_the_kernel():
    k, v, h = torch.randn(3, 1, 2, 17, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone, copied = (
        measure("layer", Seen(None, "SoftmaxAttention", q, k, v, h, None, False, 0.7, asks=True))[0]
        for q in (k, k.clone())
    )
    assert alone == copied


def test_values_that_are_a_random_linear_map_are_like_that_control(bert, texts, tmp_path):
    rows = analyze(
        tmp_path,
        "--model",
        bert,
        "--random",
        "--tokenizer",
        bert,
        "--data",
        "gutenberg",
        "--root",
        texts,
        "--length",
        20,
    )

    def mean(kind):
        return np.mean([float(row["eigen_residual"]) for row in rows if row["values"] == kind])

    assert abs(mean("layer") - mean("random linear map")) < 0.5 * abs(mean("layer") - mean("random values"))


def test_a_layer_that_fails_leaves_the_others(bert, texts, tmp_path, capsys):
    model = BertModel.from_pretrained(bert)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.fill_(torch.nan)
    shutil.copytree(bert, tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    given = ["--data", "gutenberg", "--root", texts, "--samples", 2, "--length", 16]
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "out", "--model", tmp_path / "nan", *given)
    said = " ".join(capsys.readouterr().err.split())
    assert "layer 'encoder.layer.1.attention.self': q holds NaN" in said
    assert "results of 1 of 2 layers are in" in said
    assert "Not measured: layer 'encoder.layer.1" in (tmp_path / "out" / "summary.md").read_text()
    with (tmp_path / "out" / "kernel_pca.csv").open() as file:
        assert {row["layer"] for row in csv.DictReader(file)} == {"encoder.layer.0.attention.self"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "0"], "--samples must be at least 1"),
        (["--draws", "0"], "--draws must be at least 1"),
        (
            ["--mechanism", "sinkhorn", "--options", "{iterations: 5}"],
            "layer 'encoder.layer.0.attention.self': SinkhornAttention, iterations=5 gives something else than softmax",
        ),
        (["--length", "30"], "30 tokens are asked for, and .* has 24 positions: give fewer"),
        (["--length", "5"], "layer 'encoder.layer.0.attention.self': 5 tokens have at most 4 principal components"),
        (["--layers", "embeddings"], "embeddings"),
        (["--model", "test_resnet", "--random", "--data", "cifar10"], "the model has no attention layer"),
    ],
)
def test_refusals(arguments, words, bert, texts, tmp_path, capsys):
    given = ["--model", bert, "--data", "gutenberg", "--root", texts, "--samples", 2, "--length", 16]
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, *given, *arguments)
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
