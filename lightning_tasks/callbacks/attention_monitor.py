"""How spread out attention is in each layer while a model trains and is validated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from attention_modules import AttentionMechanism, NoMapError
from attention_modules.analysis import STATISTICS, Statistic, sink_features, token_similarity
from attention_modules.analysis.acting import acting_sums
from attention_modules.base import queries_of
from attention_modules.hosts import AttentionLayer, Host
from attention_modules.hosts.model.seen import unplaced
from attention_modules.masks import seen_tokens
from attention_modules.mechanisms.shared.options import check_integer
from attention_modules.mechanisms.shared.probe import acting_map
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.heads import HeadRecord, stack_sums
from lightning_tasks.callbacks.monitoring.names import (
    layer_label,
    layer_number,
    log_now,
    to_numbers,
    warn_of_no_map,
)
from lightning_tasks.callbacks.monitoring.observer import MechanismObserver
from lightning_tasks.callbacks.monitoring.warnings import (
    FEWEST_KEYS,
    NOT_FINITE,
    SIGNS,
    CollapseWarnings,
    warn_without_validation,
)
from lightning_tasks.runs.loggers import current_step, keeps_history
from lightning_tasks.runs.metric_names import MetricName, in_stage
from lightning_tasks.training.distributed import EpochSums, log_joined
from lightning_tasks.training.limits import is_sequence

Stage = Literal["train", "validation", "test"]
Observable = Statistic | Literal["sink", "token_similarity", "sink_norm", "sink_coordinate"]
LOGGED: tuple[Observable, ...] = (*STATISTICS, "sink", "token_similarity")
OBSERVABLES: tuple[Observable, ...] = (*LOGGED, "sink_norm", "sink_coordinate")
BY_HEAD, UNIT = "entropy", "[nats]"  # of the heat maps
SINK_ROWS = 256  # looked at for sinks, so that they cost a fraction of a pass of attention in long sequences


class AttentionMonitor(MechanismObserver):
    """Logs attention entropy and its relatives, a layer and averaged, every n steps and over validation.

    Names are ``attention/entropy/layer_00`` and ``attention/entropy/mean``, likewise ``normalised_entropy``,
    ``effective_support`` (the effective number of tokens) and ``largest_probability``; during validation and test they
    start with ``val/`` and ``test/``. Each row of attention that sees a key (for ``normalised_entropy``: two keys)
    counts once, over samples, heads and batches, but those of tokens that no row sees (padding); in ``mean`` each row
    of any layer does, so that it is the mean of the layers where they see equally many rows, and those that see more
    weigh more (a windowed model's early stages). Where a model holds several networks, each has a mean of its own:
    ``attention/student/entropy/mean``.
    Definitions: :func:`attention_modules.analysis.attention_statistics`, of the map by which the mechanism mixes the
    values (:func:`attnswap.attention_maps`). Where its rows do not sum to 1 (``sigmoid``, ``sink``) or have negative
    weights (``differential``, ``twicing``), entropy, effective number of tokens and sink are those of ``|w|``
    over its sum in the row, and ``largest_probability`` is the largest ``|w|`` as it is. Of a mechanism without a map
    nothing is logged but ``token_similarity``, and a warning names it. The statistics of softmax(q kᵀ), whatever acts,
    are :func:`attention_modules.analysis.attention_statistics`.

    ``sink`` is the largest share of all rows' attention that one key takes, from at most 256 rows of each map of at
    least 16 keys that are seen (all rows where the map is made in chunks anyway), and counts once a head and sample
    (:func:`attention_modules.analysis.attention_sink`);
    ``token_similarity`` the mean cosine between the tokens ``[B, N, C]`` that enter the layer (not those that nothing
    sees), and counts once a sample (:func:`attention_modules.analysis.token_similarity`).

    ``sink_norm`` and ``sink_coordinate``, logged where ``statistics`` names them, say how far the token that the sink
    attends to stands out among those that enter the layer (:func:`attention_modules.analysis.sink_features`).

    The entropy of each head, its mean over the same rows, goes into ``attention_heads.csv`` in the run's folder (a row
    per step, name and layer, a column per head; written after validations and when training ends), and is drawn as heat
    maps of heads by layers at up to six steps: ``attention_entropy_heads.png`` and ``val_attention_entropy_heads.png``.
    In W&B and TensorBoard they are ``attention/entropy_heads``, drawn after validation 1, 2, 4, 8, ... and at the end;
    in W&B each name also has a chart of all its layers then, ``charts/attention/entropy``.

    A layer's value beyond one of these is warned of in words, each kind once: ``normalised_entropy`` below 0.02
    (entropy collapse), ``token_similarity`` above 0.98 (rank collapse; not said at step 0 of a fit, as tokens of a
    fresh model are often alike), ``sink`` above 0.3 (attention sink). These three are computed at every firing, whether
    or not they are logged. Queries or keys that are NaN or infinite are warned of as well; the layer's values are then
    NaN.

    The layer's number is its place among all self-attention layers of the model, whichever are chosen.

    Plain layers are observed by putting plain softmax attention into them while a trainer runs that observes, which
    changes no output; at its end they are plain again. Between firings nothing is hooked. A firing (an observed step,
    or any batch of an observed evaluation) costs about three more passes of attention for all statistics (``python -m
    benchmarks.callbacks``), and runs without ``torch.compile``; fewer statistics cost less. A mechanism that is neither
    softmax of some queries and keys nor made in chunks of rows (``scaled``, ``twicing``, ``talking_heads``, a function
    of one's own that writes the softmax out) costs M / d passes of its own, for M keys and heads of width d; from 8 d
    rows on d rows are looked at, for a few passes. Training values under several processes are those of the first one's
    batch.

    Args:
        every_n_steps: optimizer steps from one observed training batch to the next.
        statistics: which statistics to log; all but the last two of the sink where not given.
        stages: when to observe, of ``"train"``, ``"validation"`` and ``"test"``.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a value is out of its limits; when a trainer starts, if it has a second ``AttentionMonitor``;
            when the model is configured, if no layer matches.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import AttentionMonitor
        >>> trainer = Trainer(callbacks=[AttentionMonitor(every_n_steps=100)], logger=False)
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        statistics: Sequence[Observable] = LOGGED,
        stages: Sequence[Stage] = ("train", "validation"),
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(where, layers, exclude)
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self.statistics = _some_of("statistics", statistics, OBSERVABLES)
        self.stages = _some_of("stages", stages, get_args(Stage))
        self._computed = tuple(dict.fromkeys((*self.statistics, *(sign.statistic for sign in SIGNS))))
        self._last_step = -1
        self._in_backward = False
        # A layer, a call: the sum over rows, and their number, [2], for BY_HEAD [2, H].
        self._observed: list[list[dict[str, Tensor]]] = []
        self._tokens: dict[int, Tensor] = {}  # what entered a layer whose attention is not yet called
        self._warnings = CollapseWarnings("AttentionMonitor")
        self._charts = LayerCharts("AttentionMonitor")
        self._heads = HeadRecord()
        self._told: set[type] = set()  # mechanisms without a map that were warned of
        self._sums = EpochSums()  # of an evaluation so far
        self._evaluated: Tensor | None = None  # what heads gave in it, [2, layers, H]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._last_step = -1
        self._sums, self._evaluated = EpochSums(), None
        self._charts.restart()
        self._heads.restart()
        super().setup(trainer, pl_module, stage)

    def _watches(self, stage: str) -> bool:
        watched = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}
        return bool(set(self.stages) & set(watched.get(stage, ())))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "validation" in self.stages and "train" not in self.stages:
            warn_without_validation(trainer, self)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = current_step(trainer)
        if "train" in self.stages and step % self.every_n_steps == 0 and step != self._last_step:
            self._last_step = step
            self._open(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._hooks is not None:
            means = _means(self._collect())
            logged = {name: mean for name, mean in means.items() if self._is_logged(name)}
            numbers = log_now(pl_module, logged, means)
            self._warn(numbers, f"training step {self._last_step}")
            self._charts.add(trainer, self._last_step, {name: numbers[name] for name in logged})
            if BY_HEAD in self.statistics:
                self._heads.add(trainer, _logged_name(BY_HEAD), self._last_step, self._numbers, self._by_head)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._in_backward = True  # activation checkpointing runs forward again in there

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._in_backward = False

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if "validation" in self.stages and not trainer.sanity_checking:
            self._open(pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add_batch(pl_module, "val")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "validation" in self.stages and not trainer.sanity_checking:
            self._end_evaluation(trainer, pl_module, "val")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        due = self._charts.after_validation(trainer, ("val/attention",)) and keeps_history(trainer)
        if due or trainer.state.fn != "fit":
            self._heads.draw(trainer, UNIT)
        else:
            self._heads.write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.log(trainer)
        self._heads.draw(trainer, UNIT)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if isinstance(exception, KeyboardInterrupt):  # after others the device may give nothing back
            self._heads.write(trainer)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if "test" in self.stages:
            self._open(pl_module)

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add_batch(pl_module, "test")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if "test" in self.stages:
            self._end_evaluation(trainer, pl_module, "test")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._heads.draw(trainer, UNIT)

    def _add_batch(self, pl_module: pl.LightningModule, stage: str) -> None:
        """Keep what a batch of an evaluation gave; other processes may have none, so nothing is joined here."""
        if self._hooks is None:
            return
        seen = self._collect()
        if BY_HEAD in self.statistics:
            self._evaluated = self._by_head if self._evaluated is None else self._evaluated + self._by_head
        self._warn(to_numbers(_means(seen)), f"{stage} at step {current_step(pl_module.trainer)}")
        for name, (total, rows) in seen.items():
            if self._is_logged(name):
                self._sums.add(name, total, rows)

    def _end_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the means over all batches of all processes, and keep what their heads gave."""
        layers = self._chosen(pl_module)
        networks = _networks(layers)
        names = [
            *(_logged_name(name, label) for name in self.statistics for label in map(layer_label, layers)),
            *(_mean_name(name, network) for name in self.statistics for network in networks),
        ]
        joined = self._sums.join(trainer, names, pl_module.device)
        log_joined(pl_module, {in_stage(stage, name): mean for name, mean in joined.items()})
        if BY_HEAD not in self.statistics:
            return
        seen, self._evaluated = self._evaluated, None
        if seen is None:  # this process had no batch, but others may
            num_heads = [layer.spec.num_heads for layer in layers]
            seen = stack_sums([None] * len(num_heads), num_heads, pl_module.device)
        whole: Any = trainer.strategy.reduce(seen, reduce_op="sum")
        numbers = [layer_number(layer) for layer in layers]
        self._heads.add(trainer, in_stage(stage, _logged_name(BY_HEAD)), current_step(trainer), numbers, whole)

    def _open(self, pl_module: pl.LightningModule) -> None:
        self._forget()  # what a batch that was skipped before its end left
        layers = self._chosen(pl_module)
        self._observed = [[] for _ in layers]
        self._names = {layer_label(layer): layer.name for layer in layers}
        self._networks = _networks(layers)
        self._numbers = [layer_number(layer) for layer in layers]
        self._untrained = pl_module.trainer.state.fn == "fit" and current_step(pl_module.trainer) == 0
        self._num_heads, self._device = [layer.spec.num_heads for layer in layers], pl_module.device
        hooks: list[tuple[nn.Module, Any]] = []
        for index, layer in enumerate(layers):
            hooks.append((self._mechanism(layer), partial(self._observe, index, layer.name)))
            hooks.append((layer.module, partial(self._enter, index, layer.host)))
        self._hook(hooks)

    def _enter(self, index: int, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the tokens that enter a layer, as ``[B, N, C]``, until its attention is called."""
        given = host.tokens(module, args, kwargs)
        if given is not None and given.ndim == 3 and given.is_floating_point():
            self._tokens[index] = given if host.batch_first(module) else given.transpose(0, 1)

    @torch.no_grad()
    def _observe(
        self,
        index: int,
        name: str,
        mechanism: AttentionMechanism,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self._in_backward:
            return
        query, key = args[:2]
        query = queries_of(mechanism, query, key)
        seen = seen_tokens(kwargs.get("attn_mask"), query, key)
        bad = ~query.isfinite(), ~key.isfinite()
        finite = ~torch.stack([each.flatten(1).any(1) for each in bad]).any(0)
        sums, shares = self._of_map(name, mechanism, args, kwargs, seen)
        tokens = _batch_first(self._tokens.pop(index, None), query)
        if shares is not None:
            if seen is not None:  # a key among fewer says nothing
                shares = shares.masked_fill((seen.sum(-1) < FEWEST_KEYS)[:, None, None], torch.nan)
            sums["sink"] = _known(shares.amax(-1), finite.unsqueeze(1))
        if tokens is not None:
            known = tokens.isfinite().flatten(1).all(1)
            valid = seen if seen is not None and seen.shape == tokens.shape[:2] else None
            if shares is not None and tokens.shape[:2] == (shares.shape[0], shares.shape[2]):
                features, both = sink_features(tokens, shares, valid), (known & finite).unsqueeze(1)
                sums |= {name: _known(values, both) for name, values in features.items()}
            similarity = token_similarity(tokens, valid)
            if seen is not None and valid is None:
                similarity = similarity.masked_fill(unplaced(seen, tokens), torch.nan)
            sums["token_similarity"] = _known(similarity, known)
        count = torch.stack([each.sum() for each in bad]).sum().float()
        sums[NOT_FINITE.statistic] = count, torch.ones_like(count)
        self._observed[index].append(
            {
                name: torch.stack([each.sum(0) if name == BY_HEAD else each.sum() for each in both])
                for name, both in sums.items()
            }
        )

    def _of_map(
        self,
        name: str,
        mechanism: AttentionMechanism,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
        seen: Tensor | None,
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor | None]:
        """Sums over the rows of the map that acts, and what each key takes; nothing where there is none."""
        try:
            return acting_sums(
                acting_map(mechanism, *args, **kwargs),
                attn_mask=kwargs.get("attn_mask"),
                is_causal=kwargs.get("is_causal", False),
                statistics=[of_rows for of_rows in STATISTICS if of_rows in self._computed],
                sink_rows=SINK_ROWS if args[1].shape[2] >= FEWEST_KEYS else None,
                counting=seen,
            )
        except NoMapError as error:
            warn_of_no_map(self, name, mechanism, error, self._told)
            return {}, None

    def _is_logged(self, name: str) -> bool:
        return MetricName.parse(name).statistic in self.statistics

    def _warn(self, means: dict[str, float], where: str) -> None:
        seen = {
            (sign.statistic, name): means[key]
            for sign in self._warnings.wanted
            for label, name in self._names.items()
            if (key := _logged_name(sign.statistic, label)) in means
        }
        self._warnings.look(seen, where, self._untrained)

    def _collect(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Unhook, and return by logged name the sum of what was seen since :meth:`_open`, and over how many rows."""
        if self._hooks is None:
            return {}
        self._unhook()
        values: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self._computed:
            seen = [[call[name] for call in calls if name in call] for calls in self._observed]
            by_layer = [torch.stack(calls).sum(0) if calls else None for calls in seen]
            if name == BY_HEAD:
                self._by_head = stack_sums(by_layer, self._num_heads, self._device)
            sums = {
                label: each.sum(-1) if name == BY_HEAD else each
                for label, each in zip(self._names, by_layer, strict=True)
                if each is not None
            }
            for label, (total, rows) in sums.items():
                values[_logged_name(name, label)] = (total, rows)
            for network, labels in self._networks.items():
                there = [sums[label] for label in labels if label in sums]
                if there:
                    # By rows: a mean of means, averaged over batches, would be none of the layers' averages.
                    total, rows = torch.stack(there).sum(0)
                    values[_mean_name(name, network)] = (total, rows)
        self._forget()
        return values

    def _forget(self) -> None:
        self._in_backward = False
        self._observed, self._tokens = [], {}


def _logged_name(statistic: str, line: str = "") -> str:
    return str(MetricName(f"attention/{statistic}", line))


def _mean_name(statistic: str, network: str) -> str:
    return _logged_name(f"{network}/{statistic}" if network else statistic, "mean")


def _networks(layers: Sequence[AttentionLayer]) -> dict[str, list[str]]:
    """Labels of the layers by the network that holds them; under "" where they are all of one."""
    several = len({layer.network for layer in layers}) > 1
    found: dict[str, list[str]] = {}
    for layer in layers:
        found.setdefault(layer.network or "model" if several else "", []).append(layer_label(layer))
    return found


def _means(sums: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: total / rows for name, (total, rows) in sums.items()}


def _known(values: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """The values, and which there are: NaN of what is finite says that there is none, and becomes 0."""
    none = values.isnan() & finite
    return values.masked_fill(none, 0.0), ~none


def _batch_first(tokens: Tensor | None, query: Tensor) -> Tensor | None:
    """Tokens ``[B, N, C]`` of ``[N, B, C]``, as the shape of queries ``[B, H, N, d]`` tells where B is not N."""
    batch, number = query.shape[0], query.shape[2]
    if tokens is not None and tokens.shape[:2] == (number, batch) != (batch, number):
        return tokens.transpose(0, 1)
    return tokens


_Name = TypeVar("_Name", bound=str)


def _some_of(what: str, chosen: Sequence[_Name], known: Sequence[_Name]) -> tuple[_Name, ...]:
    given = chosen if is_sequence(chosen) or isinstance(chosen, (set, frozenset)) else ()
    if not given or any(name not in known for name in given):
        raise ValueError(f"{what} must be a list of some of {', '.join(known)}, got {chosen!r}")
    return tuple(chosen)
