"""Checkpoints, recipes and folders that try to run a program; `hostile_files` makes them, and opens 200."""

import copy
import importlib
import json
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule
from torch import nn

from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask, load_swapped
from lightning_tasks.__main__ import main
from lightning_tasks.cli.fit import _command_line, _ParsingCLI
from lightning_tasks.files.load import load_module
from lightning_tasks.files.names import closed_imports
from lightning_tasks.files.stored import check_stored, plain_copy
from lightning_tasks.training.hparams import build
from tests.lightning_tasks.language_data import VOCAB
from tests.reliability import hostile_files
from tests.reliability.hostile_files import PACKAGE, Case, Reduced, cases, opened, quiet, trapped
from tests.rows import each_row

IN_CI = 60


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    with trapped(tmp_path_factory.mktemp("trap")) as made:
        yield made


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, trap):
    monkeypatch.chdir(tmp_path)
    trap.sprung()


def test_no_hostile_file_runs_a_program(trap):
    chosen = cases(IN_CI)
    assert {case.place for case in chosen} == {*hostile_files.PLACES, *hostile_files.ENDS}
    assert {case.spelling for case in chosen} == set(trap.spellings())
    assert [fault for case in chosen if (fault := opened(case, trap))] == []


def test_each_spelling_would_run_its_program(trap):
    """Called as they are, all but those that need further arguments write the canary."""
    silent = []
    for name, (path, arguments) in trap.spellings().items():
        trap.sprung()
        with quiet():
            try:
                built = build({"class_path": path, "init_args": arguments})
                getattr(built, "wait", lambda: None)()
            except Exception as error:
                print(name, error)
        if not trap.sprung():
            silent.append(name)
    without_mmengine = ["pickle of another library"] if find_spec("mmengine") is None else []
    assert silent == ["pickle of a library", *without_mmengine]


def test_each_door_opens_for_an_honest_file(trap):
    """So that the refusals are those of hostile names."""
    honest = Case("model", "program", "spec", "")
    content = hostile_files.checkpoint_of(honest, trap)
    content["hyper_parameters"]["model"] = hostile_files._language_model()["model"]
    task = LanguageModelingTask(**{k: v for k, v in content["hyper_parameters"].items() if k != "_class_path"})
    task.configure_model()
    content["state_dict"] = task.state_dict()
    plan = {
        "mechanism": "attention_modules.RPCAttention",
        "options": {},
        "selection": "",
        "layers": ["model.layers.0.attn"],
    }
    for name, door in hostile_files.DOORS.items():
        content["callbacks"] = {"SwapAttention{}": {"plan": plan}} if name == "load_swapped" else {}
        with quiet():
            door(copy.deepcopy(content), trap.folder)


def checkpoint(**hparams):
    task = LanguageModelingTask(
        model={"class_path": "lightning_tasks.models.TransformerLM", "init_args": {"num_layers": 1, "dim": 8}},
        vocab_size=VOCAB,
    )
    task.configure_model()
    content = {"pytorch-lightning_version": "2.6.0", "state_dict": task.state_dict(), "epoch": 0, "global_step": 0}
    torch.save({**content, "hyper_parameters": {**task.hparams, **hparams}}, "a.ckpt")
    return "a.ckpt"


MINE = {"optimizer": {"class_path": f"{PACKAGE}.Steps", "init_args": {}}}


def test_the_error_names_the_path_the_place_and_the_cure(trap):
    text = (
        rf"a\.ckpt: hyper_parameters\.optimizer names '{PACKAGE}\.Steps'.*the package '{PACKAGE}'.*--trust_checkpoint"
    )
    with pytest.raises(ValueError, match=text):
        LanguageModelingTask.load_from_checkpoint(checkpoint(**MINE))
    assert not trap.sprung()


def test_a_trusted_checkpoint_may_name_any_package(trap):
    path = checkpoint(**MINE)
    assert (
        LanguageModelingTask.load_from_checkpoint(path, trust_checkpoint=True).hparams["optimizer"] == MINE["optimizer"]
    )
    assert trap.sprung()
    assert load_module(path, LanguageModelingTask, trust_checkpoint=True)


def test_code_of_the_user_s_own_that_is_imported_is_no_leave_to_import_the_rest_of_it(tmp_path, monkeypatch):
    (tmp_path / "own_code").mkdir()
    (tmp_path / "own_code/__init__.py").write_text("from torch import nn\nclass Net(nn.Module): pass\n")
    (tmp_path / "own_code/other.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="the package 'own_code'"):
        check_stored({"model": {"class_path": "own_code.Net"}}, (), "a.ckpt")
    importlib.import_module("own_code")
    check_stored({"model": {"class_path": "own_code.Net"}}, (), "a.ckpt")
    with pytest.raises(ValueError, match="which your program has not imported"):
        check_stored({"model": {"class_path": "own_code.other.Net"}}, (), "a.ckpt")


def test_trust_is_no_kind(trap):
    path = checkpoint(optimizer={"class_path": "os.system", "init_args": {"command": trap.command}})
    with pytest.raises(TypeError, match=r"optimizer names '.*system'.*must be a subclass of torch.optim.Optimizer"):
        LanguageModelingTask.load_from_checkpoint(path, trust_checkpoint=True)
    assert not trap.sprung()


COMMAND = ["validate", "--data", "tests.lightning_tasks.demo.DemoText", "--trainer.accelerator=cpu"]
COMMAND += ["--trainer.limit_val_batches=1", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def test_the_command_trusts_when_told_and_what_the_user_names(trap, capsys):
    path = checkpoint(**MINE, _class_path="lightning_tasks.LanguageModelingTask")
    model = ["--model", "lightning_tasks.LanguageModelingTask"]
    with pytest.raises(SystemExit) as stop:
        main([*COMMAND, *model, "--ckpt_path", path])
    assert stop.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert f"--ckpt_path a.ckpt: hyper_parameters.optimizer names '{PACKAGE}.Steps'" in line
    assert "--trust_checkpoint" in line
    assert not trap.sprung()
    with quiet():
        main([*COMMAND, *model, "--ckpt_path", path, "--trust_checkpoint"])
        main([*COMMAND, *model, "--model.optimizer", f"{PACKAGE}.Steps", "--ckpt_path", path])


def test_the_configuration_beside_a_checkpoint_is_a_file_too(trap, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    shutil.move(checkpoint(), tmp_path / "run/checkpoints/a.ckpt")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"model": {"class_path": f"{PACKAGE}.Task"}}))
    with pytest.raises(ValueError, match=r"config\.yaml: model\._class_path names 'hostile_package\.Task'"):
        load_module(tmp_path / "run/checkpoints/a.ckpt")
    assert not trap.sprung()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_holds_a_call_is_not_run(trap, legacy, capsys):
    torch.save({"state_dict": Reduced(trap.command)}, "p.ckpt", _use_new_zipfile_serialization=not legacy)
    for load in (
        LanguageModelingTask.load_from_checkpoint,
        load_module,
        lambda path: load_swapped(LanguageModelingTask, path),
    ):
        with pytest.raises(ValueError, match=r"p\.ckpt holds (posix|nt)\.system, which is neither tensor nor"):
            load("p.ckpt")
    model = ["--model", "lightning_tasks.LanguageModelingTask"]
    for option in ("--ckpt_path", "--init_from"):
        with pytest.raises(SystemExit):
            main([*COMMAND, *model, option, "p.ckpt", f"--model.vocab_size={VOCAB}"])
        assert "p.ckpt holds posix.system, which is neither tensor nor plain data" in capsys.readouterr().err
    assert not trap.sprung()


def test_a_sharded_checkpoint_is_read_by_unpickling_and_needs_trust(trap, capsys):
    (trap.folder / "meta.pt").write_bytes((trap.folder / "code.pt").read_bytes())
    (trap.folder / ".metadata").write_bytes((trap.folder / "code.pkl").read_bytes())
    with pytest.raises(SystemExit):
        main([*COMMAND, "--model", "lightning_tasks.LanguageModelingTask", "--ckpt_path", str(trap.folder)])
    assert "by unpickling, which runs what it holds; if it is yours" in capsys.readouterr().err
    assert not trap.sprung()


@each_row(
    "value",
    [
        {"model": {"model_type": "gpt2", "auto_map": {"AutoModelForCausalLM": "a--b.C"}}},
        {"model": {"model_type": "gpt2", "trust_remote_code": True}},
        {"model": {"model_type": "gpt2", "_attn_implementation": "somebody/kernels"}},
        {"model": {"model_type": "gpt2", "_experts_implementation_internal": "somebody/kernels"}},
        {"model": {"model_type": "a", "text_config": {"attn_implementation": {"text": "somebody/kernels"}}}},
        {"model": {"mmseg_config": "evil.py"}},
        {"model": {"mmseg_config": "a/evil"}},
        {"model": {"mmseg_config": "fcn", "cfg_options": {"model.backbone.type": "os.system"}}},
        {"model": {"mmseg_config": "fcn", "cfg_options": {"model": {"backbone": [{"type": "os.system"}]}}}},
        {"_instantiator": "os.system"},
        {"optimizer": {"class_path": ["os.system"]}},
    ],
)
def test_what_else_runs_code_is_refused_from_a_checkpoint(value):
    with pytest.raises(ValueError, match=r"^a\.ckpt: hyper_parameters"):
        check_stored(value, (), "a.ckpt")
    check_stored(value, None, "a.ckpt")
    if "model" in value:
        check_stored(value, (), "a.ckpt", given=value)


def test_remote_code_of_a_folder_is_not_run(trap):
    pytest.importorskip("transformers")
    with quiet(), pytest.raises(ValueError, match="could not be loaded as a pretrained"):
        LanguageModelingTask(model=str(trap.folder), vocab_size=5).configure_model()
    assert not trap.sprung()


@pytest.mark.parametrize("kind", ["subprocess.check_output", "mmengine.load"])
def test_a_type_of_mmsegmentation_that_is_no_module_is_not_built(trap, kind):
    pytest.importorskip("mmseg")
    program = (
        {"args": ["sh", "-c", trap.command]} if kind.startswith("sub") else {"file": str(trap.folder / "code.pkl")}
    )
    options = {"model.decode_head.loss_decode": {"type": kind, **program}}
    model = {"mmseg_config": "segmenter_vit-t_mask_8xb1-160k_ade20k-512x512", "cfg_options": options}
    task = SegmentationTask(model=model, num_classes=3)
    with pytest.raises(TypeError, match=rf"names '{kind}', which is a function: it must be a subclass"):
        task.configure_model()
    assert not trap.sprung()


def test_what_an_honest_checkpoint_names_passes():
    """A timm model with a dot in its name, a factory of timm's, and text that nothing imports."""
    schedule = {"class_path": "timm.scheduler.create_scheduler_v2", "init_args": {"sched": "cosine"}}
    model = "vit_tiny_patch16_224.augreg_in21k"
    task = ImageClassificationTask(
        model=model, num_classes=2, scheduler=schedule, mechanism="attention_modules.RPCAttention"
    )
    note = {"note": "as os.system", "date": "2026-99-99", "text": "*a* [b", "file": "data/train.csv", "long": "a" * 300}
    note |= {
        "dtype": "torch.float32",
        "activation": "torch.nn.functional.relu",
        "other": "torch.tanh",
        "none": "torch.b",
    }
    check_stored({**task.hparams, **note}, (), "a.ckpt")


class Foreign(LightningModule):
    """A module of somebody's, whose types ask the command line to import what strings name."""

    def __init__(
        self, net: nn.Module | None = None, make: Callable[..., Any] | None = None, nets: list[nn.Module] | None = None
    ) -> None:
        super().__init__()


FILE = "net.yaml"
NET = {"class_path": f"{PACKAGE}.Net"}
TEXTS = ["'{}'", " {}", "{} # a comment", "!!str {}", "\"'{}'\"", "'{{class_path: {}, born: 2026-99-99}}'"]
IN_STRINGS = {
    "a name of no known place": {"net": f"{PACKAGE}.Net"},
    "a function": {"make": f"{PACKAGE}.run"},
    "a function of a library": {"make": "torch.hub.load"},
    "a re-exported function": {"make": "torch.utils.cpp_extension.subprocess.check_output"},
    "a class that runs a program": {"make": "lightning.pytorch.cli.LightningCLI"},
    "JSON": {"net": json.dumps(NET)},
    "long JSON": {"net": json.dumps({**NET, "init_args": {"a": "b" * 300}})},
    "a list in YAML": {"nets": f"- {PACKAGE}.Net"},
    "YAML with aliases": {"net": "{a: &a [b], c: *a}"},
    "YAML that is deep": {"net": "[" * 5000},
    **{f"the text {text}": {"net": text.format(f"{PACKAGE}.Net")} for text in TEXTS},
    "a file": {"net": FILE},
    "a file by its address": {"net": f"file://{FILE}"},
    "a file of the home folder": {"net": f"~/{FILE}"},
    "a file that holds a name": {"net": "name.yaml"},
    "a file that is called as a class": {"net": f"{PACKAGE}.Net"},
    "a file that names another one": {"net": "settings.yaml"},
    "an argument of an allowed class": {
        "net": {"class_path": "torch.nn.TransformerEncoder", "init_args": {"encoder_layer": f"{PACKAGE}.Net"}}
    },
    "a key with dots": {"optimizer.class_path": f"{PACKAGE}.Steps"},
    "a key with more dots": {"net.init_args.inner.class_path": f"{PACKAGE}.Net"},
}


@pytest.mark.parametrize("place", IN_STRINGS)
@pytest.mark.parametrize("door", ["command", "load_module"])
def test_names_in_strings_are_not_imported(trap, place, door, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in {
        FILE: json.dumps(NET),
        "name.yaml": f"{PACKAGE}.Net\n",
        "settings.yaml": f"class_path: torch.nn.TransformerEncoder\ninit_args: {{encoder_layer: {FILE}}}",
        f"{PACKAGE}.Net": "nothing",
    }.items():
        (tmp_path / name).write_text(text)
    hparams = {**IN_STRINGS[place], "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    hparams["_class_path"] = f"{__name__}.Foreign"
    content = {"pytorch-lightning_version": "2.6.0", "state_dict": {}, "hyper_parameters": hparams}
    torch.save(content, "a.ckpt")
    arguments = ["validate", "--ckpt_path", "a.ckpt", "--data", "attnswap.datamodules.DigitsDataModule", "--model"]
    opened = {
        "command": lambda: _command_line(_ParsingCLI, [*arguments, f"{__name__}.Foreign"], ()),
        "load_module": lambda: load_module("a.ckpt", Foreign),
    }
    with quiet(), pytest.raises(ValueError, match=r"--trust_checkpoint|It was not called"):
        opened[door]()
    assert not trap.sprung()


def test_inner_schedules_are_a_list(trap):
    inner = {"class_path": "torch.optim.lr_scheduler.ChainedScheduler", "init_args": {"schedulers": {}}}
    inner["init_args"]["schedulers"][f"{PACKAGE}.Rate"] = 1
    with pytest.raises(TypeError, match="must be a list"):
        LanguageModelingTask.load_from_checkpoint(checkpoint(scheduler=inner))
    assert not trap.sprung()


class Disguised:
    """Pickled as an OrderedDict whose `items` gives nothing, which torch's loader of weights alone allows."""

    def __init__(self, entries):
        self.entries = entries

    def __reduce__(self):
        return (OrderedDict, (), {"items": OrderedDict}, None, iter(self.entries.items()))


def test_a_dict_that_hides_its_entries_is_refused(tmp_path):
    torch.save({"hyper_parameters": Disguised({"model": {"mmseg_config": "evil.py"}})}, tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not list(content["hyper_parameters"].items())
    with pytest.raises(ValueError, match="a dict with attributes of its own"):
        check_stored(content["hyper_parameters"], frozenset(), "a.ckpt")
    with pytest.raises(ValueError, match="a dict with attributes of its own"):
        check_stored([{"model": content["hyper_parameters"]}], frozenset(), "a.ckpt")
    check_stored({"teacher": torch.nn.Linear(2, 2).state_dict()}, frozenset(), "a.ckpt")


def test_what_is_no_plain_data_is_refused(trap):
    with pytest.raises(ValueError, match="is a object, which is no plain data"):
        check_stored({"makes": object()}, frozenset(), "a.ckpt")
    plain = {"a": [1, 2.0, None, True, b"x"], "b": {"c": torch.ones(2), "d": torch.float16}, "e": ("x", {"y"})}
    check_stored(plain, frozenset(), "a.ckpt")


def test_shared_parts_that_stand_for_too_much_are_refused():
    shared = {"k": 1}
    for _ in range(40):
        shared = {"a": shared, "b": shared}
    with pytest.raises(ValueError, match="more than 1,000,000 entries"):
        check_stored(shared, frozenset(), "a.ckpt")


def test_files_of_weights_may_be_named(tmp_path):
    torch.save(torch.zeros(2**19), tmp_path / "vit.pth")
    check_stored({"checkpoint": str(tmp_path / "vit.pth")}, frozenset(), "a.ckpt")


def _written_file(name, text):
    with open(name, "w") as file:
        file.write(text)


def test_what_is_given_does_not_cover_a_disguise():
    with pytest.raises(ValueError, match="attributes of its own"):
        plain_copy({"net": [_attributes(OrderedDict(class_path="a.B"))]}, "a.ckpt")
    with pytest.raises(ValueError, match="attributes of its own"):
        plain_copy({"net": _attributes(Counter("a"))}, "a.ckpt")
    with pytest.raises(ValueError, match="has the key"):
        plain_copy({"net": {("class_path",): 1}}, "a.ckpt")


def _attributes(value):
    value.items = OrderedDict
    return value


@each_row(
    "options",
    [
        {"cache_dir": "autostart"},
        {"pretrained_cfg": {"url": "file:///etc/hostname"}},
        {"pretrained_cfg_overlay": {"hf_hub_id": "somebody/weights"}},
        {"pretrained_cfg.url": "file:///etc/hostname"},
    ],
)
def test_weights_are_not_downloaded_to_where_a_checkpoint_says(options):
    """timm puts what any URL holds into `cache_dir`, under the name that the URL ends with."""
    with pytest.raises(ValueError, match="or a file written"):
        check_stored({"model_options": options}, frozenset(), "a.ckpt")
    check_stored({"model_options": {"pretrained_cfg_overlay": {"file": "a.pth"}}}, frozenset(), "a.ckpt")


@pytest.mark.parametrize("content", ["optimizer: {{class_path: {0}.Steps}}", "a: {0}\noptimizer: ${{a}}.Steps"])
def test_a_file_of_hyper_parameters_is_checked(content, trap):
    if "$" in content:
        pytest.importorskip("omegaconf")
    path = checkpoint()
    _written_file("hparams.yaml", content.format(PACKAGE))
    for load in (
        lambda: LanguageModelingTask.load_from_checkpoint(path, hparams_file="hparams.yaml"),
        lambda: load_swapped(LanguageModelingTask, path, hparams_file="hparams.yaml"),
    ):
        with pytest.raises(ValueError, match=rf"hparams\.yaml: hyper_parameters\.optimizer names '{PACKAGE}\.Steps'"):
            load()
    assert not trap.sprung()


def test_the_type_of_hyper_parameters_is_no_callable():
    torch.save({"hparams_type": Counter, "hyper_parameters": {}}, "a.ckpt")
    with pytest.raises(ValueError, match="no plain data"):
        LanguageModelingTask.load_from_checkpoint("a.ckpt")


@each_row(
    "path",
    [
        *("torch.distributed.nn.RemoteModule", "torch.jit.ScriptModule", "torch.fx.GraphModule", "RemoteModule"),
        *("torch.nn.functional.torch.jit.ScriptModule", "timm.layers.config.torch.jit.ScriptModule"),
    ],
)
def test_of_torch_a_checkpoint_names_layers_and_optimizers_alone(path):
    with pytest.raises(ValueError, match=r"torch\.nn and torch\.optim|a dotted path is needed"):
        check_stored({"model": {"class_path": path}}, frozenset(), "a.ckpt")


WORDS = (
    "test.parquet",
    "types.json",
    "val.loss",
    "this.zen",
    "subprocess.run",
    "a: {url: b}",
    "*a* [b",
    f"{__name__}.x",
)


def test_every_other_string_stays_a_string():
    check_stored({word: word for word in WORDS}, frozenset(), "a.ckpt")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--options", type=dict[str, Any] | None)
    options = {word: word for word in WORDS}
    config = parser.parse_object({"options": plain_copy(options, "a.ckpt")})
    parser.dump(config)
    assert parser.instantiate_classes(config).options == options


@pytest.mark.parametrize(
    ("path", "passes"),
    [
        *((f"torch.nn.functional.{name}", True) for name in ("relu", "gelu", "max_pool2d")),
        *(
            (path, False)
            for path in ("torch.load", "torch.compile", "subprocess.run", "this.s", f"{__name__}.checkpoint")
        ),
        *((f"torch.nn.functional.{path}", False) for path in ("importlib.import_module", "warnings.warn")),
        *((f"lightning.pytorch.{path}", False) for path in ("cli.LightningCLI", "Trainer")),
    ],
)
def test_the_command_line_imports_what_is_on_the_closed_list(path, passes):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--make", type=Callable[..., Any])
    with closed_imports(frozenset(), {}), nullcontext() if passes else pytest.raises(ArgumentError, match="denied by"):
        parser.parse_args([f"--make={path}"])
    parser.parse_args([f"--make={__name__}.checkpoint"])  # afterwards, all is as it was


def test_the_command_line_imports_no_program(trap):
    arguments = ["validate", "--model", f"{__name__}.Foreign", "--data", "attnswap.datamodules.DigitsDataModule"]
    with quiet(), pytest.raises(Exception, match="denied by the 'subprocess' entry"):
        _command_line(_ParsingCLI, [*arguments, "--model.make", "subprocess.check_output"], ())


def test_help_of_the_script(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hostile_files", "--help"])
    with pytest.raises(SystemExit, match="0"):
        hostile_files.main()
    assert "how many files, 200 by default" in capsys.readouterr().out
