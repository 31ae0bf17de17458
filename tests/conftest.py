"""What every test starts from: one thread, a seed, quiet loggers, and no file outside its own folder."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ATTNSWAP_NUM_WORKERS", "0")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import pytest
import torch
from hypothesis import settings

from tests.costs import CostWriter, in_brief, leave_out, without_costly

OF_A_PROCESS_GROUP = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "ATTNSWAP_LEADER")
OF_A_SEED = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--brief", action="store_true", help="a few cases of costly tests, and none of the dearest")
    parser.addoption("--fast", action="store_true", help="leave out the tests that tests/costs.txt lists")
    parser.addoption("--write-costs", action="store_true", help="update tests/costs.txt with what is run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-costs"):
        config.pluginmanager.register(CostWriter())


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        leave_out(config, items, without_costly(items))
    elif config.getoption("--brief"):
        leave_out(config, items, in_brief(items))


def pytest_collection_finish() -> None:
    gc.freeze()  # a full collection looks at no object of the imported libraries: half a second each


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_quiet_loggers() -> None:
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "wandb"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory):
    """Point every cache at a folder of this session, so that no test reads what another run left."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "ATTNSWAP_CACHE"):
            place = folder / variable.lower()
            place.mkdir()
            patch.setenv(variable, str(place))
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.delenv("WANDB_API_KEY", raising=False)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures as small images without a layout, a fifth of the time, but in tests that are marked `figures`."""
    if request.node.get_closest_marker("figures") or "matplotlib.figure" not in sys.modules:
        return
    figure = sys.modules["matplotlib.figure"].Figure
    whole = figure.savefig

    def small(self: Any, file: Any, **options: Any) -> None:
        if options.get("format") != "svg":
            self.set_layout_engine("none")
            options["dpi"] = 25
        whole(self, file, **options)

    monkeypatch.setattr(figure, "savefig", small)


@pytest.fixture(autouse=True)
def _nothing_of_a_run_stays() -> Iterator[None]:
    """Take down what a strategy of several processes leaves in this one, and forget the seed of Lightning's last run.

    A process forked later would wait for the threads of a group that stayed; and a program started later, to which
    Lightning's variables say that somebody else starts its processes, would wait for these.
    With that seed, Lightning would seed anew what a later test trains.
    """
    before = {name: os.environ.get(name) for name in OF_A_PROCESS_GROUP}
    yield
    for name in OF_A_SEED:
        os.environ.pop(name, None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets, $ATTNSWAP_DATA; the test is skipped where it is not set."""
    folder = os.environ.get("ATTNSWAP_DATA", "")
    if not Path(folder).is_dir() or not folder:
        pytest.skip("ATTNSWAP_DATA names no folder of data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def tiny_wikitext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with WikiText-2 and WikiText-103 in the layout of the release, of forty words in random order."""
    import pyarrow
    import pyarrow.parquet

    root, random = tmp_path_factory.mktemp("data"), Random(0)
    words = [f"word{index}" for index in range(40)]
    for name in ("wikitext-2-v1", "wikitext-103-v1"):
        folder = root / "wikitext" / name
        folder.mkdir(parents=True)
        for split, lines in (("train", 120), ("validation", 30), ("test", 30)):
            text = [" " + " ".join(random.choices(words, k=12)) + " \n" for _ in range(lines)]
            pyarrow.parquet.write_table(pyarrow.table({"text": text}), folder / f"{split}-00000-of-00001.parquet")
    return root


@pytest.fixture(scope="session")
def tiny_data(tiny_wikitext: Path) -> Path:
    """A root folder with the texts of `tiny_wikitext`, and with a few random images as each set of images."""
    from tests.datamodules.image_files import write_class_folders, write_parquet
    from tests.datamodules.scene_files import write_ade20k, write_camvid

    for split, count in (("train", 100), ("test", 10)):
        write_parquet(tiny_wikitext / "cifar10" / "plain_text", split, count, image="img", size=32, classes=10)
    for split in ("train", "val"):
        write_class_folders(tiny_wikitext / "imagenet" / split, {f"n0000000{index}": 2 for index in range(6)}, size=20)
    for name in ("imagenet-a", "imagenet-r", "imagenet-o", *(f"imagenet-c/fog/{severity}" for severity in range(1, 6))):
        write_class_folders(tiny_wikitext / name, {"n00000000": 1, "n00000001": 1}, size=20)
    write_camvid(tiny_wikitext)
    write_ade20k(tiny_wikitext)
    return tiny_wikitext
