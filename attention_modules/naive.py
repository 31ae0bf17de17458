"""The mechanisms as their equations read, with every map in memory: what the real ones are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(tokens: int, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """What each row sees, boolean, ``[..., N, N]``; a bias of -1e4 and less hides, as bfloat16 rounds it."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    if attn_mask is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -9984)
    return seen.tril() if is_causal else seen


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, zeros in rows that see nothing."""
    seen = visibility(k.shape[-2], attn_mask, is_causal)
    logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.masked_fill(~seen, 0.0)
    some = seen.any(-1, keepdim=True)
    weights = logits.masked_fill(~seen & some, float("-inf")).softmax(-1)
    return torch.where(some, weights, torch.zeros_like(weights)) @ v


def soft(x: Tensor, t: Tensor) -> Tensor:
    return x - torch.minimum(torch.maximum(x, -t), t)


def naive_rpc(
    k: Tensor,
    v: Tensor,
    iterations: int = 4,
    lam: float | None = None,
    threshold: str = "released",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Principal Attention Pursuit with its dual variable Y and its mu, a row."""
    heads, tokens, width = k.shape[-3:]
    if attn_mask is None and not is_causal:
        count, norm = torch.tensor(float(tokens), dtype=k.dtype), k.abs().sum((-2, -1), keepdim=True)
    else:
        seen = visibility(tokens, attn_mask, is_causal).expand(*k.shape[:-1], tokens)
        count = seen.sum(-1, keepdim=True).to(k.dtype)
        norm = torch.where(seen, k.abs().sum(-1).unsqueeze(-2), 0.0).sum(-1, keepdim=True)
    mu = count * width * (heads if threshold == "released" else 1) / (4 * norm)
    weight: float | Tensor = 4.0 if threshold == "released" else count.clamp(min=width) ** -0.5
    weight = weight if lam is None else lam
    t = weight * mu if threshold == "released" else weight / mu
    low_rank = dual = torch.zeros_like(k)
    for _ in range(iterations):
        sparse = soft(k - low_rank + dual / mu, t)
        keys = k - sparse - dual / mu
        low_rank = naive_attention(keys, keys, v, attn_mask, is_causal, scale)
        dual = dual + mu * (k - low_rank - sparse)
    return low_rank


def naive_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) (I - S) v, S a matrix per head or a number times softmax(k kᵀ · scale)."""
    if s.dim() == 3:
        seen = visibility(k.shape[-2], attn_mask, is_causal)
        corrected = v - torch.where(seen, s, torch.zeros_like(s)) @ v
    else:
        corrected = v - s * naive_attention(k, k, v, attn_mask, is_causal, scale)
    return naive_attention(q, k, corrected, attn_mask, is_causal, scale)


def naive_map(
    logits: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, sink: Tensor | None = None
) -> Tensor:
    """exp(z) / (exp(s) + Σ exp(z)) of the logits z and their mask, zeros where hidden; without a sink, softmax."""
    seen = visibility(logits.shape[-1], attn_mask, is_causal).expand(logits.shape)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    top = logits.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e30)
    top = top if sink is None else top.maximum(sink.view(-1, 1, 1))
    weights = torch.where(seen, logits - top, float("-inf")).exp()
    rest = torch.zeros_like(top) if sink is None else (sink.view(-1, 1, 1) - top).exp()
    total = weights.sum(-1, keepdim=True) + rest
    return weights / total.where(total > 0, torch.ones_like(total))


def naive_logits(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q kᵀ · scale."""
    return q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)


def visible_count(q: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """How many keys each row sees, at least 1, ``[..., N, 1]``."""
    return visibility(q.shape[-2], attn_mask, is_causal).sum(-1, keepdim=True).clamp(min=1).to(q.dtype)


def naive_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """exp(z) / (exp(s) + Σ exp(z)) v."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal, sink) @ v


def naive_l2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k‖² · scale) v."""
    distances = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    return naive_map(-distances * (q.shape[-1] ** -0.5 if scale is None else scale), attn_mask, is_causal) @ v


def naive_twicing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(2A - A²) v."""
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return (2 * a - a @ a) @ v


def naive_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A v ⊙ σ(gate)."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v / (1 + (-gate).exp())


def naive_neutreno(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor,
    alpha: float = 0.6,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A v + α (v⁰ - v)."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v + alpha * (first_value - v)


def naive_value_residual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor,
    weight: float = 0.5,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A ((1 - w) v + w v⁰)."""
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return a @ ((1 - weight) * v + weight * first_value)


def naive_ssmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(s ln(n) · z) v."""
    factor = s.view(-1, 1, 1) * visible_count(q, attn_mask, is_causal).log()
    return naive_map(naive_logits(q, k, scale) * factor, attn_mask, is_causal) @ v


def naive_ssa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax((1 + e^(-e^β) ln n) · z) v."""
    factor = 1 + (-beta.view(-1, 1, 1).exp()).exp() * visible_count(q, attn_mask, is_causal).log()
    return naive_map(naive_logits(q, k, scale) * factor, attn_mask, is_causal) @ v


def naive_qk_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float = 1e-6,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention between q and k over the root of their mean squares, times their gains."""
    q, k = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * g for x, g in ((q, q_gain), (k, k_gain)))
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v


def naive_elliptical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous_value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax((q ∘ w) kᵀ) v, w = m / max m, m the mean of |v - v of the layer before| over the keys that a row sees."""
    seen = visibility(k.shape[-2], attn_mask, is_causal).expand(*q.shape[:2], -1, -1).to(q.dtype)
    mean = seen @ (v - previous_value).detach().abs() / seen.sum(-1, keepdim=True).clamp(min=1)
    w = torch.where(mean.amax(-1, keepdim=True) > 0, mean / mean.amax(-1, keepdim=True), torch.ones_like(mean))
    return naive_map(naive_logits(q * w, k, scale), attn_mask, is_causal) @ v


def naive_sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iterations: int = 3,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Rows and columns of exp(q kᵀ) normalized in turn, hidden tokens left out of both; columns without a gradient."""
    kernel = naive_map(naive_logits(q, k, scale), attn_mask)
    seen = visibility(k.shape[-2], attn_mask)[..., -1:, :].transpose(-2, -1)  # tokens that are hidden as keys
    for _ in range((iterations - 1) // 2):
        columns = (kernel.detach() * seen).sum(-2, keepdim=True)
        kernel = kernel / columns.where(columns > 0, torch.ones_like(columns))
        rows = kernel.sum(-1, keepdim=True)
        # Only the factors of the columns are without a gradient: those of the rows cancel in the last step.
        kernel = kernel / rows.where(rows > 0, torch.ones_like(rows))
    return kernel @ v


def naive_differential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    pairs: str = "features",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(A₁ - λ A₂) v of halves of the features, or of the heads h and h + H/2 with the values of both."""
    half = (q.shape[-1] if pairs == "features" else q.shape[1]) // 2
    parts = (slice(None, half), slice(half, None))
    heads = q.shape[1]
    maps = []
    for part in parts:
        index = (..., part) if pairs == "features" else (slice(None), part)
        mask = attn_mask
        if pairs == "heads" and mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
            mask = mask[..., part, :, :]
        maps.append(naive_map(naive_logits(q[index], k[index], scale), mask, is_causal))
    if pairs == "heads":
        v = torch.cat([v[:, :half], v[:, half:]], -1)
    return (maps[0] - lam * maps[1]) @ v


def naive_kde(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k̂‖² · scale) v, k̂ the keys of norm 1."""
    return naive_l2(q, k / k.norm(dim=-1, keepdim=True), v, attn_mask, is_causal, scale)


def naive_rkde(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loss: str = "huber",
    a: float = 0.2,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Kernels with the weights of one robust step, of the keys below and of the pairs of key and value above."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k / k.norm(dim=-1, keepdim=True)
    seen = visibility(k.shape[-2], attn_mask).to(k.dtype).expand(*k.shape[:-1], k.shape[-2])  # all rows alike
    count = seen[..., :1, :].sum(-1).clamp(min=1)

    def weights(x: Tensor) -> Tensor:
        kernel = (-scale * (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)).exp()
        near = (kernel * seen).sum(-1) / count
        h = (1 + near + (near * seen[..., 0, :]).sum(-1, keepdim=True) / count).sqrt()
        w = torch.where(h <= a, 1.0, a / h)
        if loss == "hampel":
            w = torch.where(h < 2 * a, w, torch.where(h < 3 * a, (3 * a - h) / h, 0.01))
        return w / (w * seen[..., 0, :]).sum(-1, keepdim=True).clamp(min=1e-30)

    z = -scale * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    p = naive_map(z, attn_mask)  # the sum of the kernels cancels
    above = (p * weights(torch.cat([k, v], -1)).unsqueeze(-2)) @ v
    below = (p * weights(k).unsqueeze(-2)).sum(-1, keepdim=True)
    return above / torch.where(below > 0, below, 1.0)


def naive_mom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draws: Tensor,
    outliers: float = 0.05,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Kernels over the subset of keys whose sum of logits over heads, queries and keys is the median."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k / k.norm(dim=-1, keepdim=True)
    z = -scale * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    seen = visibility(k.shape[-2], attn_mask).expand(len(q), 1, *z.shape[-2:])[:, 0, 0]
    kept = torch.zeros(len(q), 1, 1, k.shape[-2], dtype=torch.bool)
    for sample, shown in enumerate(seen):
        orders = [[j for j in draw.argsort().tolist() if shown[j]] for draw in draws]
        subsets = [order[: max(int(len(order) * (1 - outliers)), 1)] for order in orders]
        sums = [z[sample][:, shown][:, :, subset].sum().item() for subset in subsets]
        kept[sample, 0, 0, subsets[sorted(range(len(sums)), key=sums.__getitem__)[len(sums) // 2]]] = True
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        z = z + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    return naive_map(z, kept) @ v


def naive_dam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(z - 10⁴ (1 - m)) v, m a gate for each distance."""
    places = torch.arange(k.shape[-2])
    gate = gates[:, (places.unsqueeze(-1) - places).abs()]
    return naive_map(naive_logits(q, k, scale) - 1e4 * (1 - gate), attn_mask, is_causal) @ v


def naive_forgetting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(z + c_i - c_j) v, c the running sums of ln σ(gate)."""
    c = gate.sigmoid().log().cumsum(-1)
    return naive_map(naive_logits(q, k, scale) + c.unsqueeze(-1) - c.unsqueeze(-2), attn_mask, is_causal) @ v


def _hidden(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Logits with the finite part of their mask, and what each row sees."""
    seen = visibility(logits.shape[-1], attn_mask, is_causal).expand(logits.shape)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    return logits, seen


def naive_sigmoid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """σ(z + b) v, b = -ln of the number of visible keys where it is None."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    b = -seen.sum(-1, keepdim=True).clamp(min=1).to(q.dtype).log() if bias is None else bias
    return (seen / (1 + (-logits - b).exp())) @ v


def naive_entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float = 1.5,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """[(α - 1) z - τ]₊^{1/(α - 1)} v, τ by bisection, and its gradient by one step of Newton's method."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    z = (alpha - 1) * logits
    power = 1 / (alpha - 1)

    def weights(tau: Tensor) -> Tensor:
        return torch.where(seen, (z - tau).clamp(min=0), 0.0) ** power

    with torch.no_grad():
        high = z.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e3)
        low = high - 1
        for _ in range(80):
            middle = (low + high) / 2
            enough = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        slope = -power * (torch.where(seen & (z > low), z - low, 0.0) ** (power - 1) * (seen & (z > low))).sum(
            -1, keepdim=True
        )
        slope = slope.where(slope < 0, -torch.ones_like(slope))
    tau = low - (weights(low).sum(-1, keepdim=True) - 1) / slope
    return torch.where(seen.any(-1, keepdim=True), weights(tau), 0.0) @ v


def naive_hard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(one_hot(z) + A - stop_gradient(A)) v."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    largest = logits.masked_fill(~seen, float("-inf")).argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(logits).scatter(-1, largest, 1.0) * seen
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return (one_hot + a - a.detach()) @ v


def naive_talking_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix_logits: Tensor,
    mix_weights: Tensor,
    bias_logits: Tensor | None = None,
    bias_weights: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(W softmax(L z + l) + w) v, L and W mixing heads; w for the keys that are seen."""
    logits = torch.einsum("hf,bfnm->bhnm", mix_logits, naive_logits(q, k, scale))
    if bias_logits is not None:
        logits = logits + bias_logits.view(-1, 1, 1)
    a = torch.einsum("gh,bhnm->bgnm", mix_weights, naive_map(logits, attn_mask, is_causal))
    if bias_weights is not None:
        a = a + bias_weights.view(-1, 1, 1) * _hidden(logits, attn_mask, is_causal)[1]
    return a @ v
