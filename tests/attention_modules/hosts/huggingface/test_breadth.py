"""docs/hosts_huggingface.csv: some of its lines are made anew, and the prose says what it says."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.discovery import survey
from tests.attention_modules.hosts.huggingface import breadth, exercise, tiny
from tests.attention_modules.hosts.huggingface.maps import maps_of
from tests.lightning_tasks.programs import ROOT

LINES = breadth.read()
OF_ANOTHER_VERSION = pytest.mark.skipif(
    not version("transformers").startswith(f"{breadth.VERSION}."), reason="the file is of another transformers"
)
# Those that the host is most often asked about, and one of each kind of what stands between projections and interface.
NAMED = (
    *("dinov2", "dinov3_vit", "clip", "siglip", "modernbert", "gemma3", "llama4", "qwen3", "gpt_oss", "whisper", "t5"),
    *("deepseek_v3", "bridgetower"),
)


@OF_ANOTHER_VERSION
@pytest.mark.parametrize("folder", NAMED)
@pytest.mark.filterwarnings("ignore")
def test_a_line_is_what_its_folder_shows(folder):
    found, line = breadth.tried(folder), LINES[folder]
    assert (found.result, found.swapped, found.reason) == (line.result, line.swapped, line.reason)
    assert sorted(found.compared.split(", ")) == sorted(line.compared.split(", "))
    assert found.result == "equal"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fails", "said"), [("swapped", ["generate dynamic: TypeError: no", "generate static: TypeError: no"]), ("all", [])]
)
def test_what_the_swapped_model_alone_cannot_write_is_a_fault(fails, said, monkeypatch):
    written = exercise.written

    def failing(model, prompt, cache):
        if fails == "all" or any(isinstance(module, Swapped) for module in model.modules()):
            raise TypeError("no")
        return written(model, prompt, cache)

    monkeypatch.setattr(exercise, "written", failing)
    from transformers import GPT2LMHeadModel

    assert exercise.exercise(*tiny.running(GPT2LMHeadModel)).problems == said


@OF_ANOTHER_VERSION
@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(LINES))
def test_every_line_is_what_its_folder_shows(folder):
    found, line = breadth.line_of(folder), LINES[folder]
    assert (found.result, found.swapped) == (line.result, line.swapped), found.reason


@OF_ANOTHER_VERSION
def test_maps_are_those_of_the_eager_implementation():
    assert sum(line.same_maps for line in LINES.values()) >= 300
    assert all(line.maps for line in LINES.values() if line.result == "equal")


@OF_ANOTHER_VERSION
@pytest.mark.parametrize("folder", ["bert", "llama", "gpt_oss", "t5", "swin"])
@pytest.mark.filterwarnings("ignore")
def test_a_few_folders_have_the_maps_that_were_counted(folder):
    assert float(maps_of(folder)) <= 1e-5


@OF_ANOTHER_VERSION
def test_no_folder_is_at_fault_and_each_that_is_not_equal_has_its_reason():
    assert set(LINES) == set(tiny.folders())
    assert {line.result for line in LINES.values()} <= {"equal", "refused", "not tried"}
    assert all(line.reason for line in LINES.values() if line.result != "equal")
    assert all(float(line.largest_difference) <= 1e-5 for line in LINES.values() if line.result == "equal")


def test_what_does_not_call_the_interface_is_named():
    from transformers import DebertaConfig, DebertaModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    others = survey(DebertaModel(DebertaConfig(vocab_size=40, **sizes))).others
    assert any("does not call transformers' attention interface" in each.reason for each in others)


def test_the_prose_counts_as_the_file_does():
    counts = Counter(line.result for line in LINES.values())
    text = " ".join((ROOT / "docs" / "how_to" / "hugging_face.md").read_text(encoding="utf-8").split())
    sentence = (
        r"models of (\d+) folders .*? - (\d+) folders: .*? - (\d+) of these .*? - (\d+) generate .*? a dynamic cache\. "
        r".*?- In (\d+) .*? - (\d+) folders: the swap is refused by name\. - (\d+) folders: no tiny"
    )
    (said,) = re.findall(sentence, text)
    caches = Counter(
        tuple(re.findall(r"generate (\w+)", line.compared)) for line in LINES.values() if line.result == "equal"
    )
    writing = [caches["dynamic", "static"], caches["dynamic",], caches[()]]
    expected = [len(LINES), counts["equal"], *writing, counts["refused"], counts["not tried"]]
    assert [int(each) for each in said] == expected
    assert sum(writing) == counts["equal"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{counts['equal']} of {len(LINES)} model families give the same outputs" in readme
