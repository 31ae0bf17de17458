"""A task's choice of attention: options that nothing uses are said."""

import warnings

import pytest

from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask
from lightning_tasks.training.mechanisms import attention_spec
from tests.lightning_tasks.language_data import SMALL, VOCAB
from tests.lightning_tasks.training.test_mean import MASKS, VIT

LEFT_OVER = {"attention": "softmax", "attention_options": {"iterations": 2, "lam": 4.0}}
TASKS = {
    "language": lambda: LanguageModelingTask(SMALL, vocab_size=VOCAB, **LEFT_OVER),
    "images": lambda: ImageClassificationTask("vit_tiny_patch16_224", 6, model_options=VIT, **LEFT_OVER),
    "masks": lambda: SegmentationTask(MASKS, num_classes=3, **LEFT_OVER),
}


@pytest.mark.parametrize("kind", TASKS)
def test_options_that_a_recipe_leaves_for_softmax_are_said(kind):
    """They are no error: tasks with such options were trained, and their checkpoints load."""
    said = r"softmax' takes no options.*'iterations': 2.* is not used.*--model\.attention_options null"
    with pytest.warns(UserWarning, match=said):
        task = TASKS[kind]()
    task.configure_model()


def test_softmax_without_options_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [attention_spec("softmax", options) for options in (None, {})] == ["softmax"] * 2
        assert attention_spec("rpc", {"iterations": 2}) == "rpc"
