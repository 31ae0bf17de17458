"""Tiny models and texts that the analyses are run on."""

import shutil
from random import Random

import pytest

WORDS = [f"word{index}" for index in range(40)]


@pytest.fixture(scope="session")
def texts(tmp_path_factory, tiny_data):
    """A root folder with a book of 800 words in place of Alice, AG News of 400, and tiny CIFAR-10."""
    import pyarrow
    import pyarrow.parquet

    root, random = tmp_path_factory.mktemp("texts"), Random(0)
    lines = [" ".join(random.choices(WORDS, k=8)) for _ in range(100)]
    (root / "gutenberg").mkdir()
    (root / "gutenberg" / "carroll-alice.txt").write_text("\n\n".join(lines))
    (root / "ag_news" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        path = root / "ag_news" / "data" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": lines[:50]}), path)
    shutil.copytree(tiny_data / "cifar10", root / "cifar10")
    return root


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The folder of a BERT of two layers, 12 wide, two heads, 24 positions, with a tokenizer of the words."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    import torch

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=24, initializer_range=0.5, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return folder
