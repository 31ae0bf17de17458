"""`attnswap analyze lipschitz`: what it measures, what it goes on with, and what it refuses."""

import csv
import re
import shutil
import sys

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.func import jacrev

pytest.importorskip("transformers")

from transformers import AutoTokenizer, BertModel, GPT2Config

from attention_modules.analysis import layer_lipschitz_bound
from attention_modules.hosts import attention_layers
from attention_modules.naive import naive_sinkhorn
from lightning_tasks.__main__ import main
from lightning_tasks.analyses import lipschitz
from lightning_tasks.analyses.lipschitz import parse_lengths
from lightning_tasks.analyses.lipschitz_report import fit_slope
from lightning_tasks.analyses.made_by import read_made_by
from lightning_tasks.analyses.subjects import Subject
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import LOCK
from tests.lightning_tasks.twins import twin
from tests.rows import each_row


def analyze(output, *arguments):
    main(["analyze", "lipschitz", "--output", str(output), *map(str, arguments)])
    return table(output)


def table(output):
    with (output / "lipschitz.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def tiny(bert, texts):
    """The arguments of a small run."""
    return ["--model", bert, "--root", texts, "--data", "gutenberg", "--sequences", 3, "--lengths", "2,4,8"]


@pytest.mark.figures
def test_rows_are_singular_values_of_the_layer_at_its_input(bert, texts, tmp_path, tiny, capsys):
    rows = analyze(tmp_path, *tiny, "--layers", "1")
    assert [(row["length"], row["sequence"]) for row in rows] == [(n, s) for n in "248" for s in "012"]
    assert {row["converged"] for row in rows} == {"True"}
    # By hand: the second of three sequences begins at a third of the training text.
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().splitlines()
    words = " ".join(words[: len(words) * 8 // 10]).split()
    stride = len(words) // 3
    ids = AutoTokenizer.from_pretrained(bert)(" ".join(words[stride : stride + 8]))["input_ids"]
    model, seen = BertModel.from_pretrained(bert, attn_implementation="eager").eval(), []
    layer = model.encoder.layer[1].attention.self
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([ids[:4]]))
    (x,) = seen
    jacobian = jacrev(lambda x: layer(x)[0])(x).reshape(x.numel(), x.numel())
    (row,) = (row for row in rows if (row["length"], row["sequence"]) == ("4", "1"))
    assert float(row["value"]) == pytest.approx(torch.linalg.svdvals(jacobian)[0].item(), rel=1e-3)
    assert float(row["radius"]) == pytest.approx(x.norm(dim=2).max().item(), rel=1e-5)
    # The summary says what the rows say.
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "summary.md").read_text()
    fit = fit_slope(*([float(row[name]) for row in rows] for name in ("length", "value", "sequence")))
    assert f"| encoder.layer.1.attention.self | text | {fit} | 9 | 0 |" in printed
    mean = np.mean([float(row["radius"]) for row in rows if row["length"] == "8"])
    assert f"{mean:.3g}" in printed
    assert (tmp_path / "lipschitz.png").stat().st_size > 10_000


def layer_input(bert, words):
    """What the second layer of the model is given of these words, and the layer."""
    model, seen = BertModel.from_pretrained(bert, attn_implementation="eager").eval(), []
    layer = model.encoder.layer[1].attention.self
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([AutoTokenizer.from_pretrained(bert)(" ".join(words))["input_ids"]]))
    return seen[0], layer


def largest(layer, x):
    jacobian = jacrev(lambda x: layer(x)[0])(x).reshape(x.numel(), x.numel())
    return torch.linalg.svdvals(jacobian)[0].item()


def test_disjoint_sequences_come_one_after_another_by_the_power_method(bert, texts, tmp_path, tiny):
    given = ["--layers", "1", "--disjoint", "--method", "power", "--max-iter", "400"]
    rows = analyze(tmp_path, *tiny, *given)
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().splitlines()
    words = " ".join(words[: len(words) * 8 // 10]).split()
    stride = len(words) // 3
    for length, start in ((2, 0), (4, 2), (8, 6)):
        x, layer = layer_input(bert, words[stride + start : stride + start + length])
        (row,) = (row for row in rows if (row["length"], row["sequence"]) == (str(length), "1"))
        assert float(row["value"]) == pytest.approx(largest(layer, x), rel=1e-3)
    said = (tmp_path / "summary.md").read_text()
    assert "no two of any length overlap. By the power method on JᵀJ" in said


@pytest.mark.figures
def test_radii_are_swept_at_one_length_beside_the_bound(bert, texts, tmp_path, tiny, capsys):
    given = [*tiny[:-1], "4", "--layers", "1", "--radii", "16,0.5", "--adversarial", "2"]
    main(["analyze", "lipschitz", "--output", str(tmp_path), *map(str, given)])
    with (tmp_path / "radii.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["input"], row["radius"]) for row in rows[::3]] == [
        (kind, radius) for kind in ("text", "adversarial") for radius in ("0.5", "16.0")
    ]
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().split()[:4]
    x, layer = layer_input(bert, words)
    (known,) = (each for each in attention_layers(BertModel.from_pretrained(bert)) if "layer.1." in each.name)
    for radius in (0.5, 16.0):
        (row,) = (row for row in rows if (row["input"], float(row["radius"]), row["sequence"]) == ("text", radius, "0"))
        assert float(row["value"]) == pytest.approx(largest(layer, x * radius / x.norm(dim=2).max()), rel=1e-3)
        bound = layer_lipschitz_bound(known, radius=radius, num_tokens=4).item()
        assert float(row["bound"]) == pytest.approx(bound, rel=1e-6)
    assert all(float(row["value"]) <= float(row["bound"]) for row in rows)
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "summary.md").read_text()
    assert f"({bound:.3g}) |" in printed
    assert (tmp_path / "lipschitz.png").stat().st_size > 10_000
    # A mechanism that the bound does not cover has none.
    main(["analyze", "lipschitz", "--output", str(tmp_path / "l2"), *map(str, given[:-2]), "--mechanism", "l2"])
    with (tmp_path / "l2" / "radii.csv").open() as file:
        assert {row["bound"] for row in csv.DictReader(file)} == {"nan"}


def test_a_radius_that_overflows_is_named(tmp_path, tiny, capsys):
    with pytest.raises(SystemExit):
        analyze(tmp_path, *tiny[:-1], "4", "--layers", "1", "--radii", "1e30,1")
    said = r"at R = 1e\+30: fn\(x\) holds NaN .* give other layers .* or radii \(--radii\)"
    assert re.search(said, capsys.readouterr().err)


def test_the_split_of_the_text_is_a_choice(bert, texts, tmp_path, tiny):
    (row, *_) = analyze(tmp_path, *tiny, "--layers", "1", "--data", "ag_news", "--split", "test", "--lengths", "4")
    import pyarrow.parquet

    words = pyarrow.parquet.read_table(texts / "ag_news" / "data" / "test-00000-of-00001.parquet")["text"][0].as_py()
    x, layer = layer_input(bert, words.split()[:4])
    assert float(row["value"]) == pytest.approx(largest(layer, x), rel=1e-3)
    assert "sequences of the test text" in (tmp_path / "summary.md").read_text()


def test_a_mechanism_is_measured_at_the_inputs_of_the_model_as_it_was(bert, texts, tmp_path, tiny):
    plain = analyze(tmp_path / "plain", *tiny)
    for name, mechanism in (("softmax", ["softmax"]), ("l2", ["l2", "--options", '{"shared": false}'])):
        rows = analyze(tmp_path / name, *tiny, "--mechanism", *mechanism)
        for row, other in zip(rows, plain, strict=True):
            assert float(row["radius"]) == pytest.approx(float(other["radius"]), rel=1e-5)  # in the second layer too
            if name == "softmax":
                assert float(row["value"]) == pytest.approx(float(other["value"]), rel=1e-3)
    # By hand: l2 attention of the second layer at what the first one gives with softmax.
    model, seen = BertModel.from_pretrained(bert, attn_implementation="eager").eval(), []
    layer = model.encoder.layer[1].attention.self
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().split()
    with torch.no_grad():
        model(torch.tensor([AutoTokenizer.from_pretrained(bert)(" ".join(words[:4]))["input_ids"]]))

    def l2(x):
        q, k, v = (part(x).unflatten(-1, (2, 6)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
        distances = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        return ((-distances / 6**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    jacobian = jacrev(l2)(seen[0]).reshape(seen[0].numel(), -1)
    (row,) = (row for row in rows if (row["layer"][14], row["length"], row["sequence"]) == ("1", "4", "0"))
    assert float(row["value"]) == pytest.approx(torch.linalg.svdvals(jacobian)[0].item(), rel=1e-3)
    assert 'l2 {"shared": false} in its layers' in (tmp_path / "l2" / "summary.md").read_text()


def test_sinkhorn_attention_is_measured_with_its_whole_gradient(bert, texts, tmp_path, tiny):
    given = ["--mechanism", "sinkhorn", "--options", "{detach: false}", "--layers", "0"]
    (row, *_) = analyze(tmp_path, *tiny, *given)
    model, seen = BertModel.from_pretrained(bert).eval(), []
    layer = model.encoder.layer[0].attention.self
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].double()))
    words = (texts / "gutenberg" / "carroll-alice.txt").read_text().split()
    with torch.no_grad():
        model(torch.tensor([AutoTokenizer.from_pretrained(bert)(" ".join(words[:2]))["input_ids"]]))
        layer.double()

        def sinkhorn(x):
            q, k, v = (part(x).unflatten(-1, (2, 6)).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
            return naive_sinkhorn(q, k, v).transpose(1, 2).flatten()

        steps = 1e-6 * torch.eye(seen[0].numel(), dtype=torch.float64).view(-1, *seen[0].shape)
        jacobian = torch.stack([sinkhorn(seen[0] + step) - sinkhorn(seen[0] - step) for step in steps], 1) / 2e-6
    assert float(row["value"]) == pytest.approx(torch.linalg.svdvals(jacobian)[0].item(), rel=1e-3)


def test_a_killed_run_goes_on_and_stale_rows_are_not_used(tmp_path, tiny, monkeypatch, capsys):
    whole = analyze(tmp_path / "whole", *tiny)
    calls, real = [], lipschitz.local_lipschitz

    def killed(*args, **kwargs):
        calls.append(kwargs["max_iter"])
        if sum(count > 2 for count in calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    def measured():
        count = sum(count > 2 for count in calls)  # the first look at the time it takes has two
        calls.clear()
        return count

    monkeypatch.setattr(lipschitz, "local_lipschitz", killed)
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "cut", *tiny)
    assert "interrupted: 9 rows are kept" in capsys.readouterr().err
    assert len(table(tmp_path / "cut")) == 3 * 3
    assert len(read_made_by(tmp_path / "cut")) == 1
    measured()
    rows = analyze(tmp_path / "cut", *tiny)
    assert len(read_made_by(tmp_path / "cut")) == 2  # its rows are of both
    assert measured() == 3
    assert [{**row, "seconds": ""} for row in rows] == [{**row, "seconds": ""} for row in whole]
    analyze(tmp_path / "cut", *tiny[:-2], "--lengths", "2,4")
    assert measured() == 0
    # Other weights, and another text, are measured anew; a line that was cut short too, with a warning.
    monkeypatch.setattr(lipschitz, "local_lipschitz", lambda *a, **k: calls.append(k["max_iter"]) or real(*a, **k))
    random = analyze(tmp_path / "cut", *tiny, "--random", "--seed", 1, "--tokenizer", tiny[1])  # the same ids
    assert measured() == 6
    assert random[0]["value"] != rows[0]["value"]
    analyze(tmp_path / "cut", *tiny, "--data", "ag_news")
    assert measured() == 6
    kept = tmp_path / "cut" / "rows.jsonl"
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join([*lines[1:], lines[0][:40]]))
    with pytest.warns(UserWarning, match="cut short"):
        again = analyze(tmp_path / "cut", *tiny)
    assert measured() == 1
    assert [row["value"] for row in again] == [row["value"] for row in rows]


def test_a_linear_layer_keeps_its_input_under_ascent(tmp_path, tiny):
    layer = ["--layers", "encoder.layer.0.intermediate.dense"]
    rows = analyze(tmp_path, *tiny, *layer, "--lengths", "4", "--adversarial", "2")
    text, adversarial = ([row["value"] for row in rows if row["input"] == kind] for kind in ("text", "adversarial"))
    assert text == adversarial


def test_adversarial_inputs_are_less_smooth_and_have_the_norms_of_the_text(tmp_path, tiny):
    rows = analyze(tmp_path, *tiny, "--layers", "0", "--lengths", "4,8", "--adversarial", "12", "--max-iter", "100")
    text, adversarial = ([row for row in rows if row["input"] == kind] for kind in ("text", "adversarial"))
    assert len(text) == len(adversarial) == 6
    for plain, ascended in zip(text, adversarial, strict=True):
        assert float(ascended["value"]) > 1.2 * float(plain["value"])
        assert float(ascended["radius"]) == pytest.approx(float(plain["radius"]), rel=1e-5)
    assert "| adversarial |" in (tmp_path / "summary.md").read_text()


def test_vision_models_are_cut_to_the_first_tokens(texts, tmp_path, capsys):
    few = ["--data", "cifar10", "--root", texts, "--sequences", 2, "--lengths", "2,3"]
    rows = analyze(tmp_path, "--model", "test_vit", "--random", *few)
    assert {row["input"] for row in rows} == {"images"}
    assert len(rows) == 2 * 2 * len({row["layer"] for row in rows})
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "long", "--model", "test_vit", "--random", *few[:-1], "2,5000")
    assert re.search("is given [0-9]+ tokens, 5000 were asked for: give shorter --lengths", capsys.readouterr().err)
    assert {path.name for path in (tmp_path / "long").iterdir()} <= {LOCK}


@pytest.mark.parametrize(
    ("recipe", "attention", "data"),
    [
        ("max_margin/cifar10_vit_base", ["--model.mechanism=symmetric"], "cifar10"),
        ("quickstart/classification", [], "digits"),
    ],
)
def test_a_checkpoint_of_a_task_is_a_model(recipe, attention, data, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnswap"])
    monkeypatch.setenv("ATTNSWAP_DATA", str(texts))
    main(["fit", "--config", twin(recipe, tmp_path), "--trainer.max_steps=1", *attention])
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    rows = analyze(tmp_path, "--model", checkpoint, "--data", data, "--sequences", 1, "--lengths", "3")
    assert [row["layer"] for row in rows] == ["model.blocks.0.attn", "model.blocks.1.attn"]
    assert "layers: SwappedAttention" in (tmp_path / "summary.md").read_text()
    main(["analyze", "spectrum", "--model", str(checkpoint), "--output", str(tmp_path / "spectrum")])
    with (tmp_path / "spectrum" / "spectrum.csv").open() as file:
        found = list(csv.DictReader(file))
    assert {row["layer"] for row in found} == {row["layer"] for row in rows}
    if attention:  # W_q is W_k: no eigenvalue is below zero
        assert min(float(row["min"]) for row in found) > -1e-9


def test_causal_models_random_weights_and_modules_by_name(texts, tmp_path):
    GPT2Config(vocab_size=400, n_positions=32, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    given = ["--model", tmp_path / "gpt2", "--random", "--root", texts, "--data", "ag_news", "--sequences", 2]
    rows = analyze(tmp_path / "by_index", *given, "--lengths", "2:6:2")
    named = analyze(tmp_path / "by_name", *given, "--lengths", "2:6:2", "--layers", "h.*.attn")
    assert [row["value"] for row in rows] == [row["value"] for row in named]
    assert {row["length"] for row in rows} == {"2", "4", "6"}
    assert "BPE trained on it" in (tmp_path / "by_index" / "summary.md").read_text()


def test_what_fails_is_named_and_all_else_is_measured(bert, texts, tmp_path, tiny, capsys):
    model = BertModel.from_pretrained(bert)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight[6] = torch.nan
    shutil.copytree(bert, tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "out", *tiny, "--model", tmp_path / "nan")
    said = capsys.readouterr().err
    assert "layer 'encoder.layer.0.attention.self' at 8 tokens: x holds NaN or infinite numbers" in said
    assert f"; 12 rows are kept in {tmp_path / 'out'}" in said
    assert "give other layers (--layers) or lengths (--lengths), or the same command to try these again" in said
    assert {row["length"] for row in table(tmp_path / "out")} == {"2", "4"}
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 4


def test_a_failing_layer_stops_no_other_and_is_tried_again(tmp_path, tiny, monkeypatch, capsys):
    real, failing, calls = lipschitz.local_lipschitz, [True], []

    def sometimes(call, x, **options):
        calls.append(options["max_iter"])
        if failing and x.shape[1] == 4 and calls.count(50) == 3:  # layer 0 at the second length
            raise RuntimeError("no such number")
        return real(call, x, **options)

    monkeypatch.setattr(lipschitz, "local_lipschitz", sometimes)
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, *tiny)
    captured = capsys.readouterr()
    said = "ot measured: layer 'encoder.layer.0.attention.self' at 4 tokens: no such number"
    assert f"n{said}; give other" in captured.err
    assert f"N{said}." in captured.out
    assert captured.out == (tmp_path / "summary.md").read_text()
    assert (tmp_path / "lipschitz.png").is_file()
    rows = table(tmp_path)
    assert len(rows) == 5 * 3
    assert ("encoder.layer.0.attention.self", "4") not in {(row["layer"], row["length"]) for row in rows}
    failing.clear()
    calls.clear()
    assert len(analyze(tmp_path, *tiny)) == 6 * 3
    assert calls.count(50) == 1
    assert "ot measured" not in (tmp_path / "summary.md").read_text()


def test_kept_rows_that_are_no_text_are_measured_again(tmp_path, tiny):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00\x81\n{}\n")
    with pytest.warns(UserWarning, match="line 1, is cut short or of another version"):
        assert len(analyze(tmp_path, *tiny, "--lengths", "2")) == 6


@pytest.mark.parametrize(
    ("sequences", "said"),
    [(1, "one sequence only: the slopes have no interval"), (2, "intervals rest on 2 clusters"), (5, None)],
)
def test_few_sequences_are_said(sequences, said, tmp_path, tiny, capsys):
    analyze(tmp_path, *tiny, "--lengths", "2,4", "--layers", "0", "--sequences", sequences)
    summary = capsys.readouterr().out
    assert said in summary if said else "only" not in summary


SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1,), "num_heads": (2,), "num_classes": 0}


def swin(monkeypatch):
    """A Swin of one layer: 8 x 8 patches in four windows."""
    model = timm.models.swin_transformer.SwinTransformer(patch_size=4, **SWIN).eval().requires_grad_(False)
    monkeypatch.setattr(lipschitz, "read_subject", lambda _: Subject(model, torch.nn.Identity(), 32, None))


def test_windows_have_the_number_of_their_image(texts, tmp_path, monkeypatch):
    swin(monkeypatch)
    few = ["--model", "swin", "--random", "--data", "cifar10", "--root", texts, "--sequences", 2]
    rows = analyze(tmp_path, *few, "--lengths", "16")
    assert [row["sequence"] for row in rows] == ["0"] * 4 + ["1"] * 4
    alone = analyze(tmp_path / "one", *few[:-1], "1", "--lengths", "16")
    assert [float(row["value"]) for row in alone] == pytest.approx([float(row["value"]) for row in rows[:4]], rel=1e-3)


def test_a_layer_of_a_fixed_number_of_tokens_is_named_with_it(texts, tmp_path, monkeypatch, capsys):
    swin(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, "--model", "swin", "--data", "cifar10", "--root", texts, "--sequences", 2, "--lengths", "4,8")
    said = capsys.readouterr().err
    assert "layer 'layers.0.blocks.0.attn' at 4, 8 tokens: WindowAttention works with the 16 tokens" in said
    assert "as its position bias, rope or windows fix their number" in said


def test_samples_that_belong_to_no_sequence_are_refused(tmp_path, tiny, monkeypatch, capsys):
    real = lipschitz.layer_calls

    def fewer(*args):
        calls = real(*args)
        for call in calls:
            call.x = call.x[:2]
        return calls

    monkeypatch.setattr(lipschitz, "layer_calls", fewer)
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, *tiny)
    assert "its input has 2 samples for 3 sequences" in capsys.readouterr().err


def test_a_folder_without_a_vocabulary_or_with_other_weights_is_refused(bert, texts, tmp_path, capsys):
    folder = tmp_path / "folder"
    shutil.copytree(bert, folder, ignore=shutil.ignore_patterns("*token*"))
    given = ["--model", folder, "--root", texts, "--data", "gutenberg", "--sequences", 2, "--lengths", "2,4"]
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, *given)
    assert re.search(r"the tokenizer in .*folder lacks 100% of gutenberg: has it a", capsys.readouterr().err)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("layer.1.", "layer.7."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path, *given, "--tokenizer", "bpe")
    error = capsys.readouterr().err
    assert re.search(r"16 parameters have no weights there, and would be random: encoder.layer.1", error)


@each_row(
    ("arguments", "words"),
    [
        (["--lengths", "2:30:2"], "30 tokens are asked for, and .* has 24 positions: give fewer"),
        (["--lengths", "2:x"], "neither a range such as 2:100:2 nor a list"),
        (["--lengths", "0,2"], "lengths of at least 1"),
        (["--sequences", "0"], "--sequences must be at least 1, got 0"),
        (["--tol", "0"], "--tol must be above 0"),
        (["--tol", "inf"], "--tol must be above 0 and below 1, got inf"),
        (["--tol", "nan"], "--tol must be above 0 and below 1, got nan"),
        (["--sequences", "99"], "has 640 tokens, and 99 sequences of 8 .* need 792"),
        (
            ["--model", "test_vit", "--random", "--data", "digits", "--root", "{empty}"],
            "digits is in an installed package; leave it out",
        ),
        (["--sequences", "46", "--disjoint"], "has 640 tokens, and 46 sequences of 14 .* need 644"),
        (["--radii", "1,4"], "--radii are swept at one length, and --lengths gives 3: give one"),
        (["--lengths", "4", "--radii", "0,1"], "--radii '0,1' must be finite numbers above 0"),
        (["--lengths", "4", "--radii", "1,inf"], "--radii '1,inf' must be finite numbers above 0"),
        (["--lengths", "4", "--radii", "2,2.0"], "--radii '2,2.0' must be .* none twice"),
        (["--lengths", "4", "--radii", "a"], "--radii 'a' must be finite numbers"),
        (["--method", "lanczos"], "invalid choice: 'lanczos' .choose from 'golub-kahan', 'power'"),
        (["--split", "dev"], "invalid choice: 'dev' .choose from 'train', 'validation', 'test'"),
        (["--model", "test_vit", "--random", "--data", "cifar10", "--split", "test"], "--split test is of text"),
        (["--model", "test_vit", "--random", "--data", "cifar10", "--disjoint"], "--disjoint is of text"),
        (["--data", "cifar10"], "BertModel takes text: give --data gutenberg or ag_news, got cifar10"),
        (["--layers", "2"], "2 is out of range, 2 self-attention layers match"),
        (["--layers", ","], "--layers ',' has an empty part: give numbers"),
        (["--output", "{empty}/gutenberg/carroll-alice.txt/sub"], "carroll-alice.txt is a file; give a folder"),
        (["--output", "{empty}/gutenberg/carroll-alice.txt"], "carroll-alice.txt is a file; give a folder"),
        (["--layers", "decoder.*"], "'decoder.*' matches no module"),
        (["--layers", "embeddings"], "layer 'embeddings': its input must be .batch, tokens, features."),
        (["--layers", "pooler"], "layer 'pooler'.*fn must return .batch, tokens, features."),
        (["--model", "test_resnet", "--random", "--data", "cifar10"], "the model has no attention layer"),
        (["--tokenizer", "{empty}"], "no tokenizer could be loaded from .*: give --tokenizer bpe"),
        (["--model", "gone.ckpt"], "gone.ckpt: no such file"),
        (["--root", "{empty}"], "the training part of the text of gutenberg is empty, or has no whole line"),
        (["--mechanism", "hard"], "by its definition the gradient of HardAttention is not that of its output"),
        (["--mechanism", "sinkhorn"], "gradient of SinkhornAttention is not .*--options '{detach: false}'"),
        (["--mechanism", "l3"], "--mechanism l3: unknown attention mechanism 'l3'"),
        (["--mechanism", "l2", "--options", "{{share: true}}"], "L2Attention has no option 'share'; it takes shared"),
        (["--mechanism", "l2", "--options", "shared=true"], "must be a mapping"),
        (["--mechanism", "l2", "--options", "{{a"], "is neither JSON nor YAML"),
        (["--options", "{{shared: true}}"], "has no --mechanism that it is for"),
        (["--mechanism", "l2", "--layers", "pooler"], "needs attention layers that a host knows, and 'pooler' is none"),
        (["--model", "{empty}"], "could not be loaded. Give a folder with config.json and weights"),
    ],
)
def test_refusals(arguments, words, tiny, tmp_path, capsys):
    empty = tmp_path / "empty"
    (empty / "gutenberg").mkdir(parents=True)
    (empty / "gutenberg" / "carroll-alice.txt").write_text("\n\n")
    with pytest.raises(SystemExit, match="2"):
        analyze(tmp_path / "out", *tiny, *(each.format(empty=empty) for each in arguments))
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "out" / "lipschitz.csv").exists()


def test_lengths():
    assert parse_lengths("2:100:2") == tuple(range(2, 101, 2))
    assert parse_lengths("3:5") == (3, 4, 5)
    assert parse_lengths("8,4") == (4, 8)
    for wrong in ("2:4:0", "1:2:3:4", "4,4", "5:2"):
        with pytest.raises(UsageError):
            parse_lengths(wrong)


def test_the_interval_is_that_of_a_bootstrap_over_whole_sequences():
    random = np.random.default_rng(1)
    lengths, clusters = np.tile(np.arange(2, 12, 2), 6), np.repeat(np.arange(6), 5)
    own = random.normal(0.3, 0.2, size=6)
    values = 2 * lengths ** own[clusters]
    fit = fit_slope(lengths, values, clusters, draws=500)
    assert fit.slope == pytest.approx(own.mean())
    slopes = []
    for drawn in np.random.default_rng(0).integers(6, size=(500, 6)):
        kept = np.concatenate([np.flatnonzero(clusters == cluster) for cluster in drawn])
        slopes.append(np.polyfit(np.log(lengths[kept]), np.log(values[kept]), 1)[0])
    assert (fit.low, fit.high) == pytest.approx(tuple(np.quantile(slopes, [0.025, 0.975])))
    assert np.exp(fit.intercept) * 5**fit.slope == pytest.approx(
        np.exp(np.log(values).mean() + own.mean() * (np.log(5) - np.log(lengths).mean()))
    )


def test_what_cannot_be_fitted_is_not():
    assert str(fit_slope([4, 4], [1.0, 2.0], [0, 1])) == "not fitted"
    lonely = fit_slope([2, 8], [1.0, 2.0], [0, 0])
    assert str(lonely) == "0.500"
    assert np.isnan(lonely.low)
    assert fit_slope([2, 4, 8], [1.0, 0.0, 2.0], [0, 1, 2]).points == 2
