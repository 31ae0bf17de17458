import csv

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import common, segmentation


@pytest.fixture(autouse=True)
def _threads_stay():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_table_with_a_row_a_twin_and_no_map(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    segmentation.main(["--img_size", "96", "--repeats", "1", "--threads", "1"])
    with (tmp_path / "segmentation.csv").open() as file:
        rows = {row.pop("block 0"): row for row in csv.DictReader(file)}
    assert list(rows) == ["RPC", "six plain passes", "symmetric"]
    assert rows["six plain passes"]["/ six plain passes"] == rows["symmetric"]["/ symmetric"] == "1.000"
    assert {row["N x N maps"] for row in rows.values()} == {"0"}
    assert "--img_size 96" in (tmp_path / "segmentation.md").read_text()


def test_maps_are_counted_where_they_are_made():
    step = segmentation.training_step("symmetric", 96, 1)
    with sdpa_kernel(SDPBackend.MATH), segmentation.AttentionMaps(96) as maps:
        step()
    assert maps.seen >= 2 * 14  # forward and backward, in twelve layers and the decoder's two
