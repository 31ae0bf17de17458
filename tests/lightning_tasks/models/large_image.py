"""What a test runs as a program: it prints the most memory that the masks of one large image took."""

import resource
import sys
from pathlib import Path

import torch

from lightning_tasks import SegmentationTask

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = {"backbone": "deit_tiny_patch16_224", "backbone_options": {"depth": 1}}
    task = SegmentationTask(model, num_classes=150)
    task.configure_model()
    with torch.inference_mode():
        masks = task.eval().predict_masks(torch.rand(1, 3, 1024, 2048))
    assert masks.shape == (1, 1024, 2048)
    if sys.platform == "linux":  # where the peak of getrusage is inherited from the process that started this one
        print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
