"""σReparam: weights divided by their largest singular value, times a learned scalar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attention_modules.hosts import AttentionLayer
from attention_modules.hosts.base import READS_SWAPPED
from attention_modules.hosts.query import WithoutQuery
from attention_modules.hosts.weights import quantized, wrapped_by_peft
from attention_modules.kernels import without_autocast
from attention_modules.mechanism import AttentionMechanism

_ORIGINAL = re.compile(r"(?P<owner>(?:.*\.)?)parametrizations\.(?P<tensor>\w+)\.original", re.DOTALL)
_PARTS = ("gamma", "u", "v")
_ROUNDING = 1e-5  # relative, of uᵀ W v in float32
_SHORTER = 1e-4  # than unit vectors, which averages of these are


class SigmaReparametrization(nn.Module):
    """Ŵ = (γ / σ(W)) W, a parametrization of :mod:`torch.nn.utils.parametrize` (Zhai et al., ICML 2023).

    σ(W) = uᵀ W v, with u and v the leading singular vectors: by SVD at the start, then by :meth:`step`. The forward
    pass changes nothing, so that reading the weight does not train it; u and v take no gradient, and γ takes one where
    W does. All three stay in float32, or float64 with the weight, when a module is cast to half precision.

    Args:
        weight: W, whose first dimension is one side of the matrix.
        gamma: γ at the start; None for σ(W), which leaves the weight as it is up to rounding.

    Raises:
        ValueError: if W is zero, not finite or has no values yet.

    Shape:
        Any, as ``weight``.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, gamma: float | None = None) -> None:
        super().__init__()
        self.start = gamma
        for name, value in self.fitted(weight).items():
            if name == "gamma":
                self.gamma = nn.Parameter(value, requires_grad=weight.requires_grad)
            else:
                self.register_buffer(name, value)

    @torch.no_grad()
    def fitted(self, weight: Tensor) -> dict[str, Tensor]:
        """γ, u and v for a weight, as at the start."""
        if weight.is_meta:
            raise ValueError("σReparam needs the weight's values, which are on the meta device: load them first")
        u, sigma, v = _leading(weight)
        return {"gamma": sigma if self.start is None else torch.full_like(sigma, self.start), "u": u, "v": v}

    def forward(self, weight: Tensor) -> Tensor:
        """Ŵ, in the weight's shape and dtype."""
        with without_autocast(weight.device):
            factor = self.gamma / self.sigma(weight)
            return (factor * weight.to(factor.dtype)).to(weight.dtype)

    def sigma(self, weight: Tensor) -> Tensor:
        """uᵀ W v, a scalar of at least float32."""
        # Copies: a backward pass may come after the next step, where a loss holds several batches.
        return _sigma(weight, self.u.clone(), self.v.clone())

    @torch.no_grad()
    def step(self, weight: Tensor) -> None:
        """One step of the power iteration, in place.

        Where the weight takes no gradient, only if σ grows by more than rounding: u and v of a frozen weight rest, and
        those of one that changes all the same, as a momentum encoder's, follow it.
        """
        with without_autocast(weight.device):
            matrix = _matrix(weight)
            v = nn.functional.normalize(torch.mv(matrix.t(), self.u.to(matrix.dtype)), dim=0).to(self.v.dtype)
            u = nn.functional.normalize(torch.mv(matrix, v.to(matrix.dtype)), dim=0).to(self.u.dtype)
            if not weight.requires_grad:
                grows = _sigma(weight, u, v) > (1 + _ROUNDING) * self.sigma(weight)
                u, v = torch.where(grows, u, self.u), torch.where(grows, v, self.v)
            self.v.copy_(v)
            self.u.copy_(u)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SigmaReparametrization:
        """As every module's, for ``half()`` and ``to()``; to half precision, that moves and does not cast."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if new.dtype in (torch.float16, torch.bfloat16) else new

        return super()._apply(moved, recurse)


def _leading(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular vectors of a weight, and the value between them.

    Raises:
        ValueError: if it is zero or not finite.
    """
    matrix = _matrix(weight)
    if not bool(matrix.isfinite().all()) or not bool(matrix.any()):
        raise ValueError("σReparam divides by the largest singular value of a weight that is zero or not finite")
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, 0].clone(), values[0].clone(), right[0].clone()


def _sigma(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """uᵀ W v of unit vectors; averages of weights leave averages of these, which are shorter."""
    matrix = _matrix(weight)
    u, v = u.to(matrix.dtype), v.to(matrix.dtype)
    return torch.dot(u, torch.mv(matrix, v)) / (torch.linalg.vector_norm(u) * torch.linalg.vector_norm(v))


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))


def sigma_reparametrize(owner: nn.Module, tensor: str, gamma: float | None = None) -> None:
    """Put σReparam onto a weight of a module, which keeps the Parameter under ``parametrizations.TENSOR.original``.

    The module's state dict then has γ, u and v beside the original; it also loads the plain layout, and takes γ, u and
    v of the loaded weight, as at the start. A u or v that is zero or not finite is made anew from the loaded weight;
    loading a γ that is not finite is an error, and so is one γ for weights that are one Parameter here and have two.

    Raises:
        ValueError: as :class:`SigmaReparametrization`, and if the weight is quantized.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import sigma_reparametrize
        >>> layer = torch.nn.Linear(4, 4)
        >>> before = layer.weight.detach().clone()
        >>> sigma_reparametrize(layer, "weight")
        >>> torch.allclose(layer.weight, before, atol=1e-6)
        True
    """
    sigma_reparametrize_all(owner, [(owner, tensor)], gamma)


def sigma_reparametrize_all(
    model: nn.Module, weights: Sequence[tuple[nn.Module, str]], gamma: float | None = None
) -> None:
    """Put σReparam onto weights of a model; those that are one Parameter have one σ and one γ.

    Raises:
        ValueError: as :func:`sigma_reparametrize`, and if something else in the model has the Parameter of one too,
            before any is changed.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import linear_weights, sigma_reparametrize_all
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> model[1].weight = model[0].weight
        >>> sigma_reparametrize_all(model, linear_weights(model))
        >>> model[0].parametrizations.weight[0] is model[1].parametrizations.weight[0]
        True
    """
    for owner, tensor in weights:
        if codes := quantized(owner, tensor):
            raise ValueError(f"σReparam: {codes}")
    of_weight = {
        id(module.parametrizations[tensor].original): part  # type: ignore[index,union-attr]
        for module, tensor, part in reparametrizations(model)
    }
    _check_no_other_user(model, weights)
    for owner, tensor in weights:
        weight = getattr(owner, tensor)
        if id(weight) not in of_weight:
            of_weight[id(weight)] = SigmaReparametrization(weight, gamma)
    for owner, tensor in weights:
        parametrize.register_parametrization(owner, tensor, of_weight[id(getattr(owner, tensor))])
        owner.register_load_state_dict_pre_hook(_prepare_loading)


def _check_no_other_user(model: nn.Module, weights: Sequence[tuple[nn.Module, str]]) -> None:
    chosen = {(id(owner), tensor) for owner, tensor in weights}
    chosen |= {(id(module.parametrizations[tensor]), "original") for module, tensor, _ in reparametrizations(model)}  # type: ignore[index,union-attr]
    held = {id(getattr(owner, tensor)): (owner, tensor) for owner, tensor in weights}
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        for tensor, value in module._parameters.items():
            if id(value) in held and (id(module), tensor) not in chosen:
                owner, own = held[id(value)]
                raise ValueError(
                    f"σReparam: {f'{names[id(owner)]}.{own}'!r} is {f'{name}.{tensor}'!r} too, the same Parameter, and "
                    "would be another weight there: choose both, or name the first in exclude="
                )


# Of each parametrization: the list of errors of the last loading of a state dict, by which to know that loading, and
# the weight that was loaded last, with its γ, u and v.
_LOADING: WeakKeyDictionary[SigmaReparametrization, tuple[list[str], str, dict[str, Tensor]]] = WeakKeyDictionary()


def _prepare_loading(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Take a plain weight too, make u and v anew that hold no direction, and say which weights of one γ differ."""
    for tensor, parametrization in _of(module):
        plain, inner = f"{prefix}{tensor}", f"{prefix}parametrizations.{tensor}."
        try:
            if plain in state:
                weight = state.pop(plain)
                state |= {f"{inner}original": weight}
                state |= {f"{inner}0.{name}": value for name, value in parametrization.fitted(weight).items()}
            elif f"{inner}original" in state and _has_sigma(state, f"{inner}original"):
                state |= _revived(state, f"{inner}original", _has_direction)
        except ValueError as error:
            errors.append(f"{plain!r}: {error}")
            continue
        given = {name: state[f"{inner}0.{name}"] for name in _PARTS if f"{inner}0.{name}" in state}
        known, other, held = _LOADING.get(parametrization, ([], "", {}))
        if known is errors and any(
            not torch.equal(held[name], given[name].to(held[name])) for name in held.keys() & given.keys()
        ):
            errors.append(
                f"{other!r} and {plain!r} are one Parameter of the model, with one γ, and the state dict has another σ "
                "or γ for each: load it into a model that does not tie them"
            )
        _LOADING[parametrization] = (errors, plain, given)


setattr(_prepare_loading, READS_SWAPPED, True)  # the weight without the query's rows, where a swap drops these


def _revived(state: Mapping[str, Any], key: str, is_good: Callable[[Tensor], bool]) -> dict[str, Tensor]:
    """u and v of a weight in a state dict, by its key: as they are where they are good, or by SVD.

    Raises:
        ValueError: if γ is not finite; where u and v hold none, if the weight is zero or not finite.
    """
    inner = key.removesuffix("original") + "0."
    gamma, u, v = (state[f"{inner}{name}"] for name in _PARTS)
    if gamma.is_meta or u.is_meta or v.is_meta:
        return {}
    if not bool(gamma.isfinite().all()):
        raise ValueError(f"γ is {gamma.item()}: load an earlier checkpoint")
    if is_good(u) and is_good(v):
        return {}
    left, _, right = _leading(state[key])
    return {f"{inner}u": left.to(u), f"{inner}v": right.to(v)}


def _has_direction(vector: Tensor) -> bool:
    return bool(vector.isfinite().all()) and bool(vector.any())


def _is_unit(vector: Tensor) -> bool:
    """Whether it is a unit vector; averages of several are shorter, and not singular vectors of averaged weights."""
    return abs(float(torch.linalg.vector_norm(vector.float())) - 1) < _SHORTER


@torch.no_grad()
def renew_averaged(model: nn.Module) -> None:
    """Make u and v of a model's σReparam anew, by SVD, where they are averages of several: of an averaged model.

    Raises:
        ValueError: if the weight of such ones is zero or not finite.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import renew_averaged, sigma_reparametrize
        >>> layer = torch.nn.Linear(4, 4)
        >>> sigma_reparametrize(layer, "weight", gamma=1.0)
        >>> average = torch.optim.swa_utils.AveragedModel(layer, use_buffers=True)
        >>> renew_averaged(average)
    """
    for module, tensor, part in reparametrizations(model):
        if any(1 - float(torch.linalg.vector_norm(each)) > _SHORTER for each in (part.u, part.v)):  # NaN stays
            u, _, v = _leading(module.parametrizations[tensor].original)  # type: ignore[index,union-attr]
            part.u.copy_(u)
            part.v.copy_(v)


def reparametrizations(model: nn.Module) -> Iterator[tuple[nn.Module, str, SigmaReparametrization]]:
    """Every σReparam in a model: whose weight it is, the weight's name, and the parametrization."""
    for module in model.modules():
        for tensor, parametrization in _of(module):
            yield module, tensor, parametrization


def _of(module: nn.Module) -> Iterator[tuple[str, SigmaReparametrization]]:
    if parametrize.is_parametrized(module):
        for tensor, parts in module.parametrizations.items():  # type: ignore[operator,union-attr]
            if isinstance(parts[0], SigmaReparametrization):
                yield tensor, parts[0]


def power_step(model: nn.Module) -> None:
    """One step of the power iteration for every σReparam of a model: call it before the forward of a training step."""
    once = {id(found[2]): found for found in reparametrizations(model)}  # weights may share one
    for module, tensor, parametrization in once.values():
        parametrization.step(module.parametrizations[tensor].original)  # type: ignore[index,union-attr]


def remove_sigma_reparam(model: nn.Module) -> None:
    """Leave every weight as Ŵ, a plain Parameter; the model then has its plain layout again.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import remove_sigma_reparam, sigma_reparametrize
        >>> layer = torch.nn.Linear(4, 4)
        >>> sigma_reparametrize(layer, "weight", gamma=1.0)
        >>> remove_sigma_reparam(layer)
        >>> [*layer.state_dict()], round(torch.linalg.matrix_norm(layer.weight, 2).item(), 4)
        (['bias', 'weight'], 1.0)
    """
    done: set[int] = set()
    for module, tensor, parametrization in list(reparametrizations(model)):
        first = id(parametrization) not in done  # of several that share it, the first sets their Parameter to Ŵ
        parametrize.remove_parametrizations(module, tensor, leave_parametrized=first)
        done.add(id(parametrization))


def reparametrize_like(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put σReparam onto each weight that has it in a state dict, for the state dict to be loaded after.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import reparametrize_like, sigma_reparametrize
        >>> trained, layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> sigma_reparametrize(trained, "weight")
        >>> reparametrize_like(layer, trained.state_dict())
        >>> layer.load_state_dict(trained.state_dict())
        <All keys matched successfully>
    """
    modules, weights = dict(model.named_modules()), []
    for key in state:
        found = _ORIGINAL.fullmatch(key)
        owner = modules.get(found["owner"].rstrip(".")) if found is not None and _has_sigma(state, key) else None
        if found is not None and owner is not None and found["tensor"] in owner._parameters:
            weights.append((owner, found["tensor"]))  # what is not there, loading names
    sigma_reparametrize_all(model, weights)


def _has_sigma(state: Mapping[str, Any], key: str) -> bool:
    return all(f"{key.removesuffix('original')}0.{name}" in state for name in _PARTS)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with Ŵ in place of each σReparam, which loads strictly into the plain model.

    Of an average of weights, whose u and v are no unit vectors, they are made anew.

    Args:
        state: of a model with σReparam, such as ``checkpoint["state_dict"]``. Where u or v are zero or not finite, they
            are made anew from the weight, as where a model loads them.

    Raises:
        ValueError: naming the weight, if a γ is not finite, or a weight without u and v is zero or not finite.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.sigma import plain_state, sigma_reparametrize
        >>> layer = torch.nn.Linear(4, 4)
        >>> sigma_reparametrize(layer, "weight")
        >>> sorted(plain_state(layer.state_dict()))
        ['bias', 'weight']
    """
    plain = dict(state)
    for key in state:
        found = _ORIGINAL.fullmatch(key)
        inner = key.removesuffix("original")
        if found is None or not _has_sigma(state, key):
            continue
        try:
            plain |= _revived(state, key, _is_unit)
        except ValueError as error:
            raise ValueError(f"{found['owner']}{found['tensor']}: {error}") from None
        weight = plain.pop(key)
        gamma, u, v = (plain.pop(f"{inner}0.{name}") for name in _PARTS)
        factor = gamma / _sigma(weight, u, v)
        plain[found["owner"] + found["tensor"]] = (factor * weight.to(factor.dtype)).to(weight.dtype)
    return plain


def projections(layer: AttentionLayer) -> list[tuple[nn.Module, str]]:
    """The weights of a layer's projections, the output's too: module and name; those of its mechanism are none.

    Raises:
        ValueError: if one is wrapped by peft.
    """
    found = []
    for name, module in layer.module.named_modules():
        if wrapped_by_peft(module):
            raise ValueError(f"{layer.name!r} has adapters ({name}): merge them (merge_and_unload()) before σReparam")
        mechanism = isinstance(module, (AttentionMechanism, SigmaReparametrization))
        inside = any(part in ("mechanism", "parametrizations") for part in name.split("."))
        if mechanism or inside:
            continue
        found += [(module, tensor) for tensor, value in _weights(module)]
    return found


def linear_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The weight of every linear layer of a model: module and name."""
    kinds = (nn.Linear, WithoutQuery, nn.MultiheadAttention)
    known = [module for module in model.modules() if isinstance(module, kinds) or type(module).__name__ == "Conv1D"]
    return [(module, tensor) for module in known for tensor, _ in _weights(module)]


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Matrices of a module, those under σReparam too."""
    held = {name: value for name, value in module._parameters.items() if value is not None}
    held |= {tensor: getattr(module, tensor) for tensor, _ in _of(module)}
    return ((name, value) for name, value in held.items() if name.endswith("weight") and value.ndim >= 2)
