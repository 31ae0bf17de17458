"""A cell is identified by its code and files too: what changed is run again, or kept where that is asked for."""

import json
import os
import shutil
import sys
from importlib.util import spec_from_file_location

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare import command as compare
from lightning_tasks.compare.cell import RESULT, Cell
from lightning_tasks.compare.cluster.run import run_cell
from lightning_tasks.compare.reading import read_comparison
from lightning_tasks.compare.record import read_record
from lightning_tasks.errors import UsageError
from lightning_tasks.files import sources
from lightning_tasks.files.sources import changed_sources, mixed_sources, sources_of

MINE = (
    "from torch.nn import functional as F\n\ndef mine(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)\n"
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of one's own, in which a configuration names a class, a mechanism and files."""
    folder = tmp_path / "project"
    files = {
        "my_mechanism.py": f"import my_helper\nfrom my_package import part\n{MINE}",
        "my_helper.py": "import my_deeper\n",
        "my_deeper.py": "VALUE = 1\n",
        "my_package/__init__.py": "from .sibling import one\n",
        "my_package/part.py": "from . import sibling\n",
        "my_package/sibling.py": "one = 1\n",
        "my_namespace/inner.py": "class Callback: pass\n",
        "unrelated.py": "VALUE = 1\n",
        "weights.pt": "weights",
        "index.json": "{}",
        "model/config.json": "{}",
        "model/model.safetensors": "numbers",
        "model/modeling_mine.py": "VALUE = 1",
        "model/.lock": "no part of the model",
        "more.yaml": "callbacks: [{class_path: my_namespace.inner.Callback}]\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


SETTINGS = {
    "model": {"mechanism": "my_mechanism.mine", "weights": "weights.pt", "name": "model"},
    "data": {"index": ["index.json"], "stage": "val/loss"},
    "optimizer": {"class_path": "torch.optim.AdamW"},
    "trainer": "more.yaml",
}


def test_what_is_named_counts_and_nothing_else(project):
    found = sources_of([SETTINGS])
    names = {name for name in found if not name.startswith("package ")}
    assert names == {
        *("my_mechanism (my_mechanism.py)", "my_helper (my_helper.py)", "my_deeper (my_deeper.py)"),
        *("my_package (__init__.py)", "my_package.part (part.py)", "my_package.sibling (sibling.py)"),
        *("my_namespace.inner (inner.py)", "weights.pt", "index.json", "more.yaml"),
        *("model/config.json", "model/model.safetensors", "model/modeling_mine.py"),
    }
    assert "package torch" in found
    assert [*sources_of([{"model": {"mechanism": "softmax"}}])] == ["attention_modules.mechanisms.softmax (softmax.py)"]


def test_a_project_that_moved_is_the_same(project, tmp_path, monkeypatch):
    before = sources_of([SETTINGS])
    shutil.copytree(project, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
    assert sources_of([SETTINGS]) == before


@pytest.mark.parametrize(
    "name",
    [
        *(
            "my_mechanism.py",
            "my_deeper.py",
            "my_package/sibling.py",
            "my_namespace/inner.py",
            "weights.pt",
            "index.json",
        )
    ],
)
def test_a_change_shows_and_a_touch_does_not(project, name):
    before = sources_of([SETTINGS])
    path = project / name
    os.utime(path, (1, 1))
    assert sources_of([SETTINGS]) == before
    path.write_text(path.read_text() + " ")
    after = sources_of([SETTINGS])
    (changed,) = {key for key in before if before[key] != after[key]}
    assert changed == name or changed.endswith(f"({path.name})")
    path.unlink()
    assert changed not in sources_of([SETTINGS])


def test_odd_projects_are_read(project):
    (project / "my_deeper.py").write_text("this is no Python\n")
    (project / "my_helper.py").write_text("import my_mechanism\nimport my_deeper\nimport nowhere\n")  # a circle
    assert "my_deeper (my_deeper.py)" in sources_of([SETTINGS])
    for odd in ("", "a" * 10_000, "x.y", "..", "nowhere.at_all", "\0", "~no such user/x", "os.path.join"):
        assert not [name for name in sources_of([odd]) if not name.startswith("package ")]
    (project / "linked.pt").symlink_to(project / "weights.pt")
    assert [*sources_of(["linked.pt"]).values()] == [*sources_of(["weights.pt"]).values()]
    (project / "circle.yaml").write_text("x: circle.yaml\n")
    assert len(sources_of(["circle.yaml"])) == 1


def test_a_package_or_module_behind_a_link_of_another_name_is_followed(project):
    (project / "linked_package").symlink_to(project / "my_package")
    (project / "my_package" / "other.py").symlink_to(project / "my_package" / "part.py")
    for name in ("linked_package.one", "my_package.other.x"):
        before = sources_of([name])
        (project / "my_package" / "sibling.py").write_text(f"one = '{name}'\n")
        package = name.partition(".")[0]
        assert changed_sources(before, sources_of([name])) == [f"{package}.sibling (sibling.py)"]


def test_a_package_whose_init_is_a_link_to_another_name_is_a_package(project):
    (project / "my_package" / "__init__.py").rename(project / "init_of_mine.py")
    (project / "my_package" / "__init__.py").symlink_to(project / "init_of_mine.py")
    assert "my_package.sibling (sibling.py)" in sources_of(["my_package.one"])
    (project / "init_of_mine.py").write_text("import importlib\nimportlib.import_module(name, package='my_package')\n")
    assert "my_package.sibling (sibling.py)" in sources_of(["my_package.one"])


def test_a_module_that_an_editable_installation_maps_to_is_followed(project, monkeypatch):
    (project / "elsewhere").mkdir()
    (project / "elsewhere" / "net.py").write_text("import my_deeper\n")

    class Finder:  # as setuptools writes one for {"my_namespace.net": FILE}
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "my_namespace.net":
                return spec_from_file_location(name, project / "elsewhere" / "net.py")
            return None

    class Old:  # as before Python 3.4; Python passes it over
        pass

    monkeypatch.setattr(sys, "meta_path", [Old, *sys.meta_path, Finder])
    found = sources_of(["my_namespace.net.Net"])
    assert {*found} == {"my_namespace.net (net.py)", "my_deeper (my_deeper.py)"}


def test_nested_folders_without_an_init_are_packages(project):
    (project / "my_namespace" / "deep" / "deeper").mkdir(parents=True)
    (project / "my_namespace" / "deep" / "deeper" / "net.py").write_text("from . import more\n")
    (project / "my_namespace" / "deep" / "deeper" / "more.py").write_text("VALUE = 1\n")
    found = sources_of(["my_namespace.deep.deeper.net.Net"])
    assert {*found} == {"my_namespace.deep.deeper.net (net.py)", "my_namespace.deep.deeper.more (more.py)"}


def test_a_string_of_own_code_may_be_an_import_path(project):
    (project / "my_helper.py").write_text("swap_attention(model, 'my_namespace.inner.Callback', 'val.loss', 'a. b')\n")
    assert "my_namespace.inner (inner.py)" in sources_of([{"x": "my_mechanism.mine"}])


def test_files_beside_the_file_that_names_them_count(project):
    for name, text in {"base.json": '{"x": "more.yaml"}', "more.yaml": "y: deep.pt", "deep.pt": "weights"}.items():
        (project / "conf").mkdir(exist_ok=True)
        (project / "conf" / name).write_text(text)
    found = sources_of(["base.json"], project / "conf")
    assert {*found} == {
        *("conf/base.json", "conf/more.yaml", "conf/deep.pt"),
        *("my_namespace.inner (inner.py)", "more.yaml"),  # another of that name, in the working folder
    }
    assert sources_of(["conf/base.json"]).keys() - found.keys() == set()


def test_settings_in_python_count_by_what_they_name_and_import(project):
    """As of mmengine: files by `_base_` or by an import from beside them, which nothing imports here."""
    texts = {
        "mine.py": "_base_ = ['./base.py']\nfrom ..shared.sizes import *\nfrom .runtime import hooks\n",
        "base.py": "data = 'index.json'\nfrom . import more\nfrom .inner import rates\npattern = '\\d'\n",
        "more.py": "",
        "../more.py": "",  # others of such names, in the working folder and further in
        "../conf.py": "",
        "__init__.py": "",
        "conf/base.py": "",
        "inner/__init__.py": "",
        "inner/rates.py": "from ..deep.inner.x import y\n",
        "deep/__init__.py": "",
        "deep/inner/__init__.py": "",
        "deep/inner/x.py": "y = 1\n",
        "runtime.py": "hooks = []\n",
        "../shared/sizes.py": "size = 3\n",
        "broken.py": "(",
    }
    for name, text in texts.items():
        path = project / "conf" / name
        path.parent.resolve().mkdir(exist_ok=True, parents=True)
        path.resolve().write_text(text)
    found = sources_of([{"mmseg_config": "conf/mine.py"}, "conf/broken.py"])
    of_files = {name for name in found if name.endswith((".py", ".json"))}
    assert of_files == {
        *("conf/mine.py", "conf/base.py", "conf/runtime.py", "shared/sizes.py", "index.json", "conf/broken.py"),
        *("conf/more.py", "conf/__init__.py", "conf/inner/__init__.py", "conf/inner/rates.py"),
        *("conf/deep/__init__.py", "conf/deep/inner/__init__.py", "conf/deep/inner/x.py"),
    }


def test_settings_in_python_behind_a_link_import_and_name_what_stands_beside_it(project):
    for name, text in {
        "conf/mine.py": "from .base import *\n",
        "conf/local.py": "lr = 1\n",
        "else/local.py": "",
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    (project / "else" / "kept.py").write_text("from .local import lr\nsizes = 'sizes.json'\n")
    (project / "conf" / "sizes.json").write_text("{}")
    (project / "conf" / "base.py").symlink_to(project / "else" / "kept.py")
    assert {*sources_of(["conf/mine.py"])} >= {"conf/base.py", "conf/local.py", "conf/sizes.json"}
    assert "else/local.py" not in sources_of(["conf/mine.py"])


def test_links_that_lead_back_are_followed_once(project):
    (project / "conf").mkdir(exist_ok=True)
    (project / "conf" / "mine.py").write_text("from .a.mine import x\nfrom .b.mine import y\n")
    for name in "ab":
        (project / "conf" / name).symlink_to(project / "conf")
    assert len(sources_of(["conf/mine.py"])) < 5


def test_files_that_are_keys_count(project):
    assert {*sources_of([{"data": {"files": {"weights.pt": 0.7, "index.json": 0.3}}}])} == {"weights.pt", "index.json"}


def test_paths_behind_a_prefix_count(project):
    assert {*sources_of(["local-dir:model", f"file://{project}/weights.pt", "https://x/weights.pt"])} == {
        *("local-dir:model/config.json", "local-dir:model/model.safetensors", "local-dir:model/modeling_mine.py"),
        f"file://{project}/weights.pt",
    }


def test_a_package_of_ones_own_may_have_a_name_of_ours(project):
    (project / "datamodules").mkdir()
    (project / "datamodules" / "__init__.py").write_text("import my_deeper\n")
    assert {*sources_of(["datamodules.Mine"])} == {"datamodules (__init__.py)", "my_deeper (my_deeper.py)"}


def test_what_own_code_imports_of_installed_packages_counts(project, tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    for name in ("some_package/__init__.py", "some_package-1.0.dist-info/METADATA", "alone.py"):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (installed / "some_package-1.0.dist-info" / "top_level.txt").write_text("some_package\n")
    monkeypatch.syspath_prepend(str(installed))
    sources._distributions.cache_clear()
    (project / "my_helper.py").write_text("import os, alone\nfrom some_package import K\n")
    found = sources_of(["my_helper.K"])
    assert found.keys() == {"my_helper (my_helper.py)", "alone (alone.py)", "package some-package"}
    (installed / "some_package-1.0.dist-info" / "METADATA").write_text("Name: some-package\nVersion: 2.0\n")
    assert {**found, "package some-package": "2.0"} == sources_of(["my_helper.K"]) != found
    sources._distributions.cache_clear()


def test_imports_of_constants_and_names_of_other_alphabets_are_followed(project):
    text = "import importlib\n__import__('my_deeper')\nimportlib.import_module('.part', package='my_package')\n"
    (project / "ünet.py").write_text(text, encoding="utf-8")
    names = {"ünet (ünet.py)", "my_deeper (my_deeper.py)", "my_package.part (part.py)"}
    assert {*sources_of(["ünet.Net"])} >= names


def test_a_package_that_imports_what_it_finds_counts_whole(project):
    registry = project / "registry"
    (registry / "inner").mkdir(parents=True)
    text = "import importlib, os\nfor m in os.listdir():\n    importlib.import_module('registry.' + m)\n"
    for name, content in {
        "__init__.py": text,
        "one.py": "import my_deeper",
        "inner/__init__.py": "",
        "note.txt": "",
    }.items():
        (registry / name).write_text(content)
    assert {*sources_of(["registry.Mine"])} == {
        *("registry (__init__.py)", "registry.one (one.py)", "registry.inner (__init__.py)", "my_deeper (my_deeper.py)")
    }
    called = "importlib.import_module('.' + name, package='registry')"
    (project / "outside.py").write_text(f"import importlib\ndef load(name):\n    return {called}\n")
    assert {*sources_of(["registry.Mine"])} < {*sources_of(["outside.load"])}
    for starred in ("from registry import *\n", "KIND = 'registry.one:Mine'\n", "import_module(f'registry.{x}')\n"):
        (project / "starred.py").write_text(starred)
        assert "registry.one (one.py)" in sources_of(["starred.Mine"])
    (project / "alone.py").write_text(text)  # in no package itself
    assert {"alone (alone.py)", "registry.one (one.py)"} < {*sources_of(["alone.Mine"])}


@pytest.mark.parametrize(
    "files",
    [
        ("adapter_config.json", "adapter_model.safetensors"),
        ("tokenizer_config.json", "vocab.txt"),
        ("model_index.json", "unet/model.safetensors"),
        ("preprocessor_config.json", "README.md"),
        ("scheduler_config.json", "README.md"),
        ("config.json", "1_Dense/model.safetensors"),
        (".metadata", "__0_0.distcp"),
    ],
)
def test_a_folder_of_a_model_counts_by_all_of_its_files(project, files):
    folder = project / "named"
    for name in (*files, ".cache/lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    before = sources_of(["named"])
    assert {*before} == {f"named/{name}" for name in files if not name.startswith(".")}
    (folder / files[1]).write_text("2")
    assert changed_sources(before, sources_of(["named"])) == [f"named/{files[1]}"]


def test_files_behind_a_link_to_a_folder_count_once(project):
    (project / "shared/vae").mkdir(parents=True)
    (project / "shared/vae/weights.txt").write_text("1")
    (project / "named").mkdir()
    (project / "named/model_index.json").write_text("{}")
    (project / "named/vae").symlink_to(project / "shared/vae")
    (project / "named/vae/around").symlink_to(project / "named")  # which would have no end
    before = sources_of(["named"])
    assert {*before} == {"named/model_index.json", "named/vae/weights.txt"}
    (project / "shared/vae/weights.txt").write_text("2")
    assert changed_sources(before, sources_of(["named"])) == ["named/vae/weights.txt"]


@pytest.fixture
def cell(project, demo):
    """A finished cell."""
    named = {
        "class_path": "tests.lightning_tasks.demo.KeepTested",
        "init_args": {"folder": str(project / "weights.pt")},
    }
    cell = Cell("plain", str(demo), (f"--trainer.callbacks+={json.dumps(named)}",), 0, str(project / "out"))
    run_cell(cell)
    return cell


def test_a_cell_whose_files_changed_is_not_finished_but_where_it_is_kept(cell, project):
    assert cell.is_finished()
    assert str(project / "weights.pt") in cell.result()["sources"]
    (project / "weights.pt").write_text("others")
    assert cell.changed() == [str(project / "weights.pt")]
    assert not cell.is_finished()
    kept = Cell(cell.name, cell.config, cell.overrides, 0, cell.output, any_code=True)
    assert kept.is_finished()
    (project / "weights.pt").unlink()
    assert cell.changed() == [str(project / "weights.pt")]


def test_a_change_while_a_comparison_runs_is_refused(cell, project):
    planned = cell.sources
    (project / "weights.pt").write_text("others")
    with pytest.raises(UsageError, match=r"weights\.pt changed while the comparison ran"):
        run_cell(cell, planned)


def test_results_of_earlier_versions_are_kept_and_damaged_ones_are_named(cell):
    path = cell.folder / RESULT
    result = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in result.items() if key != "sources"}))
    assert cell.is_finished()
    for damaged in (["x"], {"x": 1}, "x"):
        path.write_text(json.dumps({**result, "sources": damaged}))
        with pytest.raises(UsageError, match=r"result\.json is damaged"):
            cell.is_finished()


@pytest.mark.parametrize("value", ["a: b: c", "@x", "*no", "[1, 2", "\ud800", "2024-13-45"])
def test_an_override_that_is_no_yaml_is_text(demo, tmp_path, value):
    cell = Cell("plain", str(demo), (f"--model.name={value}",), 0, str(tmp_path))
    assert not cell.is_finished()
    assert isinstance(cell.sources, dict)


def test_mixed_states_are_told():
    assert mixed_sources([("x", {"a": "1", "b": "1"}), ("y", {"a": "1"})]) == []
    said = ["the cells ran with different states of b"]
    assert mixed_sources([("x", {"a": "1", "b": "1"}), ("y", {"b": "2"})]) == said
    assert mixed_sources([("x", {"a": "1", "b": "1"}), ("x", {"a": "1"})]) == said  # a file that came, or went


def test_the_command_runs_changed_cells_again_and_says_so(comparison, tmp_path, capsys):
    content = yaml.safe_load(comparison.read_text())
    data = tmp_path / "data.txt"
    data.write_text("one")
    named = {"class_path": "tests.lightning_tasks.demo.KeepTested", "init_args": {"folder": str(data)}}
    content["variants"] = {"slow": {}, "watched": {"trainer.callbacks+": named}}
    comparison.write_text(yaml.safe_dump(content))
    output = tmp_path / "out"
    command = ["compare", str(comparison), "--seeds", "0:1", "--output", str(output)]
    main(command)
    times = {cell.variant: cell.seconds for cell in read_record(output).cells}
    assert len(read_record(output).code) == 2
    data.write_text("two")
    capsys.readouterr()
    main([*command, "--keep"])
    said = capsys.readouterr().err
    assert f"changed since watched seed 0 had finished: {data}; kept, as --keep asks" in said
    assert {cell.variant: cell.seconds for cell in read_record(output).cells} == times
    main(["compare", str(comparison), "--seeds", "0:2", "--output", str(output), "--keep"])
    assert f"different states of {data}" in (output / "summary.md").read_text()
    capsys.readouterr()
    main(command)
    said = capsys.readouterr().err
    assert "changed since watched seed 0 had finished" in said
    assert "2 cells, 1 finished" in said
    record = read_record(output)
    assert len(record.code) == 2
    assert all(record.code[cell.code].get(str(data), "") != "" for cell in record.cells if cell.variant == "watched")
    assert "different states" not in (output / "summary.md").read_text()


@pytest.mark.parametrize(
    "end", [pytest.param(KeyboardInterrupt, marks=pytest.mark.slow), RuntimeError], ids=["interrupted", "killed"]
)
def test_a_report_shows_no_cell_of_other_code_than_the_record_says(comparison, tmp_path, monkeypatch, end):
    content = yaml.safe_load(comparison.read_text())
    data, output = tmp_path / "data.txt", tmp_path / "out"
    data.write_text("one")
    named = {"class_path": "tests.lightning_tasks.demo.KeepTested", "init_args": {"folder": str(data)}}
    comparison.write_text(yaml.safe_dump({**content, "settings": {"trainer.callbacks+": named}}))
    command = ["compare", str(comparison), "--seeds", "0:1", "--output", str(output)]
    main(command)
    assert len(read_comparison(output).runs) == 3
    data.write_text("two")

    def run_one(cells, jobs):
        run_cell(cells[0])
        raise end

    monkeypatch.setattr(compare, "run_cells", run_one)
    with pytest.raises((SystemExit, RuntimeError)):
        main(command)
    read = read_comparison(output)
    assert [run.config for run in read.runs] == ["fast 1e-1"]
    assert any(note.endswith("left out): slow seed 0, watched seed 0") for note in read.notes)
    with pytest.raises((SystemExit, RuntimeError)):
        main([*command, "--keep"])
    assert any(f"different states of {data}" in note for note in read_comparison(output).notes)
