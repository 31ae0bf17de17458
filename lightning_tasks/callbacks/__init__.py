"""Callbacks that work on any LightningModule, from Python and from YAML, of ``lightning`` and ``pytorch_lightning``."""

from lightning_tasks.callbacks.attention_maps import AttentionMapLogger
from lightning_tasks.callbacks.attention_monitor import AttentionMonitor
from lightning_tasks.callbacks.base import Callback
from lightning_tasks.callbacks.controls import FreezeQK, QKWeightDecay
from lightning_tasks.callbacks.healing.drift_monitor import DriftMonitor
from lightning_tasks.callbacks.healing.heal import Heal
from lightning_tasks.callbacks.kernel_pca_monitor import KernelPCAMonitor
from lightning_tasks.callbacks.lipschitz_monitor import LipschitzMonitor
from lightning_tasks.callbacks.locater import LocAteR
from lightning_tasks.callbacks.non_finite_guard import NonFiniteGuard
from lightning_tasks.callbacks.pursuit_monitor import PursuitMonitor
from lightning_tasks.callbacks.resuming.exact_resume import ExactResume
from lightning_tasks.callbacks.resuming.save_on_stop import SaveOnStop
from lightning_tasks.callbacks.robustness import RobustnessEvaluation
from lightning_tasks.callbacks.spectrum_monitor import SpectrumMonitor
from lightning_tasks.callbacks.stabilizers.attention_diversification import AttentionDiversification
from lightning_tasks.callbacks.stabilizers.dam_penalty import DAMPenalty
from lightning_tasks.callbacks.stabilizers.entropy_regularizer import EntropyRegularizer
from lightning_tasks.callbacks.stabilizers.logit_monitor import LogitMonitor
from lightning_tasks.callbacks.stabilizers.qk_clip import QKClip
from lightning_tasks.callbacks.stabilizers.sigma_reparam import SigmaReparam
from lightning_tasks.callbacks.swap import SwapAttention
from lightning_tasks.callbacks.writing.prediction_table import PredictionTable
from lightning_tasks.callbacks.writing.run_summary import RunSummary
from lightning_tasks.callbacks.writing.segmentation_overlay import SegmentationOverlay
from lightning_tasks.training.configure_hook import swap_now

__all__ = [
    "AttentionDiversification",
    "AttentionMapLogger",
    "AttentionMonitor",
    "Callback",
    "DAMPenalty",
    "DriftMonitor",
    "EntropyRegularizer",
    "ExactResume",
    "FreezeQK",
    "Heal",
    "KernelPCAMonitor",
    "LipschitzMonitor",
    "LocAteR",
    "LogitMonitor",
    "NonFiniteGuard",
    "PredictionTable",
    "PursuitMonitor",
    "QKClip",
    "QKWeightDecay",
    "RobustnessEvaluation",
    "RunSummary",
    "SaveOnStop",
    "SegmentationOverlay",
    "SigmaReparam",
    "SpectrumMonitor",
    "SwapAttention",
    "swap_now",
]
