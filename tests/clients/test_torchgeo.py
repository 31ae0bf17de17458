"""torchgeo's command, its classification task and a timm ViT: callbacks come by `--config` alone."""

from pathlib import Path

import pytest

from tests.clients.checks import check_client, configurations

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_classification_task_of_torchgeo(tmp_path, monkeypatch):
    pytest.importorskip("torchgeo")
    from torchgeo.main import main
    from torchgeo.trainers import ClassificationTask

    own = str(Path(__file__).with_name("torchgeo.yaml"))

    def train(kind, folder):
        monkeypatch.chdir(folder)
        main(["fit", "--config", own, *configurations(kind)])

    check_client(train, tmp_path, ClassificationTask, [f"model.blocks.{index}.attn" for index in range(6)])
