"""LightningCLI of `pytorch_lightning` with a Hugging Face ViT and LoRA: callbacks come by `--config` alone."""

from pathlib import Path

import pytest

from tests.clients.checks import check_client, configurations

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_hugging_face_vit_with_lora(tmp_path, monkeypatch):
    for package in ("pytorch_lightning", "transformers", "peft"):
        pytest.importorskip(package)
    from pytorch_lightning.cli import LightningCLI

    from tests.clients.vit_lora import Noise, ViTWithLoRA

    own = str(Path(__file__).with_name("vit_lora.yaml"))

    def train(kind, folder):
        monkeypatch.chdir(folder)
        LightningCLI(ViTWithLoRA, Noise, args=["fit", "--config", own, *configurations(kind)])

    layers = [f"model.base_model.model.vit.layers.{index}.attention" for index in range(2)]
    check_client(train, tmp_path, ViTWithLoRA, layers)
