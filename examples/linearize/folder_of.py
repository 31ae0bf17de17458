"""The Hugging Face model of a run of LanguageModelingTask, with its tokenizer, as a folder.

python examples/linearize/folder_of.py RUN/checkpoints/last.ckpt FOLDER
"""

import sys

from attnswap.datamodules import WikiTextDataModule
from transformers import PreTrainedTokenizerFast

from attnswap.tasks import LanguageModelingTask


def main(checkpoint: str, folder: str) -> None:
    task = LanguageModelingTask.load_from_checkpoint(checkpoint, map_location="cpu")
    task.configure_model()
    task.model.save_pretrained(folder)
    data = WikiTextDataModule(name="wikitext-2-v1", tokenizer="bpe", vocab_size=4096)
    data.setup()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data._entry.folder / "bpe.json"), unk_token="<unk>", bos_token="<eos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
