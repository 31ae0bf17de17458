"""Figures of attention maps at validations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from attention_modules import AttentionMechanism, NoMapError
from attention_modules.analysis import attention_rollout
from attention_modules.base import queries_of
from attention_modules.mechanisms.shared.acting import ActingMap
from attention_modules.mechanisms.shared.options import check_flag, check_integer
from attention_modules.mechanisms.shared.probe import acting_map
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.names import layer_label, warn_of_no_map
from lightning_tasks.callbacks.monitoring.observer import MechanismObserver
from lightning_tasks.callbacks.monitoring.warnings import NOT_FINITE, CollapseWarnings, warn_without_validation
from lightning_tasks.figures.attention import draw_over_images, draw_token_maps, no_rasters, patch_grid
from lightning_tasks.runs.files import save_figure
from lightning_tasks.runs.loggers import current_step

_BROADCAST = ("attn_mask", "scale")  # arguments of a mechanism that have samples in four dimensions only


class AttentionMapLogger(MechanismObserver):
    """Draws attention maps of the first samples of a validation, over the images or token by token.

    In a fit every n-th epoch's validation is drawn, and ``validate`` once, from its first batch (keep its order, and
    the samples stay the same): ``attention_maps_layer_00_step_000100.png`` in the run's folder, a file per step, and
    ``attention_maps/layer_00`` in W&B and TensorBoard. The layer's number is its place among all
    self-attention layers of the model, whichever are chosen. The maps are those by which the mechanism mixes the values
    (:func:`attnswap.attention_maps`): for one that iterates (``rpc``), its last pass. The title names the mechanism and
    the step; one that has no map is named by a warning, and not drawn. Images whose tokens are no grid of square
    patches, as in windowed models, Hiera and MAE's encoder, are drawn token by token, like text and the queries of a
    decoder. The colors of each map go from 0 to its largest value, as its color bar says; the smallest and the largest
    are written over it.

    The sanity check of a fit tries the same and draws nothing, so that queries that a layer does not have end the fit
    before its first epoch (without a sanity check, at the first validation that is drawn). Queries or keys that are
    NaN or infinite are warned of, once.

    Plain layers are observed by putting plain softmax attention into them, as
    :class:`~lightning_tasks.callbacks.AttentionMonitor` does. Fused attention stays in use: the rows that are drawn
    are computed beside it, and nothing is hooked but in that batch, which runs without ``torch.compile``. With
    ``rollout`` the whole maps ``[num_samples, H, N, N]`` of a layer, and those of all layers without H, are held. Of a
    layer that a batch calls several times (windows of an image, shared layers) the first call counts, and no other.

    Args:
        every_n_epochs: epochs from one figure to the next.
        num_samples: how many samples.
        heads: which, each by itself; their mean where None.
        queries: places of the tokens whose rows are drawn (negative from the end); where None, for images the mean of
            all rows, for text the first ``max_tokens``.
        max_tokens: keys, and where ``queries`` is None queries, that are drawn of a text.
        rollout: also draw the rollout over the chosen layers (:func:`attention_modules.analysis.attention_rollout`).
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if an argument is out of its limits; when a trainer starts, if no layer matches, one has too few
            heads, or the trainer has a second ``AttentionMapLogger``; when it first fires or tries, if a sample has too
            few tokens, or the layers' maps do not fit a rollout.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import AttentionMapLogger
        >>> trainer = Trainer(callbacks=[AttentionMapLogger(every_n_epochs=5, num_samples=4)], logger=False)
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        num_samples: int = 2,
        heads: list[int] | None = None,
        queries: list[int] | None = None,
        max_tokens: int = 64,
        rollout: bool = False,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(where, layers, exclude)
        self.every_n_epochs = check_integer("every_n_epochs", every_n_epochs, 1)
        self.num_samples = check_integer("num_samples", num_samples, 1)
        self.max_tokens = check_integer("max_tokens", max_tokens, 1)
        for name, chosen in (("heads", heads), ("queries", queries)):
            if chosen is not None and not chosen:
                raise ValueError(f"{name} is empty: give some numbers, or leave it out")
        self.heads = None if heads is None else [check_integer("heads", head, 0) for head in heads]
        self.queries = None if queries is None else list(queries)
        self.rollout = check_flag("rollout", rollout)
        self._told: set[type] = set()  # mechanisms without a map that were warned of
        self._images: Tensor | None = None
        self._batch_size = 0
        self._maps: dict[int, Tensor] = {}  # a layer: [S, heads, rows, keys]
        self._whole: dict[int, Tensor] = {}  # for the rollout, [S, N, N]
        self._places: dict[int, list[int]] = {}  # the rows' numbers, empty for their mean
        self._bad: dict[tuple[str, str], Tensor] = {}  # how many queries and keys of a layer are not finite
        self._warnings = CollapseWarnings("AttentionMapLogger", [NOT_FINITE])

    def _watches(self, stage: str) -> bool:
        return stage in ("fit", "validate")

    def _make_observable(self, pl_module: pl.LightningModule) -> None:
        for layer in self._chosen(pl_module):
            if self.heads is not None and max(self.heads) >= layer.spec.num_heads:
                raise ValueError(
                    f"AttentionMapLogger: heads {self.heads} do not fit {layer.name!r}, which has "
                    f"{layer.spec.num_heads}, counted from 0"
                )
        super()._make_observable(pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        warn_without_validation(trainer, self)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        due = trainer.state.fn != "fit" or (trainer.current_epoch + 1) % self.every_n_epochs == 0
        first = batch_idx == 0 and dataloader_idx == 0
        if first and (due or trainer.sanity_checking) and trainer.is_global_zero:
            self._open(pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._hooks is None:
            return
        if not self._maps:
            rank_zero_warn("AttentionMapLogger: no layer got a sample in the first batch, of which no maps are drawn")
        try:
            rolled = self._rolled() if self.rollout and self._whole else None
            if not trainer.sanity_checking:
                self._draw(trainer, pl_module, rolled)
        finally:
            self._close_unread()

    def _draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rolled: tuple[Tensor, list[int]] | None
    ) -> None:
        step = current_step(trainer)
        self._warnings.look({key: float(count) for key, count in self._bad.items()}, f"validation at step {step}")
        for index, layer in enumerate(self._chosen(pl_module)):
            if index in self._maps:
                names = ["mean of heads"] if self.heads is None else [f"head {head}" for head in self.heads]
                title = f"step {step}, {layer.name}: the map of {type(layer.mechanism).__name__}"
                figure = self._figure(self._maps[index], self._places[index], names, title, layer.name)
                save_figure(trainer, figure, f"attention_maps/{layer_label(layer)}", a_file_per_step=True)
        if rolled is not None:
            figure = self._figure(*rolled, ["rollout"], f"step {step}, rollout", "rollout")
            save_figure(trainer, figure, "attention_maps/rollout", a_file_per_step=True)

    def _open(self, pl_module: pl.LightningModule, batch: Any) -> None:
        self._close_unread()
        given = batch if isinstance(batch, Tensor) else next(iter(_tensors(batch)), None)
        if given is not None and given.ndim == 4 and given.is_floating_point():
            self._images = given[: self.num_samples].detach().float().cpu()
            self._batch_size = len(given)
        chosen = self._chosen(pl_module)
        self._no_rasters = no_rasters(pl_module, [layer.name for layer in chosen])
        self._no_rasters |= {"rollout"} if self._no_rasters else set()
        self._hook(
            (self._mechanism(layer), partial(self._observe, index, layer.name)) for index, layer in enumerate(chosen)
        )

    def _forget(self) -> None:
        self._images, self._no_rasters = None, set[str]()
        self._maps, self._whole, self._places, self._bad = {}, {}, {}, {}

    def _observe(
        self, index: int, name: str, mechanism: AttentionMechanism, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        query, key = args[:2]
        if index in self._maps or not len(query):  # called again, for further windows of an image; or every one damaged
            return
        query = queries_of(mechanism, query, key)
        samples = slice(0, self.num_samples)
        if self._images is not None and len(query) != self._batch_size:
            self._images = None  # windows of images
        bad = [(~given[samples].isfinite()).sum() for given in (query, key)]
        self._bad[NOT_FINITE.statistic, name] = torch.stack(bad).sum()
        given = {of: each[samples] if _has_samples(of, each, len(query)) else each for of, each in kwargs.items()}
        q, k, v = (each[samples] for each in args[:3])
        v.keys_without_value = getattr(args[2], "keys_without_value", 0)  # type: ignore[attr-defined]
        try:
            with torch.no_grad():
                acting = acting_map(mechanism, q, k, v, *args[3:], **given)
                self._keep(index, name, acting)
        except NoMapError as error:
            warn_of_no_map(self, name, mechanism, error, self._told)

    def _keep(self, index: int, name: str, acting: ActingMap) -> None:
        tokens = acting.shape[2]
        if self.rollout:
            self._whole[index] = acting.dense().mean(1).cpu()
        rows = self._rows(tokens, name)
        self._places[index] = rows
        if rows:
            self._maps[index] = self._heads(acting.dense(torch.tensor(rows, device=acting.device)))
            return
        batch, heads, _, columns = acting.shape
        total = torch.zeros(batch, heads, 1, columns, device=acting.device, dtype=torch.float32)
        for _, column, part in acting.blocks():
            total[..., column] += part.sum(2, keepdim=True)
        self._maps[index] = self._heads(total / tokens)

    def _rows(self, tokens: int, name: str) -> list[int]:
        """The queries to draw of so many, empty for the mean of all."""
        if self.queries is None:
            return [] if self._grid(tokens, name) is not None else list(range(min(tokens, self.max_tokens)))
        for query in self.queries:
            if not -tokens <= query < tokens:
                raise ValueError(f"AttentionMapLogger: queries {self.queries} on {name!r}, which has {tokens} tokens")
        return [query % tokens for query in self.queries]

    def _heads(self, maps: Tensor) -> Tensor:
        return (maps.mean(1, keepdim=True) if self.heads is None else maps[:, self.heads]).cpu()

    def _rolled(self) -> tuple[Tensor, list[int]]:
        try:
            rolled = attention_rollout([*self._whole.values()])  # as called
        except ValueError as error:
            raise ValueError(f"AttentionMapLogger: {error}; choose layers of one kind, or rollout: false") from error
        rows = self._rows(rolled.shape[1], "rollout")
        return (rolled[:, rows] if rows else rolled.mean(1, keepdim=True)).unsqueeze(1), rows

    def _grid(self, tokens: int, name: str) -> tuple[int, int, int] | None:
        if self._images is None or name in self._no_rasters:
            return None
        return patch_grid(tokens, *self._images.shape[-2:])

    def _figure(self, maps: Tensor, places: list[int], columns: list[str], title: str, name: str) -> Any:
        """The figure of maps ``[S, heads, rows, keys]`` of a layer, or of the rollout."""
        grid = self._grid(maps.shape[-1], name)
        if self._images is None or grid is None:
            return draw_token_maps(maps[..., : self.max_tokens], places or [0], columns, title)
        prefix, height, width = grid
        patches = maps[..., prefix:].unflatten(-1, (height, width)).transpose(1, 2)
        names = [f"token {place}" for place in places] or ["mean of tokens"]
        return draw_over_images(self._images, patches, names, columns, title)


def _has_samples(name: str, given: Any, batch: int) -> bool:
    """Whether an argument of a mechanism beside q, k and v is of each sample, and not the same for all."""
    if not isinstance(given, Tensor) or given.ndim == 0 or len(given) != batch:
        return False
    return given.ndim == 4 or name not in _BROADCAST


def _tensors(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return [value for value in values if isinstance(value, Tensor)]
