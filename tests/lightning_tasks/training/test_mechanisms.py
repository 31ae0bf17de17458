"""A task's choice of attention: options that nothing uses are said."""

import warnings

import pytest
import torch

from attention_modules.hosts import attention_layers
from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask
from lightning_tasks.training.mechanisms import attention_spec
from tests.lightning_tasks.language_data import SMALL, VOCAB
from tests.lightning_tasks.training.test_mean import MASKS, VIT
from tests.rows import each_row

LEFT_OVER = {"mechanism": "softmax", "options": {"iterations": 2, "lam": 4.0}}
TASKS = {
    "language": lambda: LanguageModelingTask(SMALL, vocab_size=VOCAB, **LEFT_OVER),
    "images": lambda: ImageClassificationTask("vit_tiny_patch16_224", 6, model_options=VIT, **LEFT_OVER),
    "masks": lambda: SegmentationTask(MASKS, num_classes=3, **LEFT_OVER),
}


@each_row("kind", TASKS)
def test_options_that_a_recipe_leaves_for_softmax_are_said(kind):
    """They are no error: tasks with such options were trained, and their checkpoints load."""
    said = r"softmax' takes no options.*'iterations': 2.* is not used.*--model\.options null"
    with pytest.warns(UserWarning, match=said):
        task = TASKS[kind]()
    task.configure_model()


def test_softmax_without_options_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [attention_spec("softmax", options) for options in (None, {})] == ["softmax"] * 2
        assert attention_spec("rpc", {"iterations": 2}) == "rpc"


@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("name", ["neutreno", "gated"])
def test_mechanisms_that_need_more_of_their_layers(name, layers):
    chosen = {"mechanism": name, "layers": layers}
    images = ImageClassificationTask("vit_tiny_patch16_224", 6, model_options={**VIT, "depth": 2}, **chosen)
    images.configure_model()
    assert images(torch.randn(2, 3, VIT["img_size"], VIT["img_size"])).isfinite().all()
    model = {**SMALL, "init_args": {**SMALL["init_args"], "num_layers": 2}}
    text = LanguageModelingTask(model, vocab_size=VOCAB, **chosen)
    text.configure_model()
    assert text.model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    swapped = [type(layer.mechanism).__name__ for layer in attention_layers(text)]
    assert swapped.count("SoftmaxAttention") == (0 if layers is None else len(swapped) - 1)


def _small(kind, **chosen):
    if kind == "language":
        return LanguageModelingTask(SMALL, vocab_size=VOCAB, **chosen)
    if kind == "images":
        return ImageClassificationTask("vit_tiny_patch16_224", 6, model_options=VIT, **chosen)
    return SegmentationTask(MASKS, num_classes=3, **chosen)
