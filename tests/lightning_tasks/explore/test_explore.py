"""`attnswap explore`: what its page holds, and what it refuses before anything is written."""

import contextlib
import html
import shutil
from importlib.metadata import version

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import nn
from transformers import BertModel, ViTConfig, ViTModel

import attnswap
from attention_modules.analysis import attention_entropy, attention_maps, largest_logit
from lightning_tasks import SegmentationTask
from lightning_tasks.__main__ import main
from lightning_tasks.analyses import subjects
from lightning_tasks.errors import UsageError
from lightning_tasks.explore import collect
from lightning_tasks.explore.page import explore
from tests.lightning_tasks.explore.pages import SIZE, Translator, data_of, maps_of, vit

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"&"


def squared(q, k, v):
    return v.square()


@pytest.fixture(scope="module")
def models():
    symmetric = vit()
    attnswap.swap_attention(symmetric, "symmetric")
    return {"softmax": vit(), "symmetric": symmetric}


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def near(found, wanted):
    """Equal to 1/255 of each head's range, and, where nothing is negative, to 1/128 of each row's largest value."""
    scale = wanted.amax((-2, -1), True).clamp(min=0) - wanted.amin((-2, -1), True).clamp(max=0)
    rows = wanted.amax(-1, True) / 128 if (wanted >= 0).all() else scale
    assert ((found - wanted).abs() <= torch.minimum(scale / 255, rows) + 1e-7).all()


def test_values_are_those_of_attention_maps(models, images):
    page = explore(models, images)
    data = data_of(page.html)
    assert [model["name"] for model in data["models"]] == ["softmax", "symmetric"]
    assert data["grids"] == {"17": [1, 4, 4]}
    assert "Patches are named" in page.html
    for number, model in enumerate(models.values()):
        wanted, rolled = attention_maps(model, images), attention_maps(model, images, rollout=True)
        for sample in range(2):
            *found, rollout = maps_of(page.html, number, sample)
            for one, name in zip(found, wanted, strict=True):
                near(one, wanted[name][sample])
            near(rollout, rolled[sample][None])


def test_statistics_are_those_of_the_layers(models, images):
    model, seen = models["softmax"], {}
    name, attention = "blocks.1.attn", models["softmax"].blocks[1].attn
    handle = attention.qkv.register_forward_hook(lambda module, args, out: seen.update(out=out))
    with torch.no_grad():
        model(images)
    handle.remove()
    q, k, _ = seen["out"].view(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    layer = data_of(explore(models, images).html)["models"][0]["layers"][1]
    assert layer["name"] == name
    wanted = attention_maps(model, images)[name]
    torch.testing.assert_close(torch.tensor(layer["entropy"]), attention_entropy(q, k))
    torch.testing.assert_close(torch.tensor(layer["sink"]), wanted.mean(2).amax(-1))
    torch.testing.assert_close(torch.tensor(layer["logit"]), largest_logit(q, k))


def test_whose_map_it_is(images):
    model = vit()
    attnswap.swap_attention(model, "rpc", iterations=3, layers=[0])
    page = explore(model, images)
    first, second = data_of(page.html)["models"][0]["layers"]
    assert (first["mechanism"], first["passes"]) == ("rpc", 3)
    assert (second["mechanism"], second["passes"]) == ("softmax", 1)
    assert "in 1 of 2 layers: shown is the last of 3 passes" in page.html
    for said in ("attnswap.attention_maps", "VisionTransformer", "attnswap.explore(...)", f"torch {version('torch')}"):
        assert said in page.html


def test_causal_padded_and_cross_maps():
    padding = torch.arange(6).expand(2, -1) >= 4
    inputs = (torch.randn(2, 6, 16), torch.randn(2, 5, 16), padding)
    tokens, source = [list("abcde")] * 2, [list("uvwxyz")] * 2
    page = explore(
        Translator(), inputs, tokens=tokens, source_tokens=source, layers=["*.self_attn", "*.multihead_attn"]
    )
    data = data_of(page.html)["models"][0]
    layers = data["layers"]
    assert [(each["cross"], each["source"], each["queries"], each["keys"]) for each in layers] == [
        (False, True, 6, 6),
        (False, False, 5, 5),
        (True, False, 5, 6),
    ]
    assert "no square maps of one size" in data["no_rollout"]
    encoder, decoder, cross = maps_of(page.html, 0, 1)
    assert (encoder[..., 4:] == 0).all()
    assert (cross[..., 4:] == 0).all()
    assert (decoder.triu(1) == 0).all()
    assert [each["unseen"][1] for each in layers] == [[4, 5], [], [4, 5]]
    assert data_of(page.html)["inputs"][1] == {
        "name": "input 2",
        "image": None,
        "tokens": tokens[1],
        "source": source[1],
    }


def test_rows_are_chosen_where_there_are_many(models, images, monkeypatch):
    page = explore(models["softmax"], images, rows=[3, -1, 0])
    data = data_of(page.html)["models"][0]["layers"]
    assert [layer["rows"] for layer in data] == [[0, 3, 16]] * 2
    wanted = attention_maps(models["softmax"], images)["blocks.1.attn"][1][:, [0, 3, 16]]
    near(maps_of(page.html, 0, 1)[1], wanted)
    assert "3 of 17: 0, 3, 16" in page.html
    monkeypatch.setattr(collect, "MOST_BYTES", 2 * 2 * 3 * 10 * 17)  # inputs, layers, heads, rows, keys
    found = data_of(explore(models["softmax"], images).html)["models"][0]["layers"]
    assert found[0]["rows"] == np.linspace(0, 16, 10).round().astype(int).tolist()
    monkeypatch.setattr(collect, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match=r"8 rows .* 1,632 bytes, and a page holds 1,000: show fewer inputs, or fewer"):
        explore(models["softmax"], images)


def test_maps_that_are_not_finite_and_negative_ones(images):
    model = vit()
    attnswap.swap_attention(model, "twicing")
    near(maps_of(explore(model, images).html, 0, 0)[0], attention_maps(model, images)["blocks.0.attn"][0])
    damaged = images.clone()
    damaged[1, :, :8, :8] = torch.nan
    page = explore(vit(), damaged)
    assert maps_of(page.html, 0, 1)[0].isnan().all()
    assert maps_of(page.html, 0, 0)[0].isfinite().all()
    assert data_of(page.html)["models"][0]["layers"][0]["entropy"][1] == [None] * 3


def test_names_of_anybody_stay_text():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    page = explore({HOSTILE: model}, torch.randn(1, 2, 16), tokens=[[HOSTILE, "b"]])
    assert "Patches are named" not in page.html
    assert data_of(page.html)["inputs"][0]["tokens"] == [HOSTILE, "b"]
    assert "<img" not in page.html
    assert "\u2028" not in page.html.partition('id="data"')[2]
    assert "<img" not in page._repr_html_()
    assert html.escape(page.html) in page._repr_html_()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": dict.fromkeys("abcde", vit())}, "5 models were given, and a page shows 1 to 4"),
        ({"models": {}}, "0 models were given"),
        ({"rows": [17]}, "no row 17 in 'blocks.0.attn': it has 17, counted"),
        ({"rows": []}, "0 rows of each map"),
        ({"tokens": [["a"]] * 3}, "equally many"),
        ({"layers": 5}, "5"),
    ],
)
def test_what_makes_no_sense_is_refused(images, change, said):
    with pytest.raises(ValueError, match=said):
        explore(**{"models": vit(), "inputs": images, **change})


def test_a_mechanism_without_a_map_and_windows_are_refused(images):
    import timm

    model = vit()
    attnswap.swap_attention(model, squared)
    with pytest.raises(UsageError, match=r"VisionTransformer: squared has no attention map.* leave its layers out"):
        explore(model, images)
    windowed = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 1, 1))
    with pytest.raises(UsageError, match=r"'layers.0.* has 32 maps for 2 inputs, as layers with windows have"):
        explore(windowed, torch.rand(2, 3, 64, 64))


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (50, 40), (80 * number, 100, 50)).save(folder / f"{number}.png")
    (folder / "0a.jpg").write_bytes(b"no image")
    return folder


def test_the_command_with_images(pictures, tmp_path, capsys):
    output = tmp_path / "explore.html"
    given = [
        "vit_tiny_patch16_224",
        "--random",
        "--images",
        pictures,
        "--count",
        2,
        "--layers",
        "0,-1",
        "--rows",
        "0,5",
    ]
    mechanisms = ["--mechanism", "softmax", "--mechanism", "rpc {iterations: 2}"]
    with pytest.warns(UserWarning, match=r"1 images cannot be read and are left out: .*0a.jpg"):
        main(["explore", *map(str, given), *mechanisms, "--output", str(output)])
    assert capsys.readouterr().out.startswith(f"explore: {output} (")
    text = output.read_text()
    data = data_of(text)
    assert [each["name"] for each in data["inputs"]] == ["0.png", "1.png"]
    assert [each["name"] for each in data["models"]] == ["softmax", "rpc {iterations: 2}"]
    assert [layer["name"] for layer in data["models"][1]["layers"]] == ["blocks.0.attn", "blocks.11.attn"]
    assert data["models"][1]["layers"][0]["passes"] == 2
    assert "random, seed 0" in text
    assert "--mechanism softmax" in text


def test_the_command_with_text(bert, tmp_path):
    file, output = tmp_path / "text.txt", tmp_path / "explore.html"
    file.write_text("\nword1 word2 word3\n\nword4\n")
    main(["explore", str(bert), "--text", str(file), "--output", str(output)])
    data = data_of(output.read_text())
    assert [each["tokens"] for each in data["inputs"]] == [["word1", "word2", "word3"], ["word4", "[UNK]", "[UNK]"]]
    assert data["inputs"][1]["name"] == "line 4: word4"
    (first, *_) = maps_of(output.read_text(), 0, 1)
    assert (first[..., 1:] == 0).all()  # padding
    swapped = shutil.copytree(bert, tmp_path / "swapped")
    model = attnswap.swap_attention
    import transformers

    loaded = transformers.BertModel.from_pretrained(bert)
    model(loaded, "symmetric")
    loaded.save_pretrained(swapped)
    main(["explore", str(bert), str(swapped), "--text", str(file), "--output", str(output)])
    found = data_of(output.read_text())["models"]
    assert [(each["name"], each["layers"][0]["mechanism"]) for each in found] == [
        (bert.name, "softmax"),
        ("swapped", "symmetric"),
    ]


def test_the_command_with_a_checkpoint_of_a_segmenter(pictures, tmp_path, monkeypatch):
    sizes = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = {"backbone": "vit_tiny_patch16_224", "img_size": SIZE, "backbone_options": sizes, "decoder": "linear"}
    task = SegmentationTask(model, num_classes=3)
    task.configure_model()
    monkeypatch.setattr(subjects, "load_model", lambda *given: task)
    output = tmp_path / "explore.html"
    with pytest.warns(UserWarning, match="left out"):
        main(["explore", "some.ckpt", "--images", str(pictures), "--output", str(output)])
    (found,) = data_of(output.read_text())["models"]
    assert (found["name"], found["about"]["checkpoint"]) == ("some.ckpt", "some.ckpt")
    assert [(layer["heads"], layer["queries"]) for layer in found["layers"]] == [(3, 17)]


class OfText(LightningModule):
    """Somebody's own module around a BERT."""

    def __init__(self, folder):
        super().__init__()
        self.bert = BertModel.from_pretrained(folder)

    def forward(self, tokens, attention_mask=None):
        return self.bert(tokens, attention_mask=attention_mask).pooler_output


class ByName(OfText):
    def forward(self, *, tokens, attention_mask):
        return super().forward(tokens, attention_mask)


class Unmasked(OfText):
    def forward(self, tokens):
        return super().forward(tokens)


@pytest.mark.parametrize("kind", [OfText, ByName, Unmasked])
def test_a_module_of_somebodys_own_is_given_the_mask_or_padding_is_told_of(bert, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(subjects, "load_model", lambda *given: kind(bert).eval())
    file, output = tmp_path / "text.txt", tmp_path / "explore.html"
    file.write_text("word1 word2 word3\nword4\n")
    said = pytest.warns(UserWarning, match=r"takes no attention_mask.* --count 1")
    with contextlib.nullcontext() if kind is not Unmasked else said:
        main(["explore", "own.ckpt", "--tokenizer", str(bert), "--text", str(file), "--output", str(output)])
    seen = maps_of(output.read_text(), 0, 1)[0][..., 1:]
    assert bool((seen == 0).all()) == (kind is not Unmasked)


class OfImages(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = vit()

    def forward(self, x):
        return self.model(x)


def test_images_of_a_module_of_somebodys_own_are_normalized_and_that_is_told(pictures, tmp_path, monkeypatch):
    (pictures / "0a.jpg").unlink()
    folder, output = str(pictures), tmp_path / "explore.html"
    found = []
    for name, model in (("own.ckpt", OfImages()), ("vit_tiny_patch16_224", vit())):
        monkeypatch.setattr(subjects, "load_model", lambda *given, model=model: model.eval())
        said = pytest.warns(UserWarning, match=r"OfImages does not say .* mean \[0.5.* pretrained_cfg")
        with said if name == "own.ckpt" else contextlib.nullcontext():
            main(["explore", name, "--images", folder, "--output", str(output)])
        found.append(maps_of(output.read_text(), 0, 1)[0])
    assert torch.equal(*found)


def oblong(of_timm):
    if of_timm:
        import timm

        return timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), embed_dim=24, depth=1, num_heads=2)
    config = ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.image_size, config.patch_size = [32, 48], 16
    return ViTModel(config)


@pytest.mark.parametrize("of_timm", [True, False])
def test_a_model_of_images_that_are_not_square_is_named(of_timm, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subjects, "load_model", lambda *given: oblong(of_timm))
    with pytest.raises(SystemExit):
        main(["explore", "vit", "--images", str(pictures), "--output", str(tmp_path / "page.html")])
    assert "takes images of 32 x 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--images", "nowhere"], "nowhere is no folder"),
        (["--images", "damaged"], "none of its 1 images can be read, e.g."),
        (["--images", "pictures", "--mechanism", "nothing"], "unknown attention mechanism 'nothing'"),
        (["--images", "pictures", *(["--mechanism", "own"] * 5)], "more than the 4 that a page shows"),
        (["--images", "pictures", "--rows", "a"], "--rows 'a' must be numbers"),
        (["--images", "pictures", "--count", "0"], "--count must be at least 1"),
        (["--images", "pictures", "--output", "pictures"], "is a folder: give a file"),
        (["--images", "pictures", "--layers", "99"], "99"),
        (["--text", "text.txt"], "takes images: give --images FOLDER"),
        (["--text", "empty.txt"], "has no line that is not empty"),
        (["--text", "nowhere.txt"], "cannot be read as UTF-8"),
    ],
)
def test_what_the_command_refuses(arguments, said, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    shutil.copy(pictures / "0a.jpg", tmp_path / "damaged")
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "empty.txt").write_text(" \n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["explore", "vit_tiny_patch16_224", "--random", "--output", "page.html", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_that_is_missing_is_named(bert, tmp_path, capsys):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(bert / name, folder)
    text.write_text("word1")
    with pytest.raises(SystemExit):
        main(["explore", str(folder), "--text", str(text), "--output", str(tmp_path / "page.html")])
    said = capsys.readouterr().err
    assert "Give --tokenizer" in said or "give --tokenizer" in said
    assert not (tmp_path / "page.html").exists()
