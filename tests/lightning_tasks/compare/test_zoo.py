"""The comparisons of all mechanisms: each fits into the model at full size, and controls are as large as they say."""

import pytest

from attention_modules import swap_attention
from lightning_tasks import ImageClassificationTask
from lightning_tasks.models import TransformerLM
from lightning_tasks.recipes import CONFIGS, read_settings

ZOO = {name: read_settings(CONFIGS / "zoo" / f"{name}.yaml") for name in ("images", "text")}
TEXT = read_settings(CONFIGS / "rpc" / "wikitext2_small_vocabulary.yaml")["model"]["init_args"]["model"]["init_args"]


ATTENTION = ("mechanism", "options", "layers", "other_attention")


def image_model(asked):
    """The network of a variant, from its settings."""
    given = {**ZOO["images"]["settings"], **asked}
    options = given["model.model_options"] | {"mlp_ratio": given.get("model.model_options.mlp_ratio", 4.0)}
    attention = {name: given[key] for name in ATTENTION if (key := f"model.{name}") in given}
    task = ImageClassificationTask(model="vit_tiny_patch16_224", num_classes=10, model_options=options, **attention)
    task.configure_model()
    return task.model


def text_model(asked):
    """The network of a variant, from its settings."""
    width = asked.get("model.model.init_args.mlp_dim", TEXT["mlp_dim"])
    model = TransformerLM(**{**TEXT, "mlp_dim": width}, vocab_size=400)
    swaps = asked.get("trainer.callbacks+", [])
    for given in (each["init_args"] for each in (swaps if isinstance(swaps, list) else [swaps])):
        swap_attention(model, given["mechanism"], layers=given.get("layers"), **given.get("options", {}))
    return model


def counts(name):
    build = {"images": image_model, "text": text_model}[name]
    models = {variant: build(asked) for variant, asked in ZOO[name]["variants"].items()}
    return {variant: sum(each.numel() for each in model.parameters()) for variant, model in models.items()}


@pytest.mark.parametrize(
    ("name", "pairs", "hidden_unit"),
    [
        ("images", {"gated, element-wise": "softmax wider", "scaled": "softmax widest"}, 3 * (2 * 48 + 1)),
        ("text", {"gated, element-wise": "softmax wider", "scaled": "softmax wider"}, 2 * (2 * 128 + 1)),
    ],
)
def test_every_mechanism_fits_and_controls_of_equal_parameters_are_equal(name, pairs, hidden_unit):
    """As near as the number of hidden units of an MLP lets them be (``hidden_unit``: the parameters of one)."""
    found = counts(name)
    for variant, control in pairs.items():
        assert control in ZOO[name]["references"][variant]
        added, by_control = found[variant] - found["softmax"], found[control] - found["softmax"]
        assert added > 0
        assert by_control == pytest.approx(added, abs=hidden_unit / 2)
    larger = {variant for variant, count in found.items() if count > 1.02 * found["softmax"]}
    assert larger - {"softmax wider", "softmax widest"} <= {*pairs}, "these need a control of equal parameters"


@pytest.mark.parametrize("name", ZOO)
def test_what_is_fixed_before_the_runs(name):
    content = ZOO[name]
    (rates,) = content["grid"].values()
    assert len(rates) == 3
    assert content["select"]["seeds"] == [100]
    assert content["metrics"][0] == {"images": "test/top1", "text": "test/perplexity"}[name]
    assert next(iter(content["variants"])) == "softmax"
