"""Raw files of the page of CamVid that are of other cells than its comparison."""

import shutil

import pytest

from docs.pages.errors import PageError
from docs.pages.results.rpc import segmentation
from tests.pages.toy import ROOT


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "docs" / "results" / "rpc_segmentation"
    shutil.copytree(ROOT / "docs" / "results" / "rpc_segmentation", copy)
    return copy


@pytest.mark.parametrize(
    ("name", "read", "said"),
    [
        ("classes.csv", segmentation.of_classes, r"classes\.csv and results\.csv are of other cells: softmax seed 8"),
        ("first_images.csv", segmentation.read_attacked, r"where first_images\.csv has .* of another checkpoint"),
    ],
)
def test_values_of_other_cells_are_refused(tmp_path, folder, name, read, said):
    assert read(segmentation.PAGE.raw(tmp_path))
    lines = (folder / name).read_text().splitlines()
    cells = lines[1].split(",")
    place = lines[0].split(",").index("iou" if name == "classes.csv" else "miou")
    cells[place] = str(float(cells[place]) / 2)
    (folder / name).write_text("\n".join([lines[0], ",".join(cells), *lines[2:], ""]))
    with pytest.raises(PageError, match=said):
        read(segmentation.PAGE.raw(tmp_path))
