"""What every mechanism must satisfy, as one call for anyone's mechanism."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.function import NotTakenError
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, Mechanism, build_mechanism
from attention_modules.mechanisms.shared.outside import refuse_outside

BATCH = 2
TOKENS = 7
SPEC = AttentionSpec(dim=16, num_heads=2, head_dim=8)
HALF_TOLERANCE = {torch.bfloat16: 0.3, torch.float16: 0.1}  # relative, of the output's norm


class MechanismCheckError(AssertionError):
    """A mechanism fails a check; ``check`` is the name of the check."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass
class Subject:
    """The mechanism under test: how to build it, and inputs for it."""

    mechanism: Mechanism
    spec: AttentionSpec
    options: dict[str, Any] = field(default_factory=dict)

    def new(self, tokens: int = TOKENS) -> AttentionMechanism:
        """A mechanism for ``tokens`` tokens, whose calls hide the future where they must, unless they say otherwise."""
        built = build_mechanism(self.mechanism, replace(self.spec, num_tokens=tokens), **self.options)
        refuse_outside(built)
        if built.causality == "always":
            built.register_forward_pre_hook(
                lambda module, args, given: (args, {"is_causal": True, **given}), with_kwargs=True
            )
        return built

    def build(self, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> AttentionMechanism:
        """The same with random parameters: at a zero start a leak would not show."""
        built = self.new(tokens)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return built.to(dtype).eval()

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """What the mechanism needs of the layer."""
        return self.new().needs

    def inputs(self, tokens: int = TOKENS, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
        """Random q, k, v ``[B, H, N, d]``, and what else the mechanism needs, that ask for gradients."""
        generator = torch.Generator().manual_seed(seed)
        heads = (BATCH, self.spec.num_heads, tokens, self.spec.head_dim)
        shapes: dict[str, tuple[int, ...]] = {name: heads for name in ("q", "k", "v", *self.needs)}
        if "x" in shapes:
            shapes["x"] = (BATCH, tokens, self.spec.dim)
        return {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for name, shape in shapes.items()
        }


def _require(condition: bool | Tensor, check: str, message: str) -> None:
    if not bool(condition):
        raise MechanismCheckError(check, message)


def _require_close(actual: Tensor, expected: Tensor, check: str, message: str, tolerance: float = 1e-4) -> None:
    _require(actual.shape == expected.shape, check, f"{message}: {tuple(actual.shape)} for {tuple(expected.shape)}")
    error = (actual.detach() - expected.detach()).abs().max().item()
    limit = tolerance * (1.0 + expected.detach().abs().max().item())
    _require(error <= limit, check, f"{message}: they differ by {error:.3g}, more than {limit:.3g}")


def _weights(out: Tensor) -> Tensor:
    """Fixed weights of the sum that stands for a loss."""
    return torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).sin().reshape(out.shape).to(out.dtype)


def _gradients(out: Tensor, inputs: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor | None]:
    wanted = {**inputs, **dict(module.named_parameters())}
    grads = torch.autograd.grad(
        (out * _weights(out)).sum(), list(wanted.values()), allow_unused=True, retain_graph=True
    )
    return dict(zip(wanted, grads, strict=True))


def _require_finite(out: Tensor, inputs: dict[str, Tensor], module: nn.Module, check: str, case: str) -> None:
    _require(out.isfinite().all(), check, f"the output is not finite with {case}")
    for name, grad in _gradients(out, inputs, module).items():
        _require(grad is None or grad.isfinite().all(), check, f"the gradient of {name} is not finite with {case}")


def _changed(inputs: dict[str, Tensor], rows: Tensor, factor: float = 10.0) -> dict[str, Tensor]:
    """The inputs with the tokens ``rows`` ``[N]`` replaced by something else and larger."""
    return {n: torch.where(rows[:, None], factor * x.detach().roll(1, -1) + 1.0, x.detach()) for n, x in inputs.items()}


def _additive(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


def _past(tokens: int = TOKENS) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def check_output(subject: Subject, check: str = "output") -> None:
    """The output has the shape and dtype of the values, is finite, and no input was written to."""
    module, inputs = subject.build(), subject.inputs()
    before = {name: x.detach().clone() for name, x in inputs.items()}
    out = module(**inputs)
    _require(out.shape == inputs["v"].shape, check, f"got {tuple(out.shape)} for {tuple(inputs['v'].shape)}")
    _require(out.dtype == inputs["v"].dtype, check, f"got {out.dtype} for {inputs['v'].dtype}")
    _require_finite(out, inputs, module, check, "random inputs")
    for name, x in inputs.items():
        _require(torch.equal(x, before[name]), check, f"forward wrote to {name}")


def check_samples(subject: Subject, check: str = "samples") -> None:
    """No sample of a batch depends on another."""
    module, inputs = subject.build(), subject.inputs()
    alone = module(**{name: x[:1] for name, x in inputs.items()})
    _require_close(alone, module(**inputs)[:1], check, "a sample alone and in a batch")


def check_causality(subject: Subject, check: str = "causality") -> None:
    """No row depends on later tokens, and the three ways to say so give one answer."""
    module, inputs = subject.build(), subject.inputs()
    past: list[dict[str, Any]] = [{"is_causal": True}, {"attn_mask": _past()}]
    refused = {"any": [], "always": [{"is_causal": False}], "never": past}[module.causality]
    if not module.row_masks:
        refused.append({"attn_mask": _past().triu(-1)})
    for case in refused:
        _require_refused(module, inputs, case, check, f"row_masks is {module.row_masks}, causality {module.causality}")
    if module.causality == "never":
        return
    ways: dict[str, dict[str, Any]] = {
        "is_causal=True": {"is_causal": True},
        "a boolean mask": {"attn_mask": _past(), "is_causal": False},
        "an additive mask": {"attn_mask": _additive(_past()), "is_causal": False},
    }
    outputs = {name: module(**inputs, **way) for name, way in ways.items()}
    for name, way in ways.items():
        _require_close(outputs[name], outputs["is_causal=True"], check, f"{name} and is_causal=True")
        for first in range(1, TOKENS):
            other = module(**_changed(inputs, torch.arange(TOKENS) >= first), **way)
            _require_close(
                other[..., :first, :],
                outputs[name][..., :first, :],
                check,
                f"rows before token {first} with the tokens from {first} on changed, under {name}",
            )


def check_masks(subject: Subject, check: str = "masks") -> None:
    """Boolean and additive masks agree in every broadcastable shape, and a wrong shape is an error."""
    module, inputs = subject.build(), subject.inputs()
    heads, rows = subject.spec.num_heads, TOKENS if module.row_masks else 1
    seen = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.4
    seen = (seen | torch.eye(TOKENS, dtype=torch.bool))[:rows]
    expected = module(**inputs, attn_mask=seen.expand(BATCH, heads, -1, -1))
    for shape in ((), (1,), (heads,), (1, 1), (1, heads), (BATCH, 1), (BATCH, heads)):
        mask = seen.expand(*shape, rows, TOKENS)
        for name, form in (("boolean", mask), ("additive", _additive(mask))):
            out = module(**inputs, attn_mask=form)
            _require_close(out, expected, check, f"{name} masks of shapes {tuple(mask.shape)} and [B, H, N, N]")
    unseen = module(**inputs)
    _require((expected - unseen).abs().max() > 1e-6, check, "a mask changes nothing: is it ignored?")
    wrong = torch.ones(rows, TOKENS + 1, dtype=torch.bool)
    _require_refused(module, inputs, {"attn_mask": wrong}, check, f"there are {TOKENS} keys")


def _require_refused(
    module: nn.Module, inputs: dict[str, Tensor], case: dict[str, Any], check: str, reason: str
) -> None:
    try:
        module(**inputs, **case)
    except (ValueError, RuntimeError):
        return
    shown = {name: tuple(value.shape) if torch.is_tensor(value) else value for name, value in case.items()}
    raise MechanismCheckError(check, f"{reason}, and {shown} raised no ValueError")


def check_padding(subject: Subject, check: str = "padding") -> None:
    """Visible outputs depend neither on the content nor on the amount of padding, and send it no gradient."""
    length, total = TOKENS - 3, TOKENS
    module, inputs = subject.build(total), subject.inputs(total)
    padded = torch.arange(total) >= length
    short = module(**{name: x[..., :length, :] for name, x in inputs.items()})
    for name, mask in (("boolean", ~padded.expand(BATCH, 1, 1, -1)), ("additive", _additive(~padded.expand(1, -1)))):
        out = module(**inputs, attn_mask=mask)[..., :length, :]
        _require_close(out, short, check, f"visible rows with and without padding ({name} mask)")
        other = module(**_changed(inputs, padded, 1e3), attn_mask=mask)[..., :length, :]
        _require_close(other, out, check, f"visible rows with other padding ({name} mask)")
        for key, grad in _gradients(out, inputs, module).items():
            leaks = grad is not None and key in inputs and grad[..., length:, :].abs().max() > 1e-6
            _require(not leaks, check, f"visible rows send a gradient to the padding of {key} ({name} mask)")


def check_hidden_tokens(subject: Subject, check: str = "hidden tokens") -> None:
    """What a row may not see, itself or through what it sees, changes nothing there and gets no gradient from there."""
    module, inputs = subject.build(), subject.inputs()
    hidden = torch.tensor([False, False, True, True, False, True, False])  # of TOKENS, between visible ones
    between = torch.eye(TOKENS, dtype=torch.bool) | ~hidden
    cases = {"a mask of tokens": (~hidden[None, :], between)}
    if module.causality != "never":
        cases["hidden tokens and causality"] = (_past() & ~hidden, _past() & between)
    if module.row_masks:
        tree = torch.eye(TOKENS, dtype=torch.bool)
        for token, parent in enumerate((0, 0, 0, 1, 1, 2, 4)):
            tree[token] |= tree[parent]
        window = _past().triu(-1)
        through = torch.linalg.matrix_power(window.float(), TOKENS) > 0
        cases |= {
            "a mask of a tree": (tree, tree),
            "a sliding window": (window, through),
            "two packed sequences": (_packed(3), _packed(3)),
        }
    for case, (mask, reached) in cases.items():
        for form in (mask, _additive(mask)):
            out = module(**inputs, attn_mask=form)
            for token in range(TOKENS):
                apart = ~reached[:, token]  # rows that this token may not change
                if not apart.any():
                    continue
                other = module(**_changed(inputs, torch.arange(TOKENS) == token, 1e2), attn_mask=form)
                what = f"rows that may not see token {token}, with it changed, under {case}"
                _require_close(other[..., apart, :], out[..., apart, :], check, what)
                for key, grad in _gradients(out[..., apart, :], inputs, module).items():
                    leaks = grad is not None and key in inputs and grad[..., token, :].abs().max() > 1e-6
                    _require(not leaks, check, f"{key} of token {token} gets a gradient of such rows, under {case}")


def _packed(first: int, tokens: int = TOKENS) -> Tensor:
    """The causal mask of two sequences in one, the first of so many tokens."""
    second = torch.arange(tokens) >= first
    return _past(tokens) & (second[:, None] == second)


def check_hidden_rows(subject: Subject, check: str = "hidden rows") -> None:
    """A row that sees nothing gives finite values and gradients."""
    module = subject.build()
    seen = _past()
    seen[0] = seen[3] = False
    cases = {"boolean": seen, "additive": _additive(seen), "all hidden": torch.zeros_like(seen)}
    if not module.row_masks:
        first = torch.arange(TOKENS) > 2
        cases = {"all hidden": torch.zeros(1, TOKENS, dtype=torch.bool), "before the others": first[None]}
    for name, mask in cases.items():
        inputs = subject.inputs()
        _require_finite(module(**inputs, attn_mask=mask), inputs, module, check, f"hidden rows ({name} mask)")


def check_zero_keys(subject: Subject, check: str = "zero keys") -> None:
    """Keys of zero norm, all or in some rows, give finite values and gradients."""
    module = subject.build()
    for case, kept in (("all keys zero", torch.zeros(TOKENS)), ("first keys zero", torch.arange(TOKENS) > 2)):
        for causal in _cases(module):
            inputs = {n: (x.detach() * kept[:, None]).requires_grad_() for n, x in subject.inputs().items()}
            out = module(**inputs, **causal)
            _require_finite(out, inputs, module, check, f"{case} ({causal})")


def check_gradients(subject: Subject, check: str = "gradients") -> None:
    """Every gradient equals a central difference in float64, by name; a surrogate one is finite."""
    module, inputs = subject.build(dtype=torch.float64), subject.inputs(dtype=torch.float64)
    step = 1e-6
    for case in _cases(module):
        out = module(**inputs, **case)
        if module.surrogate_gradient:
            _require_finite(out, inputs, module, check, f"random inputs ({case})")
            continue
        grads = _gradients(out, inputs, module)
        for index, (name, x) in enumerate({**inputs, **dict(module.named_parameters())}.items()):
            generator = torch.Generator().manual_seed(index)
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            sums = []
            with torch.no_grad():
                for sign in (1, -1):
                    x.add_(sign * step * direction)
                    out = module(**inputs, **case)
                    sums.append((out * _weights(out)).sum())
                    x.sub_(sign * step * direction)
            grad = grads[name]
            slope = torch.zeros(()) if grad is None else (grad * direction).sum()
            expected = (sums[0] - sums[1]) / (2 * step)
            _require_close(slope, expected, check, f"gradient of {name} and central difference ({case})", 1e-5)


def _cases(module: AttentionMechanism) -> list[dict[str, Any]]:
    """No mask, and causality where calls may have it or not."""
    return [{}, {"is_causal": True}][: 1 + (module.causality == "any")]


def check_single_token(subject: Subject, check: str = "single token") -> None:
    """One token gives finite values and gradients."""
    module, inputs = subject.build(1), subject.inputs(1)
    for case in _cases(module):
        out = module(**inputs, **case)
        _require(out.shape == inputs["v"].shape, check, f"got {tuple(out.shape)} for {tuple(inputs['v'].shape)}")
        _require_finite(out, inputs, module, check, "one token")


def check_dtypes(subject: Subject, check: str = "dtypes") -> None:
    """Half precision, as inputs and under autocast, with and without a mask, is finite both ways and near float32."""
    causal = subject.new().causality != "never"
    masked = (_past() if causal else torch.ones(1, 1, dtype=torch.bool)) & (torch.arange(TOKENS) != 1)
    masks: dict[str, dict[str, Any]] = {
        **({"is_causal": {"is_causal": True}} if causal else {}),
        "a boolean mask": {"attn_mask": masked},
        "an additive mask": {"attn_mask": _additive(masked)},
        "a mask of -1e4": {"attn_mask": torch.zeros(masked.shape).masked_fill(~masked, -1e4)},
    }
    for mask, case in masks.items():
        exact = subject.build()(**subject.inputs(), **case).detach()
        for dtype, tolerance in HALF_TOLERANCE.items():
            for way in ("autocast", "inputs"):
                kind = dtype if way == "inputs" else torch.float32
                module, inputs = subject.build(dtype=kind), subject.inputs(dtype=kind)
                given = {n: x.to(kind) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in case.items()}
                with torch.autocast("cpu", dtype, enabled=way == "autocast"):
                    out = module(**inputs, **given)
                what = f"{dtype} ({way}) under {mask}"
                _require_finite(out, inputs, module, check, what)
                error = ((out.detach().float() - exact).norm() / exact.norm()).item()
                _require(error <= tolerance, check, f"{what} is {error:.2g} from float32, limit {tolerance}")


def check_modes(subject: Subject, check: str = "modes") -> None:
    """train, eval, no_grad and inference_mode give one answer where nothing is dropped."""
    module, inputs = subject.build(), subject.inputs()
    expected = module(**inputs)
    if not module.stochastic:
        _require_close(module.train()(**inputs), expected, check, "train and eval without dropout")
    module.eval()
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            _require_close(module(**inputs), expected, check, f"{name} and eval")


def check_dropout(subject: Subject, check: str = "dropout") -> None:
    """``dropout_p`` acts, and keeps values and gradients finite."""
    module, inputs = subject.build().train(), subject.inputs()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = module(**inputs, dropout_p=0.5)
    _require_finite(out, inputs, module, check, "dropout_p=0.5")
    _require((out - module(**inputs)).abs().max() > 1e-6, check, "dropout_p=0.5 changes nothing: is it ignored?")


def check_scale(subject: Subject, check: str = "scale") -> None:
    """``scale`` acts, and None means 1/sqrt(d)."""
    module, inputs = subject.build(), subject.inputs()
    default = module(**inputs)
    same = module(**inputs, scale=subject.spec.head_dim**-0.5)
    _require_close(same, default, check, "scale=None and scale=1/sqrt(d)")
    other = module(**inputs, scale=0.01)
    acts = (other - default).abs().max() > 1e-6
    if module.surrogate_gradient and not acts:
        slopes = (
            torch.autograd.grad(out.square().sum(), inputs["q"], allow_unused=True)[0] for out in (default, other)
        )
        first, second = (torch.zeros(()) if slope is None else slope for slope in slopes)
        acts = (first - second).abs().max() > 1e-6
    _require(acts, check, "scale=0.01 changes nothing")


def check_query(subject: Subject, check: str = "query") -> None:
    """The query acts exactly where ``uses_query`` says so."""
    module, inputs = subject.build(), subject.inputs()
    other = {**inputs, "q": subject.inputs(seed=1)["q"]}
    change = (module(**other) - module(**inputs)).abs().max()
    if module.uses_query:
        _require(change > 1e-6, check, "uses_query is True, but another query changes nothing")
    else:
        _require(change == 0, check, f"uses_query is False, but another query changes the output by {change:.3g}")


def check_heads(subject: Subject, check: str = "heads") -> None:
    """Where ``per_head`` says that heads can be computed apart, the last one alone gives what it gives among all."""
    module, inputs = subject.build(), subject.inputs()
    if module.per_head is None:
        return
    alone, held = copy.deepcopy(module), dict(module.named_parameters())
    for name in module.per_head:
        rows = len(held[name]) if name in held else None
        fits = rows is not None and rows % subject.spec.num_heads == 0
        _require(fits, check, f"per_head names {name!r}, whose rows are no multiple of the heads ({rows})")
        owner, _, tensor = name.rpartition(".")
        own = held[name].detach().chunk(subject.spec.num_heads)[-1]
        alone.get_submodule(owner)._parameters[tensor] = nn.Parameter(own)
    last = {name: x if name == "x" else x[:, -1:] for name, x in inputs.items()}
    _require_close(alone(**last), module(**inputs)[:, -1:], check, "per_head is given, but a head alone and among all")


def check_parameters(subject: Subject, check: str = "parameters") -> None:
    """Every trainable parameter gets a gradient: an idle one stops DistributedDataParallel."""
    module, inputs = subject.build(), subject.inputs()
    module.train(module.stochastic)  # what is drawn in training need not learn elsewhere
    grads = _gradients(module(**inputs), inputs, module)
    for name, _ in module.named_parameters():
        _require(grads[name] is not None, check, f"parameter {name} is not used")


def check_copies(subject: Subject, check: str = "copies") -> None:
    """A deep copy and a module that loaded the state give the same output."""
    module, inputs = subject.build(), subject.inputs()
    expected = module(**inputs)
    _require_close(copy.deepcopy(module)(**inputs), expected, check, "deepcopy and original", 0.0)
    other = subject.new()  # with its own start values
    other.load_state_dict(module.state_dict())
    _require_close(other.eval()(**inputs), expected, check, "a module that loaded state_dict() and the original", 0.0)


def check_compile(subject: Subject, check: str = "compile") -> None:
    """``torch.compile`` (backend ``aot_eager``) keeps outputs and gradients."""
    module, inputs = subject.build(), subject.inputs()
    mask = torch.arange(TOKENS).expand(BATCH, 1, 1, -1) < TOKENS - 1
    for case in (*_cases(module), {"attn_mask": mask}):
        expected = module(**inputs, **case)
        with _fresh_compiler():
            out = torch.compile(module, backend="aot_eager")(**inputs, **case)
            _require_close(out, expected, check, f"compiled and eager outputs ({sorted(case)})")
            grads = _gradients(out, inputs, module)
        for name, grad in _gradients(expected, inputs, module).items():
            compiled = grads[name]
            same = (grad is None) == (compiled is None)
            _require(same, check, f"the gradient of {name} is None in one of compiled and eager ({sorted(case)})")
            if grad is not None and compiled is not None:
                _require_close(compiled, grad, check, f"compiled and eager gradient of {name} ({sorted(case)})", 1e-3)


def check_state(subject: Subject, check: str = "state") -> None:
    """With a state, every split of a sequence gives what one call gives, padding included, and the same state."""
    module, inputs = subject.build(dtype=torch.float64), subject.inputs(dtype=torch.float64)
    if module.cache != "state":
        return
    hidden = torch.tensor([True, False, False, True, False, False, False])  # of TOKENS
    for case, mask in (("no mask", None), ("padding", ~hidden.view(1, 1, 1, -1))):
        whole: dict[str, Tensor] = {}
        expected = module(**inputs, attn_mask=mask, is_causal=True, state=whole)
        _require_close(module(**inputs, attn_mask=mask, is_causal=True), expected, check, f"without a state ({case})")
        for sizes in ([1] * TOKENS, [3, 1, 3], [TOKENS - 1, 1], [0, TOKENS]):
            state: dict[str, Tensor] = {}
            shapes, outs, done = set(), [], 0
            for size in sizes:
                part = {name: x[..., done : done + size, :] for name, x in inputs.items()}
                seen = None if mask is None else mask[..., done : done + size]
                outs.append(module(**part, attn_mask=seen, is_causal=True, state=state))
                shapes.add(tuple((name, x.shape) for name, x in state.items()))
                done += size
            what = f"parts of {sizes} tokens and one call ({case})"
            _require_close(torch.cat(outs, -2), expected, check, what, 1e-10)
            _require(len(shapes) == 1 and state.keys() == whole.keys(), check, f"the state changed its shape: {what}")
            for name, x in state.items():
                _require(x.shape[0] == BATCH, check, f"state {name!r} is not batch first: {tuple(x.shape)}")
                _require_close(x, whole[name], check, f"state {name!r} of {what}", 1e-10)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


CHECKS: dict[str, Callable[[Subject], None]] = {
    "output": check_output,
    "samples": check_samples,
    "causality": check_causality,
    "masks": check_masks,
    "padding": check_padding,
    "hidden tokens": check_hidden_tokens,
    "hidden rows": check_hidden_rows,
    "zero keys": check_zero_keys,
    "gradients": check_gradients,
    "single token": check_single_token,
    "dtypes": check_dtypes,
    "modes": check_modes,
    "dropout": check_dropout,
    "scale": check_scale,
    "query": check_query,
    "heads": check_heads,
    "parameters": check_parameters,
    "copies": check_copies,
    "compile": check_compile,
    "state": check_state,
}
"""The checks of :func:`check_mechanism` by name, in the order in which they run."""


def check_mechanism(
    mechanism: Mechanism, *, spec: AttentionSpec = SPEC, only: Collection[str] | None = None, **options: Any
) -> None:
    """Check what every mechanism must satisfy: each check in :data:`CHECKS`, on the CPU, in a few seconds.

    The mechanism is built for at most ``TOKENS`` tokens, with random parameters, and must take shorter
    sequences than ``spec.num_tokens``.

    Args:
        mechanism: as :func:`attention_modules.swap_attention` takes it.
        spec: the layer to build it for; its ``num_tokens`` is set by the checks.
        only: names of the checks to run, all where None.
        options: options of the mechanism.

    Raises:
        MechanismCheckError: naming the first check that fails, and how.
        ValueError: if ``only`` names an unknown check.
        TypeError: if the options do not fit the mechanism.

    Example:
        >>> from attnswap import check_mechanism
        >>> check_mechanism("rpc", iterations=2, only=["causality", "gradients"])
    """
    names = list(CHECKS) if only is None else list(only)
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        raise ValueError(f"unknown checks {unknown}; known: {', '.join(CHECKS)}")
    subject = Subject(mechanism, spec, options)
    for name in names:
        try:
            CHECKS[name](subject)
        except NotTakenError as error:
            raise MechanismCheckError(name, str(error)) from error
