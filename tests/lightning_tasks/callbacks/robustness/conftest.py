"""A tiny classifier that was trained, folders of images, and attacks that are counted."""

import inspect

import pytest
import torch
from PIL import Image

from lightning_tasks.robustness.attacks.table import ATTACKS
from tests.lightning_tasks.robustness.modules import TinyClassifier, random_images


@pytest.fixture(scope="session")
def state():
    """Weights of a classifier that is right about most images."""
    torch.manual_seed(0)
    module = TinyClassifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    images, labels = random_images(100, 12, seed=0)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()
    return module.state_dict()


@pytest.fixture
def module(state):
    module = TinyClassifier()
    module.load_state_dict(state)
    return module


@pytest.fixture
def folders(tmp_path):
    """A folder of images of two of five classes, and one of others."""
    generator = torch.Generator().manual_seed(0)
    for root, names in (("shifted", ("n01", "n04")), ("inside", ("n00", "n02")), ("outside", ("x", "y"))):
        for name in names:
            (tmp_path / root / name).mkdir(parents=True)
            for count in range(3):
                pixels = torch.randint(0, 256, (14, 14, 3), generator=generator, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / root / name / f"{count}.png")
    (tmp_path / "wnids.txt").write_text("n00\nn01\nn02\nn03\nn04\n")
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """How often each attack ran; an attack named in the set fails."""
    calls, failing = [], set()
    for name, attack in list(ATTACKS.items()):

        def function(*args, name=name, original=attack.function, **options):
            calls.append(name)
            if name in failing:
                raise KeyboardInterrupt
            return original(*args, **options)

        function.__signature__ = inspect.signature(attack.function)
        monkeypatch.setitem(ATTACKS, name, type(attack)(function, attack.white_box, attack.passes))
    return calls, failing
