"""Without the extra [mmseg]: the error says what to install, and everything else goes on."""

import sys

import pytest

from lightning_tasks import SegmentationTask


@pytest.mark.parametrize("library", ["mmcv", "mmseg"])
def test_the_error_says_which_extra_to_install(monkeypatch, library):
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'attnswap\[mmseg\]'"):
        SegmentationTask(model={"mmseg_config": "segmenter_vit-t_mask_8xb1-160k_ade20k-512x512"})
    SegmentationTask()


def test_a_key_that_it_does_not_know_needs_no_extra():
    with pytest.raises(ValueError, match="unknown key 'size'; it takes mmseg_config, crop_size"):
        SegmentationTask(model={"mmseg_config": "segmenter", "size": 3})
