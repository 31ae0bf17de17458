"""A Hydra project with a `configs/` of its own and torchvision's ViT: callbacks come by `callbacks=NAME` alone."""

from pathlib import Path

import pytest

from lightning_tasks import load_swapped
from tests.clients.checks import check_client

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_hydra_project(tmp_path):
    hydra = pytest.importorskip("hydra")
    from tests.clients.hydra_project.train import Classifier, train

    def composed(*overrides):
        with hydra.initialize_config_dir(str(Path(__file__).parent / "hydra_project/configs"), version_base="1.3"):
            return hydra.compose("train", list(overrides))

    def run(kind, folder):
        train(composed(f"callbacks={kind}", f"folder={folder}"))

    net = hydra.utils.instantiate(composed().model.net)
    layers = [f"net.encoder.layers.encoder_layer_{index}.self_attention" for index in range(2)]
    check_client(run, tmp_path, Classifier, layers, net=net, weights_only=False)  # it holds Hydra's partial optimizer
    (path,) = (tmp_path / "swapped").rglob("*.ckpt")
    with pytest.raises(ValueError, match=r"holds hydra\..*where you trust the file, pass weights_only=False"):
        load_swapped(Classifier, path, net=net)
