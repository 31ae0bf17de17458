"""What a swap does to a trained model before any training."""

import gc
import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

from attention_modules import AttentionSwapError, SelfAttention, available_mechanisms, swap_attention
from attention_modules.analysis import swap_drift
from attention_modules.analysis.agreement import (
    AgreementSums,
    kl_divergence,
    output_of,
    relative_error,
)
from attention_modules.mechanism import mechanism_class
from attention_modules.teacher import shared_copy
from tests.attention_modules.hosts.huggingface.generating import language_model


@pytest.fixture(scope="module")
def vit():
    """Three blocks whose attention is far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=10)
        for block in model.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=0.2)
    return model.train()


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_every_mechanism_is_measured_and_the_model_stays_as_it_was(vit, images):
    state = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    held = [id(parameter) for parameter in vit.parameters()]
    random = torch.get_rng_state()
    for mechanism in available_mechanisms():
        if mechanism_class(mechanism).causality == "always":
            with pytest.raises(AttentionSwapError, match="sees the future"):
                swap_drift(vit, mechanism, images)
            continue
        drift = swap_drift(vit, mechanism, images)
        assert [row.layer for row in drift.layers] == [f"blocks.{number}.attn" for number in range(3)]
        assert math.isfinite(drift.output.relative_error), mechanism
        assert all(row.refused or math.isfinite(row.relative_error) for row in drift.layers), mechanism
    assert torch.equal(random, torch.get_rng_state())
    assert held == [id(parameter) for parameter in vit.parameters()]
    assert all(torch.equal(tensor, state[name]) for name, tensor in vit.state_dict().items())
    assert vit.training
    assert not hasattr(vit.blocks[0].attn, "mechanism")


def test_outputs_that_the_model_changes_in_place_are_compared_as_they_were():
    class Block(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.attn, self.in_place = SelfAttention(16, 2), in_place

        def forward(self, x):
            out = self.attn(x)
            if self.in_place:
                out += 10 * x
                return out
            return out + 10 * x

    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        (row,) = swap_drift(Block(in_place), "uniform", torch.randn(2, 5, 16)).layers
        found.append((row.output.relative_error, row.output.cosine))
    assert found[0] == pytest.approx(found[1])


def test_softmax_is_no_drift_and_what_starts_as_it_is_little(vit, images):
    drift = swap_drift(vit, "softmax", images)
    assert drift.output.relative_error == 0
    assert all(row.relative_error == 0 for row in drift.layers)
    assert all(row.entropy_before == row.entropy_after for row in drift.layers)
    assert swap_drift(vit, "sink", images, start=-60.0, std=0.0).output.relative_error < 1e-5


def test_equals_what_is_computed_by_hand(vit, images):
    drift = swap_drift(vit, "symmetric", [images[:1], (images[1:],)], logits=True)
    before, after = shared_copy(vit).eval(), shared_copy(vit).eval()
    swap_attention(after, "symmetric")
    taken = {}
    before.blocks[1].attn.register_forward_hook(lambda module, args, output: taken.update(x=args[0], y=output))
    with torch.no_grad():
        wanted, given = before(images), after(images)
        layer = after.blocks[1].attn(taken["x"])
    ratio = ((layer - taken["y"]).norm() / taken["y"].norm()).item()
    assert drift.layers[1].relative_error == pytest.approx(ratio, rel=1e-4)
    assert drift.output.relative_error == pytest.approx(((given - wanted).norm() / wanted.norm()).item(), rel=1e-4)
    assert drift.output.cosine == pytest.approx(torch.cosine_similarity(given, wanted).mean().item(), rel=1e-4)
    assert drift.output.kl == pytest.approx(kl_divergence(given, wanted).mean().item(), rel=1e-3)
    assert drift.output.same_class == pytest.approx((given.argmax(1) == wanted.argmax(1)).float().mean().item())
    assert drift.ranked()[0].output.relative_error == min(row.output.relative_error for row in drift.layers)


@pytest.mark.parametrize("layers", [[1], None], ids=["one", "all"])
@pytest.mark.parametrize("mechanism", ["symmetric", "twicing"])
def test_a_swapped_model_is_compared_as_it_is(vit, images, mechanism, layers):
    swapped, after = shared_copy(vit).eval(), shared_copy(vit).eval()
    swap_attention(swapped, mechanism, layers=layers)
    swap_attention(after, "sink")
    with torch.no_grad():
        wanted, given = swapped(images), after(images)
    drift = swap_drift(swapped, "sink", images)
    assert drift.output.relative_error == pytest.approx(((given - wanted).norm() / wanted.norm()).item(), rel=1e-4)
    assert drift.layers[1].relative_error > 0.01
    assert type(swapped.blocks[1].attn.mechanism) is mechanism_class(mechanism)
    if layers is None:
        assert swap_drift(swapped, mechanism, images).output.relative_error == 0


def test_a_layer_that_reads_values_of_others_is_measured_alone_where_it_can_be(vit, images):
    drift = swap_drift(vit, "value_residual", images)
    assert "first of its stack" in drift.layers[0].refused
    assert math.isnan(drift.layers[0].relative_error)
    assert all(row.relative_error > 0.01 for row in drift.layers[1:])
    assert drift.ranked()[-1] is drift.layers[0]


def test_hidden_tokens_do_not_count():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=20, **sizes)).eval()
    ids = torch.randint(20, (2, 6))
    padded = {"input_ids": torch.cat([ids, ids * 0], 1), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    padded["attention_mask"][:, 6:] = 0
    whole, cut = (swap_drift(model, "symmetric", batch) for batch in (padded, {"input_ids": ids}))
    for one, other in zip(whole.layers, cut.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-3)
        assert one.output.cosine == pytest.approx(other.output.cosine, rel=1e-3)
        for entropy in ("entropy_before", "entropy_after"):
            assert getattr(one, entropy) == pytest.approx(getattr(other, entropy), rel=1e-3)
    arguments = tuple(padded.values())
    for batches in ([arguments], iter([arguments])):
        assert swap_drift(model, "symmetric", batches).layers == whole.layers
    with pytest.raises(ValueError, match=r"is a tuple of 2, .*: give \[batches\] or list\(batches\)"):
        swap_drift(model, "symmetric", arguments)


class Padded(nn.Module):
    """Attends in layers of its own kind, and makes their masks of lengths."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(20, 16)
        if kind == "blocks":
            self.attn = nn.ModuleList([timm.layers.Attention(16, 2) for _ in range(2)])
        elif kind == "decoder layer":
            self.decoder = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True)
        elif kind.startswith("transformer"):
            self.net = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first="first" not in kind)
        else:
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first="first" not in kind)
            self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids, lengths, source, source_lengths):
        x, hidden = self.embedding(ids), torch.arange(ids.shape[1]) >= lengths[:, None]
        if self.kind == "blocks":
            for layer in self.attn:
                x = x + layer(x, attn_mask=~hidden[:, None, None])
            return x
        turned = "first" in self.kind
        x = x.transpose(0, 1) if turned else x
        if self.kind in ("encoder", "tokens first"):
            return self.encoder(x, src_key_padding_mask=hidden)
        memory, unseen = self.embedding(source), torch.arange(source.shape[1]) >= source_lengths[:, None]
        memory, masks = memory.transpose(0, 1) if turned else memory, {"memory_key_padding_mask": unseen}
        if self.kind == "decoder layer":
            return self.decoder(x, memory, tgt_key_padding_mask=hidden, **masks)
        return self.net(memory, x, src_key_padding_mask=unseen, tgt_key_padding_mask=hidden, **masks)


def bart_or_t5(kind):
    import transformers

    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return transformers.T5Model(transformers.T5Config(vocab_size=20, **sizes, dropout_rate=0.0))
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    return transformers.BartModel(transformers.BartConfig(vocab_size=20, d_model=16, **sizes, dropout=0.0))


CROSSED = ["*.self_attn", "*.multihead_attn"]


@pytest.mark.parametrize("added", [6, 4], ids=["as many", "fewer"])  # tokens of padding in the other sequence
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *((kind, None) for kind in ("encoder", "tokens first", "blocks", "bart", "t5")),
        *(("transformer", where) for where in (None, "net.encoder*", "net.decoder*.self_attn", CROSSED)),
        ("transformer, tokens first", CROSSED),
        *(("decoder layer", where) for where in (None, CROSSED, "*.multihead_attn")),
        ("bart", ["*.self_attn", "*.encoder_attn"]),
        ("bart", "encoder.*"),
        ("t5", ["*.SelfAttention", "*.EncDecAttention"]),
    ],
)
def test_what_no_row_sees_counts_nowhere(kind, where, added):
    """The witness: the same tokens without padding."""
    torch.manual_seed(0)
    model = (bart_or_t5(kind) if kind in ("bart", "t5") else Padded(kind)).double()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    ids, source = torch.randint(2, 20, (2, 2, 6)).unbind()

    def batch(padding, other):
        given, context = functional.pad(ids, (0, padding), value=3), functional.pad(source, (0, other), value=4)
        if isinstance(model, Padded):
            lengths = torch.tensor([6, 6])
            return {"ids": given, "lengths": lengths, "source": context, "source_lengths": lengths}
        masks = [(torch.arange(each.shape[1]) < 6).long().expand(each.shape) for each in (context, given)]
        of_decoder = {"decoder_input_ids": given, "decoder_attention_mask": masks[1]}
        return {"input_ids": context, "attention_mask": masks[0], **of_decoder}

    padded, cut = (swap_drift(model, "sink", batch(*each), where=where) for each in ((6, added), (0, 0)))
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-6)
    assert padded.output.cosine == pytest.approx(cut.output.cosine, rel=1e-6)
    for one, other in zip(padded.layers, cut.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-6)
        assert one.output.relative_error == pytest.approx(other.output.relative_error, rel=1e-6)
        assert one.entropy_before == pytest.approx(other.entropy_before, rel=1e-6)
        assert one.entropy_after == pytest.approx(other.entropy_after, rel=1e-6)


@pytest.mark.parametrize("mechanism", ["gated", "entmax"])
def test_a_sink_of_the_models_own_is_no_token(mechanism):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, sliding_window=4)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(1, 30, (2, 16))
    mask = (torch.arange(16) < 8).long().expand(2, -1)
    torch.manual_seed(1)  # what a mechanism starts with
    cut = swap_drift(model, mechanism, {"input_ids": tokens[:, :8]})
    torch.manual_seed(1)
    padded = swap_drift(model, mechanism, {"input_ids": tokens, "attention_mask": mask})
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-4)
    for one, other in zip(padded.layers, cut.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-4)


def test_targets_that_nobody_sees_by_a_mask_of_rows_count():
    """As of a neural process: they see the context, and their outputs are what it is asked for."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 10, 16), (torch.arange(10) >= 4).expand(10, 10)
    other = torch.cat([x[:, :4], 30 * x[:, 4:]], 1)
    of_all, of_others = (swap_drift(encoder, "sink", [(each, mask)]) for each in (x, other))
    assert of_all.output.relative_error != pytest.approx(of_others.output.relative_error, rel=1e-2)


def test_padding_behind_that_a_causal_layer_is_not_told_of_counts_nowhere():
    """The model alone knows of it: none of the other tokens sees what comes later."""

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.ModuleList(SelfAttention(16, 2) for _ in range(2))

        def forward(self, x, attention_mask):
            for layer in self.attn:
                x = x + layer(x, is_causal=True)
            return x

    torch.manual_seed(0)
    model, x = Causal(), torch.randn(2, 8, 16)
    mask = (torch.arange(8) < 3).long().expand(2, -1)
    padded, cut = (swap_drift(model, "sink", [(x[:, :n], mask[:, :n])]) for n in (8, 3))
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-5)
    assert padded.layers[1].relative_error == pytest.approx(cut.layers[1].relative_error, rel=1e-5)


@pytest.mark.parametrize("told", [(True, False), (False, True, False)])
def test_padding_of_layers_that_are_not_told_of_it_counts_nowhere_beside_layers_that_are(told):
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in told)

        def forward(self, x, attention_mask):
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            for layer, is_told in zip(self.layers, told, strict=True):
                hidden = attention_mask == 0 if is_told else None
                given = {"attn_mask": causal, "is_causal": not is_told, "need_weights": False}
                x = x + layer(x, x, x, key_padding_mask=hidden, **given)[0]
            return x

    torch.manual_seed(0)
    model, x = Told(), torch.randn(2, 8, 16)
    mask = (torch.arange(8) < 3).long().expand(2, -1)
    padded, cut = (swap_drift(model, "sink", [(x[:, :n], mask[:, :n])]) for n in (8, 3))
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-5)
    for one, other in zip(padded.layers, cut.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("inputs", [8, 9])
def test_targets_of_a_causal_decoder_all_count_beside_padded_inputs(inputs, depth):
    class Translates(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.decoder = nn.ModuleList(SelfAttention(16, 2) for _ in range(depth))
            self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x, attention_mask, targets):
            hidden = attention_mask == 0
            x = self.encoder(x, src_key_padding_mask=hidden)
            for layer in self.decoder:
                targets = targets + layer(targets, is_causal=True)
            return targets + self.cross(targets, x, x, key_padding_mask=hidden)[0]

    torch.manual_seed(0)
    model, x, targets = Translates(), torch.randn(2, 9, 16), torch.randn(2, 8, 16)
    mask = (torch.arange(9) < 3).long().expand(2, -1)
    padded, cut = (swap_drift(model, "sink", [(x[:, :n], mask[:, :n], targets)]) for n in (inputs, 3))
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-5)


def test_a_loss_before_the_logits_is_not_the_output():
    logits = torch.randn(2, 3)
    assert output_of((logits.sum(), logits))[0] is logits
    with pytest.raises(TypeError, match="behind a loss"):
        output_of(logits.sum())


@pytest.mark.parametrize("latents", [8, 9])
def test_latents_that_attend_to_one_another_all_count(latents):
    """Though the tokens that they were made of are as many, and have an ``attention_mask``."""

    class Perceiver(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.randn(latents, 16))
            self.cross = nn.MultiheadAttention(16, 2, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

        def forward(self, x, attention_mask):
            own = self.latents.expand(len(x), -1, -1)
            return self.layer(own + self.cross(own, x, x, key_padding_mask=attention_mask == 0)[0])

    torch.manual_seed(0)
    model, x = Perceiver(), torch.randn(2, 8, 16)
    mask = (torch.arange(8) < 3).long().expand(2, -1)
    padded, cut = (swap_drift(model, "sink", [(x[:, :n], mask[:, :n])]) for n in (8, 3))
    assert padded.output.relative_error == pytest.approx(cut.output.relative_error, rel=1e-5)
    assert padded.layers[0].relative_error == pytest.approx(cut.layers[0].relative_error, rel=1e-5)


def test_latents_are_not_the_tokens_that_they_attend_to():
    """As many latents as tokens: all of them count. The witness: a batch of tokens that are all there."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1)
            self.latents, self.cross = (
                nn.Parameter(torch.randn(1, 6, 16)),
                nn.MultiheadAttention(16, 2, batch_first=True),
            )

        def forward(self, x, hidden):
            x = self.encoder(x, src_key_padding_mask=hidden)
            return self.cross(self.latents.expand(len(x), -1, -1), x, x, key_padding_mask=hidden)[0]

    model, x = Pooled(), torch.randn(2, 6, 16)
    hidden = (torch.arange(6) > 3).expand(2, -1)
    swap = {"where": "cross", "start": 0.0}
    padded, cut = (swap_drift(model, "sink", [(x[:, :n], hidden[:, :n])], **swap) for n in (6, 4))
    assert padded.layers[0].relative_error == pytest.approx(cut.layers[0].relative_error, rel=1e-5)


def test_cross_attention_is_compared_where_it_is_named():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1)
    given = {"tgt": torch.randn(2, 5, 16), "memory": torch.randn(2, 7, 16)}
    for where in ("*.multihead_attn", ["*.self_attn", "*.multihead_attn"]):
        row = swap_drift(model, "sink", given, where=where, start=0.0).layers[-1]
        assert row.layer == "layers.0.multihead_attn"
        assert row.entropy_before == pytest.approx(row.entropy_after, rel=1e-5)  # of its shares
        assert row.relative_error > 0.01


@torch.no_grad()
def test_every_row_counts_of_attention_to_as_many_other_tokens():
    from transformers import BartConfig, BartModel

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=20, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
    model = BartModel(config).eval()
    ids, mask = torch.randint(3, 20, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[:, 3:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)}
    drift = swap_drift(model, "sink", given, where="*.encoder_attn", start=-60.0)
    model.set_attn_implementation("eager")
    shown = model(**given, output_attentions=True).cross_attentions[0]
    entropy = -torch.special.xlogy(shown, shown).sum(-1).mean().item()
    assert drift.layers[0].entropy_before == pytest.approx(entropy, rel=1e-4)


def test_a_layer_of_our_own_is_compared_as_it_is():
    model = nn.Sequential(SelfAttention(16, 2, "sigmoid"), SelfAttention(16, 2, "sigmoid"))
    for row in swap_drift(model, "sigmoid", torch.randn(2, 9, 16)).layers:
        assert row.entropy_before == row.entropy_after


@pytest.mark.parametrize("size", [(), (3,), (3, 4), (3, 4, 5)])
def test_classes_are_the_second_dimension_of_images_and_volumes(size):
    first, second = torch.randn(2, 2, 6, *size).unbind()
    sums = AgreementSums(logits=True)
    sums.add(first.movedim(1, -1), second.movedim(1, -1)) if len(size) == 1 else sums.add(first, second)
    kl = functional.kl_div(first.log_softmax(1), second.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert sums.mean().kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert sums.mean().same_class == pytest.approx((first.argmax(1) == second.argmax(1)).float().mean().item())


def test_what_cannot_be_measured_is_refused(vit, images):
    with pytest.raises(ValueError, match="batches is empty"):
        swap_drift(vit, "sink", [])
    with pytest.raises(AttentionSwapError, match="no attention layer"):
        swap_drift(nn.Linear(2, 2), "sink", images)
    with pytest.raises(AttentionSwapError, match="swap before wrapping the model"):
        swap_drift(nn.DataParallel(vit), "sink", images)
    with pytest.raises(TypeError, match="no output is found"):
        swap_drift(vit, "sink", images, run=lambda model, batch: {"loss": model(batch).sum()})
    with pytest.raises(ValueError, match=r"'blocks.0.attn' is not called"):
        swap_drift(vit, "sink", images, run=lambda model, batch: model.patch_embed(batch))


def test_nan_stays_nan_and_nothing_is_divided_by_zero():
    sums = AgreementSums(logits=True)
    assert math.isnan(sums.mean().relative_error)
    sums.add(torch.full((1, 3), math.nan), torch.ones(1, 3))
    assert math.isnan(sums.mean().relative_error)
    assert math.isnan(sums.mean().kl)
    assert math.isnan(sums.mean().same_class)
    assert math.isnan(relative_error(0, 0))
    assert relative_error(1, 0) == math.inf
    with pytest.raises(ValueError, match=r"\(1, 3\) cannot be compared with \(1, 4\)"):
        sums.add(torch.ones(1, 3), torch.ones(1, 4))


def test_output_of():
    tensor = torch.ones(2)
    assert output_of((tensor, None))[0] is tensor
    assert output_of({"logits": tensor}) == (tensor, True)
    with pytest.raises(TypeError, match="returns list"):
        output_of([torch.ones(2, dtype=torch.long)])


def test_shared_copy_owns_what_is_named():
    layer = nn.Linear(2, 2)
    copy = shared_copy(layer, ["weight"])
    assert copy.bias is layer.bias
    assert copy.weight is not layer.weight
    assert torch.equal(copy.weight, layer.weight)
    with pytest.raises(ValueError, match="own= names 'none'"):
        shared_copy(layer, ["none"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mechanism", ["sink", "symmetric"])
def test_an_optimizer_of_the_model_hears_nothing_of_the_copies(mechanism, images):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()  # so that the copies are still there
    try:
        swap_drift(model, mechanism, images)
        for _ in range(3):
            model(images).sum().backward()
            optimizer.step()
    finally:
        gc.enable()


@pytest.mark.parametrize("mechanism", ["sink", "window"])
def test_the_entropy_of_calls_that_continue_from_a_cache_is_that_of_all_rows_or_none(mechanism):
    """A state mechanism's rows of the first call alone would be compared with the softmax of all."""
    from transformers import DynamicCache

    def in_two_calls(model, tokens):
        cache = DynamicCache(config=model.config)
        model(tokens[:, :4], past_key_values=cache)
        return model(tokens[:, 4:], past_key_values=cache)

    model, tokens = language_model(), torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    whole, parts = (swap_drift(model, mechanism, [tokens], run=run) for run in (None, in_two_calls))
    for found, wanted in zip(parts.layers, whole.layers, strict=True):
        assert found.entropy_before == pytest.approx(wanted.entropy_before, rel=1e-4)
        after = wanted.entropy_after if mechanism == "sink" else math.nan
        assert found.entropy_after == pytest.approx(after, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "window"])
@pytest.mark.parametrize("by_run", [False, True])
def test_a_cache_among_the_inputs_is_copied_for_each_call(mechanism, by_run):
    """The witness: the same without a cache."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, **sizes, initializer_range=0.3))
    tokens, cache = torch.randint(20, (2, 5)), transformers.DynamicCache()
    run = (lambda model, batch: model(**batch)) if by_run else None
    wanted = swap_drift(model, mechanism, {"input_ids": tokens, "use_cache": False})
    found = swap_drift(model, mechanism, {"input_ids": tokens, "past_key_values": cache}, run=run)
    assert cache.get_seq_length() == 0
    for row, other in zip(found.layers, wanted.layers, strict=True):
        assert row.relative_error == pytest.approx(other.relative_error, rel=1e-4, abs=1e-6)
        assert row.output.relative_error == pytest.approx(other.output.relative_error, rel=1e-4, abs=1e-6)
    assert found.output.relative_error == pytest.approx(wanted.output.relative_error, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shape", [(64,), (64, 1), (8, 8, 1)])
def test_one_logit_alone_is_that_of_a_sigmoid(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given, wanted = torch.randn(2, *shape, dtype=torch.float64)
    sums = AgreementSums(logits=True)
    sums.add(given, wanted)
    found, p, q = sums.mean(), wanted.sigmoid(), given.sigmoid()
    kl = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    assert found.kl == pytest.approx(kl.item())
    assert found.same_class == ((given > 0) == (wanted > 0)).float().mean().item() < 1
    assert found.relative_error == pytest.approx(((given - wanted).norm() / wanted.norm()).item())


@pytest.mark.parametrize("kind", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_logits_of_several_labels_have_no_divergence(kind):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes, num_labels=3, problem_type=kind))
    found = swap_drift(model, "sink", {"input_ids": torch.randint(20, (2, 6))}).output
    excludes = kind in (None, "single_label_classification")
    assert math.isnan(found.kl) == math.isnan(found.same_class) == (not excludes)
