"""Names of metrics: split and joined in one place."""

import time

from hypothesis import given, settings, strategies as st

from lightning_tasks.runs.metric_names import MetricName, in_stage, robustness_name
from tests.rows import each_row

PIECES = [
    *("train", "val", "test", "loss", "mean", "layer_0", "layer_00", "layer_12", "layer_norm", "head_03", "pass_1"),
    *("/", "_step", "_epoch", "dataloader_idx_0", "dataloader_idx_", "é", "\n", ""),
]


@each_row(
    ("text", "parts"),
    [
        ("val/attention/entropy/layer_00", MetricName("attention/entropy", "layer_00", stage="val")),
        ("qk_spectrum/variance/layer_11/head_03", MetricName("qk_spectrum/variance", "layer_11", "head_03")),
        ("val/pursuit/sparsity/layer_00/pass_2", MetricName("pursuit/sparsity", "layer_00", "pass_2", "val")),
        ("qk_spectrum/mean/mean", MetricName("qk_spectrum/mean", "mean")),
        ("train/loss_step", MetricName("loss", stage="train", interval="step")),
        ("val/loss_epoch/dataloader_idx_1", MetricName("loss", stage="val", interval="epoch", loader="1")),
        ("trainable/layer_norm/scale", MetricName("trainable/layer_norm/scale")),
        ("loss", MetricName("loss")),
        ("val", MetricName("val")),
        ("mean", MetricName("mean")),
        ("", MetricName("")),
    ],
)
def test_the_parts_of_a_name(text, parts):
    assert MetricName.parse(text) == parts
    assert str(parts) == text


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from(PIECES)).map("/".join), st.lists(st.sampled_from(PIECES)).map("".join)
    )
)
def test_any_name_is_joined_as_it_was(text):
    assert str(MetricName.parse(text)) == text


def test_what_a_name_says():
    head = MetricName.parse("val/attention/entropy/layer_02/head_03")
    assert (head.layer, head.kind, head.statistic, head.group) == (2, "head", "entropy", "val/attention/entropy")
    assert (head.label, head.is_mean, head.is_below("val/attention")) == ("layer_02/head_03", False, True)
    assert not head.is_below("val/att")
    mean = MetricName.parse("attention/entropy/mean")
    assert (mean.layer, mean.label, mean.is_mean) == (None, "mean", True)
    assert str(MetricName.parse("train/loss_step").at("epoch")) == "train/loss_epoch"
    assert MetricName.parse("train/loss_step/dataloader_idx_0").plain == "train/loss"
    assert in_stage("val", "attention/entropy/mean") == "val/attention/entropy/mean"
    figure = robustness_name("word swap", "", "perplexity/of text")
    assert figure == "robustness/word_swap/perplexity_of_text"
    assert MetricName.parse(figure).is_robustness
    assert not MetricName.parse("val/robustness/x").is_robustness


def test_a_long_name_from_a_file_takes_no_time():
    started = time.monotonic()
    for text in ("/layer_1/x" * 30_000 + "/", "_step" * 60_000, "a/mean" * 50_000, "val/" * 70_000):
        MetricName.parse(text)
    assert time.monotonic() - started < 5
