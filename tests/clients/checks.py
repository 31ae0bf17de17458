"""What is checked of every client: three runs of it, without our callbacks, with monitors, and swapped with LocAteR.

A run is read as its user would: the CSV log, the figures and the checkpoint in the folder that the client's own
logger chose.
"""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_tasks import load_swapped

CALLBACKS = {"plain": [], "monitors": ["monitors.yaml"], "swapped": ["swapped.yaml"]}
HERE = Path(__file__).parent
WATCHED = ["attention/entropy/mean", "val/attention/entropy/mean", "qk_spectrum/variance/mean"]


def configurations(kind: str) -> list[str]:
    """Arguments of a LightningCLI that bring the callbacks of a run, after the client's own configuration."""
    return [argument for name in CALLBACKS[kind] for argument in ("--config", str(HERE / name))]


def check_client(train: Callable[[str, Path], None], folder: Path, cls: type, layers: Sequence[str], **kwargs) -> None:
    """Train thrice, and look at what is left of each run."""
    for kind in CALLBACKS:
        (folder / kind).mkdir()
        train(kind, folder / kind)
    plain, watched, swapped = (_checkpoint(folder / kind) for kind in CALLBACKS)
    assert plain["global_step"] >= 2
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(watched[key], plain[key], rtol=0, atol=0)
    assert watched["lr_schedulers"] == plain["lr_schedulers"]

    per_layer = [f"val/lipschitz/layer_{index:02d}" for index in range(len(layers))]
    _check_logged(folder / "monitors", [*WATCHED, *per_layer])
    passes = [f"val/pursuit/sparsity/layer_{index:02d}/pass_1" for index in range(len(layers))]
    _check_logged(folder / "swapped", [*WATCHED, *per_layer, *passes, "locater/penalty"])
    for kind in ("monitors", "swapped"):
        drawn = {path.stem.split("layer_")[1][:2] for path in (folder / kind).rglob("attention_maps_layer_*.png")}
        assert drawn == {f"{index:02d}" for index in range(len(layers))}

    (plan,) = [state["plan"] for name, state in swapped["callbacks"].items() if name.startswith("SwapAttention")]
    assert plan["mechanism"] == "rpc"
    assert plan["layers"] == list(layers)
    module = load_swapped(cls, _path(folder / "swapped"), trust_checkpoint=True, strict=True, **kwargs)
    found = [name for name, part in module.named_modules() if type(part).__name__ == "RPCAttention"]
    assert found == [f"{name}.mechanism" for name in layers]
    torch.testing.assert_close(module.state_dict(), swapped["state_dict"], rtol=0, atol=0)
    module.load_state_dict(plain["state_dict"])  # strictly, as weights of before the swap are loaded


def _path(folder: Path) -> Path:
    (path,) = folder.rglob("*.ckpt")
    return path


def _checkpoint(folder: Path) -> dict:
    return torch.load(_path(folder), weights_only=False)


def _check_logged(folder: Path, names: Sequence[str]) -> None:
    """Each is there, and what was logged of it is finite, as is everything else of ours."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    values = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    missing = [name for name in names if not values.get(name)]
    assert not missing, f"{missing} not among {sorted(values)}"
    bad = [name for name, numbers in values.items() if not all(map(math.isfinite, numbers))]
    assert not bad, bad
