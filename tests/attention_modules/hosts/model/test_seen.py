"""Which tokens of an output count."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from attention_modules.analysis import swap_drift
from attention_modules.analysis.agreement import let_be_seen
from attention_modules.hosts.discovery import survey
from attention_modules.hosts.model.seen import SeenTokens, counting


def test_the_mask_counts_by_place_too_and_not_in_an_encoder_decoder():
    def forward(input_ids, attention_mask=None):
        return input_ids

    model, ids, mask = nn.Module(), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    model.forward = forward
    assert counting(model, (ids, mask), {}).tolist() == [[True, True, False]]
    assert counting(model, (ids,), {"attention_mask": mask}).tolist() == [[True, True, False]]
    assert counting(model, (ids,), {}) is None
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert counting(model, (ids, mask), {}) is None


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "SEW"])
def test_the_mask_of_samples_is_one_of_frames(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    mask = torch.arange(4000) < torch.tensor([[4000], [1500]])
    found = counting(model, (), {"input_values": torch.randn(2, 4000), "attention_mask": mask.long()})
    frames = [model(torch.randn(1, samples)).last_hidden_state.shape[1] for samples in (4000, 1500)]
    assert found.shape == (2, frames[0])
    assert found.sum(1).tolist() == frames


@pytest.mark.parametrize("form", ["padding", "rows", "additive", "mapping", "static", "continued"])
def test_a_mask_of_rows_says_which_tokens_count(form):
    transformers = pytest.importorskip("transformers")
    padding = torch.tensor([[False, True, True], [True, True, True]])
    rows = (torch.ones(3, 3, dtype=torch.bool).tril() & padding[:, None])[:, None]
    additive = torch.zeros(2, 1, 3, 3).masked_fill(~rows, torch.finfo(torch.float32).min)
    both = {"full_attention": additive, "sliding_attention": rows}
    masks = {"padding": padding.long(), "rows": rows, "additive": additive, "mapping": both}
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = transformers.Qwen2Config(vocab_size=20, num_key_value_heads=2, **sizes, **windows)
    model, given = transformers.Qwen2Model(config).eval(), {"attention_mask": masks.get(form)}
    let_be_seen(model, [])
    if form == "static":
        places = functional.pad(rows, (0, 2))
        cache = transformers.StaticCache(config=config, max_cache_len=5)
        given = {"attention_mask": {name: places for name in both}, "past_key_values": cache}
    if form == "continued":  # after two tokens
        cache = transformers.DynamicCache(config=config)
        model(torch.zeros(2, 2, dtype=torch.long), past_key_values=cache)
        earlier = functional.pad(rows, (2, 0), value=True)
        given = {"attention_mask": {name: earlier for name in both}, "past_key_values": cache}
    seen = SeenTokens(survey(model).layers)
    with seen.noting():
        out = model(torch.ones(2, 3, dtype=torch.long), **given).last_hidden_state
    seen.settle(out, {})
    for found in (seen.of_output, seen.of_layer("layers.0.self_attn"), seen.of_layer("layers.1.self_attn")):
        assert found is None if form == "continued" else torch.equal(found, padding)


class Padded(nn.Module):
    """An encoder of padded tokens, 1 to 3 of which are there, whose output has other tokens or another shape."""

    def __init__(self, form):
        super().__init__()
        self.form, first = form, "first" in form
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=not first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.registers = nn.Parameter(torch.randn(2, 16))
        self.head = nn.Linear(16, 5)
        self.score = nn.Linear(16, 1)
        self.books = nn.Linear(16, 12)

    def encoded(self, x, hidden):
        if "registers" in self.form:
            x = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
            hidden = functional.pad(hidden, (2, 0), value=False)
        turned = "first" in self.form
        out = self.encoder(x.transpose(0, 1) if turned else x, src_key_padding_mask=hidden)
        return out[:, 2:] if "registers" in self.form else out

    def forward(self, x, hidden, other=None):
        out = self.encoded(x, hidden)
        if self.form == "two calls":  # of which the second has no padding
            self.encoded(other, torch.zeros(other.shape[:2], dtype=torch.bool))
        if self.form == "numbers":
            return self.score(out)[..., 0]
        if self.form == "codebooks":
            return self.books(out).unflatten(-1, (3, 4))
        out = self.head(out)
        if self.form == "crop":
            return out[:, 1:]
        return out.flatten(0, 1) if "flat" in self.form else out


FORMS = ["registers", "crop", "numbers", "codebooks", "flat", "first", "first, square", "first, flat", "two calls"]


@pytest.mark.parametrize("form", FORMS)
def test_padding_counts_nowhere_in_an_output_of_other_tokens(form):
    """The witness: each sample alone, without padding."""
    torch.manual_seed(0)
    model = Padded(form).double().eval()
    samples, lengths = (4, torch.tensor([2, 4, 3, 2])) if "square" in form else (3, torch.tensor([2, 4, 3]))
    x, other = torch.randn(2, samples, 4, 16, dtype=torch.float64)
    given = (x, torch.arange(4) >= lengths[:, None], other)
    alone = [
        (one[None, :n], torch.zeros(1, n, dtype=torch.bool), rest[None])
        for one, rest, n in zip(x, other, lengths, strict=True)
    ]
    padded, wanted = (swap_drift(model, "sink", batches, logits=True) for batches in ([given], alone))
    rows = list(zip(padded.layers, wanted.layers, strict=True))
    for one, it in [(padded.output, wanted.output), *((row.output, other.output) for row, other in rows)]:
        assert one.relative_error == pytest.approx(it.relative_error, rel=1e-9)
        if form != "numbers":  # of which without padding nothing tells that they are of tokens
            assert one.cosine == pytest.approx(it.cosine, rel=1e-9)
            assert one.kl == pytest.approx(it.kl, rel=1e-9)
            assert one.same_class == pytest.approx(it.same_class, rel=1e-9)
    for row, other in rows:
        assert form == "two calls" or row.relative_error == pytest.approx(other.relative_error, rel=1e-9)


class PadsInside(nn.Module):
    """A layer that pads its tokens to a multiple of 4 inside, in front."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 2, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, seen=None):
        more = -x.shape[1] % 4
        seen = torch.ones(x.shape[:2], dtype=torch.bool) if seen is None else seen
        x, seen = functional.pad(x, (0, 0, more, 0)), functional.pad(seen, (more, 0), value=False)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        return self.proj(out.transpose(1, 2).flatten(2))[:, more:]


class WithPadsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = PadsInside()

    def forward(self, x, seen):
        return self.layer(x, seen)


def test_padding_counts_nowhere_where_a_layer_pads_inside():
    torch.manual_seed(0)
    model = WithPadsInside().double()
    x, lengths = torch.randn(2, 6, 16, dtype=torch.float64), torch.tensor([3, 6])
    alone = [(one[None, :n], torch.ones(1, n, dtype=torch.bool)) for one, n in zip(x, lengths, strict=True)]
    padded, wanted = (
        swap_drift(model, "sink", batches) for batches in ([(x, torch.arange(6) < lengths[:, None])], alone)
    )
    assert padded.output.relative_error == pytest.approx(wanted.output.relative_error, rel=1e-9)
    assert padded.layers[0].relative_error == pytest.approx(wanted.layers[0].relative_error, rel=1e-9)


@pytest.mark.parametrize("pooled", ["first", "mean", "mean of those seen", "relu"])
def test_all_of_a_pooled_output_counts(pooled):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x, hidden):
            out = self.encoder(x, src_key_padding_mask=hidden)
            if pooled == "first":
                out = out[:, 0]
            elif pooled == "mean of those seen":
                out = out.masked_fill(hidden[..., None], 0.0).sum(1) / (~hidden).sum(1, keepdim=True)
            else:
                out = out.mean(1)
            return self.head(out).relu() if pooled == "relu" else self.head(out)

    torch.manual_seed(0)
    model, x = Pooled().eval(), torch.randn(3, 4, 16)  # as many classes as tokens
    let_be_seen(model, [])
    seen = SeenTokens(survey(model).layers)
    hidden = torch.arange(4) >= torch.tensor([2, 4, 3])[:, None]
    with seen.noting():
        out = model(x, hidden)
    seen.settle(out, {}, lambda: (model(x, hidden), {}))
    assert seen.of_output is None


def test_where_the_model_cannot_be_called_again_padding_may_count():
    model = Padded("crop").eval()
    let_be_seen(model, [])
    seen = SeenTokens(survey(model).layers)
    x, hidden = torch.randn(2, 4, 16), torch.arange(4) >= torch.tensor([[2], [4]])
    with seen.noting():
        out = model(x, hidden)
    with pytest.warns(UserWarning, match=r"may count: let the model return \[B, N, \.\.\.\]"):
        seen.settle(out, {})
    assert seen.of_output is None


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_padding_counts_nowhere_in_models_of_transformers(kind):
    """Some logits alone, and two sequences of as many tokens. The witness: each sample alone, without padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids, others = torch.randint(1, 30, (2, 3, 6))
    lengths, lengths_of_others = [4, 6, 5], [5, 3, 6]
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, **sizes, initializer_range=0.3))
        mask = torch.stack([(torch.arange(6) >= 6 - n).long() for n in lengths])
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        alone = [{"input_ids": one[None, 6 - n :]} for one, n in zip(ids, lengths, strict=True)]
        given, *alone = ({**each, "logits_to_keep": 5} for each in (given, *alone))
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=30, **sizes, dropout_rate=0.0, initializer_factor=2.0)
        )
        masks = [torch.arange(6) < torch.tensor(each)[:, None] for each in (lengths, lengths_of_others)]
        given = {"input_ids": ids, "attention_mask": masks[0].long()}
        given |= {"decoder_input_ids": others, "decoder_attention_mask": masks[1].long()}
        both = zip(ids, others, lengths, lengths_of_others, strict=True)
        alone = [{"input_ids": a[None, :n], "decoder_input_ids": b[None, :m]} for a, b, n, m in both]
    padded, wanted = (swap_drift(model.double(), "sink", batches) for batches in ([given], alone))
    for name in ("relative_error", "cosine", "kl", "same_class"):
        assert getattr(padded.output, name) == pytest.approx(getattr(wanted.output, name), rel=1e-9)
    for row, other in zip(padded.layers, wanted.layers, strict=True):
        assert row.relative_error == pytest.approx(other.relative_error, rel=1e-9)
        assert row.output.kl == pytest.approx(other.output.kl, rel=1e-9)
