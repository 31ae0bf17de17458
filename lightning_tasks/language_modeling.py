"""Causal language modeling: next-token loss in chunks, and perplexity over whole splits."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_tasks.base import BaseTask, Buildable
from lightning_tasks.models.causal_lm import (
    build_causal_lm,
    bypassed,
    check_window,
    has_plain_head,
    log_probabilities,
    loss_sum,
    model_spec,
)
from lightning_tasks.models.lora import check_lora, with_lora
from lightning_tasks.models.losses import IGNORE_INDEX
from lightning_tasks.training.distributed import repeated_rows
from lightning_tasks.training.kept_layers import Layers, check_swapped_layers
from lightning_tasks.training.mean import WeightedMean
from lightning_tasks.training.mechanisms import attention_spec, mechanism_from, named

Batch = tuple[Tensor, Tensor]


class PerplexityFromLoss(WeightedMean):
    """exp of the token-weighted mean of the losses that were given."""

    def compute(self) -> Tensor:
        """The perplexity over all that was seen, by all processes."""
        return super().compute().exp()


class LanguageModelingTask(BaseTask):
    """Next-token prediction with any causal language model and any attention mechanism.

    Batches are ``(inputs [B, T], targets [B, T])``, int64; targets of -100 do not count. Logs ``train/loss`` (mean
    over a step's tokens), and over the whole split ``{val,test}/loss`` (nats a token) and ``{val,test}/perplexity``
    (exp of it). With several processes each sample counts once.

    Args:
        model: a class, its name, or ``{class_path, init_args}`` (it gets ``vocab_size`` and ``attention`` where its
            constructor takes them), a Hugging Face config (object, or dict with ``model_type``), or the name or
            folder of a pretrained Hugging Face causal language model.
        vocab_size: number of token ids; where None, that of the data module, kept in the hyper-parameters.
        mechanism: that of the attention layers, as :func:`~attention_modules.swap_attention` takes it: short
            name, class, function, import path, or ``{class_path, init_args}``.
        options: its options by name.
        layers: which layers get it, counted in module order; all where None; ``{"keep_every": 4}`` for three of
            four, as :class:`~attnswap.callbacks.SwapAttention` says.
        other_attention: the mechanism of the other layers, with its defaults.
        optimizer, scheduler, scheduler_interval, scheduler_monitor, param_groups: see
            :class:`~lightning_tasks.base.BaseTask`.
        chunk_size: tokens whose logits exist together; None for all, by a call of the whole model, whose logits
            ``Heal`` can match.
        lora: options of ``peft.LoraConfig`` such as ``{"r": 8}``: adapters and the mechanisms' Parameters train, all
            else is frozen; around all linear layers where ``target_modules`` is left out. None trains all.

    Raises:
        TypeError: if something cannot be stored in a checkpoint; the text names the cure.
        ValueError: if a name stands for nothing; on building, if the vocabulary is unknown or too large.

    Example:
        >>> from attnswap.tasks import LanguageModelingTask
        >>> task = LanguageModelingTask(vocab_size=4000, mechanism="symmetric")
    """

    metric_names = ("metrics",)

    def __init__(
        self,
        model: Buildable = "TransformerLM",
        vocab_size: int | None = None,
        mechanism: Buildable = "softmax",
        options: dict[str, Any] | None = None,
        layers: Layers = None,
        other_attention: Buildable = "softmax",
        optimizer: Buildable = "AdamW",
        scheduler: Buildable | None = None,
        scheduler_interval: str = "step",
        scheduler_monitor: str = "val/loss",
        param_groups: list[dict[str, Any]] | None = None,
        chunk_size: int | None = 256,
        lora: dict[str, Any] | None = None,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, or None for all tokens, got {chunk_size}")
        super().__init__(
            model=model_spec(model),
            vocab_size=vocab_size,
            mechanism=attention_spec(mechanism, options),
            options=options,
            layers=check_swapped_layers(layers, named(mechanism)),
            other_attention=attention_spec(other_attention),
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            scheduler_monitor=scheduler_monitor,
            param_groups=param_groups,
            chunk_size=chunk_size,
            lora=check_lora(lora),
        )
        measures = MetricCollection({"loss": WeightedMean(), "perplexity": PerplexityFromLoss()})
        self.val_metrics = measures.clone(prefix="val/")
        self.test_metrics = measures.clone(prefix="test/")
        self._has_plain_head = self._says_why_whole = False

    def build_model(self) -> nn.Module:
        """The language model; where the vocabulary was left open, it is the data module's.

        Raises:
            ValueError: if neither the task nor a data module says how large the vocabulary is, or the data needs more,
                or the data module's windows are longer than the model takes.
        """
        if self.hparams["vocab_size"] is None:
            self.hparams["vocab_size"] = self._vocab_size_of_data()
        else:
            needed = getattr(getattr(self._trainer, "datamodule", None), "vocab_size", None)
            if needed is not None and needed > self.hparams["vocab_size"]:
                raise ValueError(
                    f"vocab_size={self.hparams['vocab_size']} is below the {needed} ids of the data module; "
                    "leave it out, or give the data module that vocab_size"
                )
        attention, options = mechanism_from(self.hparams["mechanism"], self.hparams["options"])
        other, other_options = mechanism_from(self.hparams["other_attention"], None)
        model = build_causal_lm(
            *(self.hparams["model"], self.hparams["vocab_size"], attention, options, self.hparams["layers"]),
            *(other, other_options),
        )
        window = getattr(getattr(self._trainer, "datamodule", None), "num_tokens", None)
        if window is not None:
            check_window(model, window)
        if self.hparams["lora"] is not None:
            return with_lora(model, self.hparams["lora"])
        self._has_plain_head = has_plain_head(model)
        return model

    def _vocab_size_of_data(self) -> int:
        datamodule = getattr(self._trainer, "datamodule", None)
        size = getattr(datamodule, "vocab_size", None)
        if size is None:
            raise ValueError(
                "the vocabulary is unknown: give LanguageModelingTask(vocab_size=...), or fit with a data module that "
                f"has a vocab_size after setup (got {type(datamodule).__name__})"
            )
        return int(size)

    def forward(self, tokens: Tensor) -> Any:
        """What the model makes of token ids ``[B, N]``."""
        return self.model(tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss over the batch's tokens, in nats."""
        total, count = self._loss(*batch)
        loss = total / count.clamp(min=1)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``val/loss`` and ``val/perplexity``."""
        self._evaluate(self.val_metrics, self.trainer.val_dataloaders, batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``test/loss`` and ``test/perplexity``."""
        self._evaluate(self.test_metrics, self.trainer.test_dataloaders, batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """ln p of each target ``[B, T]`` in nats, 0 where the target is -100."""
        return log_probabilities(self.model, *batch, self._tokens_at_once)

    def prediction_rows(self, prediction: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """A row per window: how many of its tokens count, and their mean loss in nats (0 where none does)."""
        counts = (batch[1] != IGNORE_INDEX).sum(1)
        losses = -prediction.sum(1) / counts.clamp(min=1)
        pairs = zip(counts.tolist(), losses.tolist(), strict=True)
        return [{"tokens": count, "loss": f"{loss:.6f}"} for count, loss in pairs]

    @property
    def _tokens_at_once(self) -> int | None:
        """How many tokens' logits exist together; None (all) where a model's logits are more than its head's output.

        All too where hooks or a compilation of the model or its head would be passed by, and where FSDP2 shards the
        model: it gathers weights for the forward pass of the whole.
        """
        if not self._has_plain_head or self._device_mesh is not None or self.hparams["chunk_size"] is None:
            return None
        if not (passed_by := bypassed(self.model)):
            return int(self.hparams["chunk_size"])
        if not self._says_why_whole:
            self._says_why_whole = True
            rank_zero_warn(
                f"LanguageModelingTask: chunk_size={self.hparams['chunk_size']} is left out, and all logits of a batch "
                f"are made at once: {passed_by} would not act in chunks"
            )
        return None

    def _loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses and number of the tokens that count."""
        return loss_sum(self.model, inputs, targets, self._tokens_at_once), (targets != IGNORE_INDEX).sum()

    def _evaluate(self, metrics: MetricCollection, dataloader: Any, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        repeated = repeated_rows(dataloader, batch_idx, len(targets))
        if repeated is not None and repeated.any():  # not run, so that no monitor sees them either
            inputs, targets = inputs[~repeated], targets[~repeated]
        if len(targets):
            total, count = self._loss(inputs, targets)
            metrics.update(total / count.clamp(min=1), count)
        self.log_dict(metrics, prog_bar=True, batch_size=len(inputs))
