"""pytorch-forecasting's TFT, on `nn.MultiheadAttention`, in LightningCLI: callbacks come by `--config` alone."""

from pathlib import Path

import pytest

from tests.clients.checks import check_client, configurations

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_temporal_fusion_transformer(tmp_path, monkeypatch):
    pytest.importorskip("pytorch_forecasting")
    from lightning.pytorch.cli import LightningCLI
    from pytorch_forecasting.metrics import MAE
    from pytorch_forecasting.models.temporal_fusion_transformer._tft_v2 import TFT

    from tests.clients.series import METADATA, Series

    own = str(Path(__file__).with_name("forecasting.yaml"))

    def train(kind, folder):
        monkeypatch.chdir(folder)
        LightningCLI(TFT, Series, args=["fit", "--config", own, *configurations(kind)])

    check_client(train, tmp_path, TFT, ["self_attention"], loss=MAE(), metadata=METADATA)


def test_attention_that_writes_itself_out_is_named():
    """The library's first TemporalFusionTransformer has heads that share their values."""
    pytest.importorskip("pytorch_forecasting")
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import InterpretableMultiHeadAttention
    from torch import nn

    from attention_modules import AttentionSwapError, swap_attention

    with pytest.raises(AttentionSwapError, match=r"no host knows .*InterpretableMultiHeadAttention"):
        swap_attention(nn.Sequential(InterpretableMultiHeadAttention(2, 8)), "rpc")
