"""Paths that users write in Python, YAML and checkpoints: they stay importable wherever the code behind them moves."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tasks.training.hparams import import_object

ROOT = Path(__file__).resolve().parents[1]
PATHS = """
lightning_tasks.BaseTask lightning_tasks.ImageClassificationTask lightning_tasks.LanguageModelingTask
lightning_tasks.SegmentationTask lightning_tasks.TokenSelectionTask lightning_tasks.load_swapped
lightning_tasks.language_modeling.LanguageModelingTask lightning_tasks.image_classification.ImageClassificationTask
lightning_tasks.segmentation.SegmentationTask lightning_tasks.token_selection.TokenSelectionTask
lightning_tasks.token_selection.NormalizedGradientDescent lightning_tasks.base.BaseTask
lightning_tasks.callbacks.AttentionMapLogger lightning_tasks.callbacks.AttentionMonitor
lightning_tasks.callbacks.Callback lightning_tasks.callbacks.FreezeQK lightning_tasks.callbacks.LipschitzMonitor
lightning_tasks.callbacks.LocAteR lightning_tasks.callbacks.NonFiniteGuard lightning_tasks.callbacks.PredictionTable
lightning_tasks.callbacks.PursuitMonitor lightning_tasks.callbacks.QKWeightDecay
lightning_tasks.callbacks.KernelPCAMonitor attnswap.analysis.eigen_residual
lightning_tasks.callbacks.RobustnessEvaluation lightning_tasks.callbacks.RunSummary
lightning_tasks.callbacks.SaveOnStop lightning_tasks.callbacks.SegmentationOverlay
lightning_tasks.callbacks.SpectrumMonitor lightning_tasks.callbacks.SwapAttention
lightning_tasks.callbacks.DriftMonitor lightning_tasks.callbacks.Heal attnswap.analysis.swap_drift
lightning_tasks.callbacks.DAMPenalty lightning_tasks.callbacks.ExactResume attnswap.datamodules.ResumableLoader
attnswap.datamodules.EpochShuffle attnswap.callbacks.ExactResume
lightning_tasks.callbacks.AttentionDiversification lightning_tasks.callbacks.EntropyRegularizer
lightning_tasks.callbacks.LogitMonitor lightning_tasks.callbacks.QKClip lightning_tasks.callbacks.SigmaReparam
lightning_tasks.callbacks.swap_now lightning_tasks.callbacks.init_from.InitFromCheckpoint
lightning_tasks.models.TransformerLM lightning_tasks.models.Segmenter
lightning_tasks.robustness.fgsm lightning_tasks.robustness.pgd lightning_tasks.robustness.spsa
lightning_tasks.robustness.square lightning_tasks.robustness.transfer lightning_tasks.robustness.input_gradient_norms
lightning_tasks.robustness.released_fgsm lightning_tasks.robustness.released_pgd
lightning_tasks.robustness.released_spsa lightning_tasks.__main__.main lightning_tasks.cli.run
attention_modules.hosts.table attention_modules.masks.visible attention_modules.swapped
attention_modules.load_pretrained attention_modules.testing.check_mechanism
attention_modules.rpc.RPCAttention attention_modules.rpc.rpc_attention attention_modules.scaled.ScaledAttention
attention_modules.softmax.SoftmaxAttention attention_modules.symmetric.SymmetricAttention
attention_modules.uniform.UniformAttention attention_modules.prompt.PromptAttention
attnswap.datamodules.ADE20KDataModule attnswap.datamodules.AGNewsDataModule attnswap.datamodules.CIFAR10DataModule
attnswap.datamodules.CamVidDataModule attnswap.datamodules.DigitScenesDataModule attnswap.datamodules.DigitsDataModule
attnswap.datamodules.GutenbergDataModule attnswap.datamodules.ImageNetDataModule
attnswap.datamodules.PythonSourceDataModule attnswap.datamodules.SegmentationDataModule
attnswap.datamodules.TextDataModule attnswap.datamodules.TokenSelectionDataModule
attnswap.datamodules.VisionDataModule attnswap.datamodules.WikiTextDataModule
attnswap.datamodules.vision.VisionDataModule attnswap.datamodules.cifar10.CIFAR10DataModule attnswap.swap_attention
attnswap.restore_attention attnswap.register_mechanism attnswap.AttentionMechanism attnswap.SelfAttention
attnswap.check_mechanism attnswap.declare_host attnswap.register_host attnswap.hosts.Host
attnswap.load_swapped attnswap.explore attnswap.functional.softmax_attention
attnswap.functional.symmetric_attention attnswap.functional.rpc_attention attnswap.functional.scaled_attention
attnswap.functional.uniform_attention attnswap.callbacks.SwapAttention attnswap.callbacks.LocAteR
attnswap.callbacks.AttentionMonitor attnswap.tasks.BaseTask attnswap.tasks.LanguageModelingTask
attnswap.watch attnswap.integrations.transformers.Watch
attnswap.analysis.local_lipschitz attnswap.analysis.attention_entropy
""".split()  # noqa: SIM905 a list of one path a line would take three times the lines


def resolve(path: str) -> object:
    """What a dotted path stands for: the longest part that is a module is imported, the rest are attributes."""
    names = path.split(".")
    for size in range(len(names), 0, -1):
        try:
            found: object = importlib.import_module(".".join(names[:size]))
        except ModuleNotFoundError:
            continue
        for name in names[size:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def test_public_paths_are_importable_and_class_paths_found_in_yaml_and_checkpoints(subtests):
    for path in PATHS:
        with subtests.test(path):
            found = resolve(path)
            assert not path.rpartition(".")[2][0].isupper() or import_object(path) is found


def test_every_path_in_architecture_md_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:attention_modules|lightning_tasks|datamodules)\.[\w.]+)`", text)
    assert len(named) > 30
    for path in named:
        assert resolve(path) is not None, path


def test_no_folder_of_python_is_crowded():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [Path(line) for line in listed.stdout.split()]
    if not files:
        pytest.skip("this is no checkout of git")
    most = {Path("tests/lightning_tasks/callbacks"): 18}
    for folder in {file.parent for file in files}:
        count = sum(file.parent == folder for file in files)
        assert count <= most.get(folder, 16), f"{folder} has {count} files at one level"


def test_help_and_recipes_import_no_torch():
    program = (
        "import sys; from lightning_tasks.__main__ import main\n"
        "for arguments in (['--help'], ['recipes'], ['--version']):\n"
        "    try:\n        main(arguments)\n    except SystemExit:\n        pass\n"
        "assert not {'torch', 'lightning', 'pandas', 'matplotlib'} & set(sys.modules), 'imported too early'"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
