"""The table of hosts and mechanisms as tested; ``python -m tests.attention_modules.hosts.table`` writes the pages."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attention_modules.hosts.cases import BETWEEN_LAYERS, HOSTS, MECHANISMS
from tests.attention_modules.hosts.sdpa import breadth as strangers
from tests.attention_modules.hosts.timm import models as timm_models

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "hosts.md"
REASONS = {
    "declare_host": "⁷",
    "grouped keys": "¹",
    "q_norm": "²",
    "reduced image": "³",
    "rotary positions": "⁴",
    "hides the future": "⁵",
    "cannot be causal|masks of padding alone": "⁵",
    "sees the future": "⁸",
    "must hide the future": "⁸",
    "a sliding window": "⁹",
}

OWN = """\
A host is a kind of attention layer that attnswap can change. **Any layer that calls
`F.scaled_dot_product_attention` once in its forward is one**: nanoGPT's, litgpt's, those of diffusers, of most
tutorials, your own. Layers of timm, transformers, `torch.nn` and mmsegmentation have hosts of their own, which come
first: they know projections, caches and masks. A module that has attention layers inside is none itself: these are.

## Layers of your own

```python
report = attnswap.swap_attention(model, "sink")  # found by the code of its layers
report = attnswap.swap_attention(model, "sink", example=inputs)  # found by one forward pass
attnswap.declare_host(MyAttention, qkv="c_attn", heads="n_head")  # spectra, LocAteR and queryless mechanisms need it
```

A decoder of your own, sequence-first, whose second layer attends to a memory:

```python
import attnswap
import torch
from torch import nn
from torch.nn import functional as F


def heads(x):  # [N, B, C] to [B, H, N, d]
    return x.unflatten(2, (4, -1)).permute(1, 2, 0, 3)


class MySelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(32, 96)

    def forward(self, x):
        out = F.scaled_dot_product_attention(*map(heads, self.c_attn(x).chunk(3, 2)))
        return out.permute(2, 0, 1, 3).flatten(2)


class MyCrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(32, 32), nn.Linear(24, 64)

    def forward(self, x, memory):
        out = F.scaled_dot_product_attention(heads(self.to_q(x)), *map(heads, self.to_kv(memory).chunk(2, 2)))
        return out.permute(2, 0, 1, 3).flatten(2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = MySelfAttention(), MyCrossAttention()

    def forward(self, x, memory):
        return self.cross(self.own(x), memory)


attnswap.declare_host(MySelfAttention, qkv="c_attn", heads=4)
attnswap.declare_host(MyCrossAttention, q="to_q", kv="to_kv", heads=4)
model, inputs = Decoder(), (torch.randn(10, 2, 32), torch.randn(7, 2, 24))
attnswap.swap_attention(model, "rpc", where="own", iterations=2)  # without a query: 32 of the 96 rows are left out
attnswap.swap_attention(model, "sink", where="cross")
print({name: tuple(x.shape) for name, x in attnswap.attention_maps(model, inputs, layers=["own", "cross"]).items()})
# {'own': (2, 4, 10, 10), 'cross': (2, 4, 10, 7)}
```

- *By its code.* The call must be visible in the code of the forward, or of what it calls. Nothing of the model runs; to
  see the sizes, the layer alone is tried on a copy with a short sequence.
- *By an example*: what the model takes, as a tensor, a tuple of arguments or a dict. A copy without hooks runs it once.
  This finds layers whose code does not name the function (diffusers' Flux and Wan), tells cross-attention apart, and
  gives the sizes of layers that do not run on sequences alone. A LightningModule's `example_input_array` serves where
  nothing else does.
- *The layer's own code stays*: its rope, norms, caches and masks. The mechanism stands for the one call, in eager mode,
  compiled, exported and with a checkpoint around the layer. (As one graph it compiles with PyTorch 2.14 and 2.15; 2.9
  breaks the graph where a layer calls `Tensor.unflatten`.) Each forward must make exactly one call; else an error
  names the layer. A checkpoint inside the layer, around the call, is an error too: put it around the layer.
- *A mechanism gets q, k and `scale` as the call has them*, and a call that PyTorch refuses stays an error. If a layer
  multiplies its queries itself and calls with `scale=1.0`, `l2`, `qk_norm` and `rkde` see other queries than with the
  scale given to the call: their logits are no products.
- *A declaration* says where queries, keys and values come from: `qkv=`, or `q=` and `kv=`, or `q=`, `k=` and `v=`;
  `heads=` is an attribute or a number, `kv_heads=` likewise for grouped keys; `query_norm=` names what normalizes
  queries after the projection. In YAML: `SwapAttention`
  with `declare: [{kind: my.module.MyAttention, qkv: c_attn, heads: n_head}]`. To load a checkpoint of such a swap,
  declare the class first.
- *It is checked before a swap*: the projections must give what the call got; else an error shows the differences. The
  check finds whether a layer is given `[B, N, C]` or `[N, B, C]`, and which of its inputs each projection reads. A
  layer of sequences is tried alone, without masks; one that needs more has to have `example=`, or
  `example_input_array`.
- *A joint projection* holds queries, keys and values in this order, and nothing else. The check finds whether each lies
  in one piece or head by head. Where keys come first, or a gate is in it too, the class cannot be declared: a mechanism
  with a query goes in undeclared, and [`register_host`](#a-host-of-your-own) serves for one without.
- *Cross-attention*, whose keys and values are of another input, is declared alike. It is swapped only where a pattern
  of `where` spells its name. Refused by name is what needs self-attention: mechanisms without a query, those that need
  a query for each key, those that read other layers' values. Monitors and stabilizers leave cross-attention out;
  `attention_maps(model, inputs, layers="cross")` shows it. Without an example a trial of the layer decides, and names:
  "cross" or "pool" in the layer's own name or class, and names as `cross_attn` around it. A layer that makes keys of a
  second sequence that it needs (`forward(x, context)`) attends to that. One that takes queries and keys apart, under
  such names (`key`, `k`, `values`, `x_kv`), or does without a second sequence (`forward(x, context=None)`) counts as
  self-attention, in LocAteR's penalty too. When it is given one, mechanisms that need self-attention refuse, and others
  warn: pass `example=`. Of `*args`, `**kwargs` and defaults other than None this is not known. A query that is a
  Parameter cannot be declared.
- *The order of the tokens* must stay where a mechanism reads the layer's input (`forgetting`, `gated`, `gla`) or other
  layers' values. These mechanisms are refused by name in a layer that flips, rolls, sorts, cuts or mixes its tokens
  before the projections.
- *Refused by name*: a layer that writes its softmax itself (the text shows the line and its replacement), one that
  calls flash-attn, xformers or FlexAttention, two calls in one forward. For those, and for other joint projections,
  there is {py:func}`attnswap.register_host`.

### A host of your own

This layer writes its softmax itself, and its joint projection holds values, keys and queries in an order of its own:

```python
import attnswap
import torch
from attnswap.hosts import AttentionSpec, Host, Rows, Swapped
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.width, self.heads, self.vkq = width, heads, nn.Linear(width, 3 * width)

    def split(self, x):
        return (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.vkq(x).chunk(3, 2))

    def forward(self, x):
        v, k, q = self.split(x)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class SwappedMixer(Swapped):  # its forward where a mechanism acts
    def forward(self, x):
        v, k, q = self.split(x)
        return self.mix(q, k, v, x).transpose(1, 2).flatten(2)  # attn_mask= and is_causal= where the layer has them


class MixerHost(Host):
    name, mixin = "Mixer", SwappedMixer

    def understands(self, module):
        return type(module) is Mixer

    def spec(self, layer, layer_index):
        return AttentionSpec(layer.width, layer.heads, layer.width // layer.heads, layer_index=layer_index)

    def query_parts(self, layer):
        return ()  # the query's rows stay where they are

    def qk_rows(self, layer):  # for spectra and LocAteR
        return Rows(layer.vkq, 2 * layer.width, 3 * layer.width), Rows(layer.vkq, layer.width, 2 * layer.width)


attnswap.register_host(MixerHost())
model = nn.Sequential(Mixer())
attnswap.swap_attention(model, "rpc", iterations=2)
print(attnswap.attention_maps(model, torch.randn(2, 9, 32))["0"].shape)  # torch.Size([2, 4, 9, 9])
```

With `query_parts` empty, the query's rows stay in the layer under a mechanism without a query, and nothing trains them.
Rows that come first in the projection, or first for each head, can be taken out: name them by `QueryPart`, and have
the swapped forward split what is left. Grouped keys are said by `groups`, and repeated before `mix`. A host is for
exactly its class: for a class that calls `F.scaled_dot_product_attention` it comes before the general one.

[hosts_sdpa.csv](hosts_sdpa.csv) has a row for each of {models} tiny models of {packages} packages: softmax put in for
softmax changes no output and no gradient by more than 1e-6 in {equal} of them, `sink` changes them, and they are
restored bitwise; {refused} are refused by name and {not tried} could not be built here.

## The table

"""

NOTES = """\
✓ = the mechanism is called, with finite output, in training (where each Parameter gets a gradient),
evaluation, `no_grad`, `inference_mode`, autocast, with a padding mask (where the host has one) and compiled, and
restored bitwise. Softmax put in for softmax changes no output beyond 1e-5 (of outputs near 1). A number is a refusal,
an error that leaves the model as it was; "call": the error comes when the model runs. `scaled` is
tried with `variant='scalar'`, `dam` and `position_bias` with `num_tokens`, as most hosts do not say how many tokens
there are.

The numbers: ¹ grouped keys: without a query all heads of a group would be identical. ² q/k norm: without a query the
query's norm would train nothing. ³ reduced keys: more queries than keys, and the mechanism needs one for each. ⁴
rotary positions have mixed the features that the mechanism treats apart; `differential` takes `pairs='heads'` and
`qk_norm` `gain='scalar'` there; a layer of your own says so only once it is declared. ⁵ the layer hides the future,
and the mechanism compares or normalizes all tokens with each other. ⁶ Mechanisms of this column read the values of an
earlier layer of the same stack: they are tried in two layers, of which the second is given the very values of the
first; a layer alone refuses them. ⁷ Which projections give queries and keys is not known:
[`declare_host`](#layers-of-your-own) says it in one line. ⁸ the layer sees the future, and the mechanism must hide it.
⁹ the layer's window is shorter than the sequence, and a state holds all tokens.

What else to know:

- Swap before the optimizer is built, and before DataParallel, DDP, FSDP and `torch.compile`, which are refused; a model
  sharded by `fully_shard` takes what changes no Parameter ([scaling.md](scaling.md)). A mechanism with a query leaves
  every Parameter the same object; one without shrinks the projection to keys and values: a new Parameter. The report
  says how many are new. An optimizer from before the swap raises `RuntimeError` at its first step; build the optimizer
  and its scheduler again. A mechanism's own Parameters (`scaled`'s `s`) that no optimizer
  holds, while one trains their layers, are a warning.
- The query rows that are taken out are kept beside the projection for `restore_attention`. They follow device, dtype,
  copies and pickles. They are no Parameters, no buffers (DDP would broadcast them) and not in `state_dict()`. A
  restored model whose processes began with different weights differs by process: wrap it in DDP again. A swapped
  checkpoint holds no query rows: if it is assigned to a model on the meta device, `restore_attention` refuses that
  model until a plain checkpoint is loaded.
- Softmax put in for softmax leaves training bitwise unchanged: outputs, gradients, weights, dropout masks and memory
  layouts (`tests/attention_modules/hosts/model/test_layout.py`). The exceptions are layers that write the softmax out
  themselves, which differ by rounding: LeViT, EfficientFormer, Swin, Swin v2, GC ViT, ConViT, Visformer, NesT,
  TNT, Hiera in its windows, SAM with its bias, mmsegmentation, and Hugging Face models with `eager`; layers of your
  own that give the function a mask of three dimensions or tensors of five, for which PyTorch alone takes its slow form;
  and, in gradients of half precision without a mask, Hugging Face layers with fewer key heads than query heads.
  NesT's dropout of attention weights draws in another order.
- In a configuration without callbacks, `_target_: attention_modules.swapped` stands around what builds the network:
  `model`, `mechanism`, `where`, `layers`, `exclude` and the mechanism's options.
- A swapped model loads plain checkpoints and swapped ones, strictly. A swapped checkpoint says nothing about the query
  rows: those of the model stay.
- What no host knows (DeBERTa, XCiT's attention among channels, ...) is listed in the report with the reason, never
  swapped; so are subclasses with a forward of their own. A model that has both is swapped in part.
- The self-attention of CaiT (10 models) takes `talking_heads` alone, with the layer's own `proj_l` and `proj_w`.
  Outputs and gradients stay (to 1e-5 in float32), no N x N map is kept, and no Parameter or key is added. Every other
  mechanism would drop what these projections have learned, and is refused; so is `attn_drop_rate`, as CaiT drops
  weights after they are mixed. Monitors of q, k and v, and stabilizers, work after that swap; before it they are an
  error that asks for it.
- Class attention (CaiT, XCiT, VOLO, CrossViT), where the class token alone asks, counts as cross-attention, and so does
  attention pooling (SigLIP), where a learned query asks.
- Cross-attention is swapped only where a pattern of `where` spells the last part of its name, as in
  `"*.multihead_attn"`. It takes no mechanism without a query, or that needs a query for each key, or other layers'
  values.
- Rope: without a query the rotated keys stand on both sides, so the logits are symmetric.
- Relative position bias (BEiT, Swin, MaxViT, LeViT, ...): it is an additive mask for every mechanism, its gradient
  included. Without a query the logits are k kᵀ plus the bias, as symmetric as the bias is; RPC adds it in each pass.
  SAM's bias is a product with the query, and is refused without one. Tokens that a shifted window hides are hidden.
  `sinkhorn`, `rkde` and `mom`, which take masks of padding alone, are refused.
- Cosine attention (Swin v2): queries and keys of length one, each times the root of the learned scale. Without a query
  the logits are the scale times the cosine of two keys, and RPC's keys are those of length root of the scale.
- q/k norm: a mechanism with a query sees what is normalized; without one it is refused, since the query's norm would
  train nothing.
- LeViT has a batch norm behind its joint projection: no query can be split from it, and no W_q and W_k be given. Its
  values, and EfficientFormer's, are wider than its keys, which RPC and elliptical attention refuse.
- Attention weights are made where they are asked for, and only then: with softmax, `nn.MultiheadAttention` gives those
  that `need_weights` (its default!) asks for, and Hugging Face layers those of `output_attentions`. Other mechanisms
  have no map to give: there `nn.MultiheadAttention` returns None, and Hugging Face layers a map without keys (`[B, H,
  N, 0]`). Pass `need_weights=False` where the weights are not read.
- Swapped encoders leave PyTorch's fused path, and take no nested tensors. In evaluation their output is zero at padded
  tokens where the plain one's is (not in a subclass whose forward calls PyTorch's, nor with another norm at its end
  than `LayerNorm` or `RMSNorm`). An `nn.MultiheadAttention`
  counts as cross-attention if one of these holds: it is the `multihead_attn` of a decoder's layer; its `kdim` or `vdim`
  differs; its name contains "cross"; the name of the class around it contains "CrossAttention" or "AttentionPool" (as
  SigLIP's `MultiheadAttentionPoolingHead`); a Parameter `probe`, `query`, `queries`, `query_tokens` or `latents` is
  beside it.
- mmsegmentation: its ViT (Segmenter, SETR, UPerNet), Segmenter's decoder and SegFormer call `nn.MultiheadAttention`
  sequence-first and throw its weights away; a swapped layer makes none, softmax included. In SegFormer the keys of all
  stages but the last come from a reduced image. Lipschitz constants of those layers are refused. Swin, BEiT, MAE,
  Twins' windows and SegNeXt have classes of their own, which are listed in the report with the reason.
- Hugging Face: a layer of any model is known by its forward's call to the attention interface, of transformers or of
  your own code. It receives finished queries, keys and values: what lies before (q/k norm, rope, grouped keys, latent
  attention) needs no more. What else it hands over is honored or refused by name. A bias of positions (T5, ...) and
  indices of keys (DeepSeek-V3.2, ...) are masks for every mechanism that takes masks by row. A bound on the logits
  (`softcap`, Gemma 2) and a sink (`s_aux`, gpt-oss) are exact as an additive mask and as a further key for `softmax`,
  `sink`, `gated`, `entmax` and `hard` (`AttentionMechanism.softmax_like`), and refused elsewhere. A mechanism without a
  query needs projections under a usual name, three or one for all, which make queries and keys of the same input. The
  forward may do nothing to queries alone but scale them. In a class of your own one for all needs `declare_host`.
- Hugging Face: a layer counts as cross-attention if its name or class says so ("cross", "encoder_attn", "x_attn", or
  "pool" in its own name). It also does if its keys are made of a required argument that its queries are not made of,
  alone or beside their own (Idefics2's latents, T5Gemma 2's decoder). A forward that takes queries, keys and values
  counts as such where the module around it gives it other keys than queries (SAM's `final_attn_token_to_image`), and
  its name does not say "self".
- Hugging Face: implementations `sdpa` (the default) and `eager`; with `eager` the model builds a dense mask at every
  call, and flex attention, set before or after a swap, is refused. Most mechanisms continue from a key-value cache;
  rpc, scaled, dam, position_bias, neutreno and twicing refuse it, elliptical and value_residual where some layers alone
  keep a window ([generating](how_to/generating.md)). Learned positions tell `scaled`, `dam` and `position_bias` how
  many tokens there are at most; models with rope need their option `num_tokens=N`.
- Saving Hugging Face models: `save_pretrained` of a swapped model writes weight files that hold everything. The weights
  are in the plain layout, kept query rows among them. The tensors of mechanisms stand under their names in
  `state_dict()`. Beside them is `attnswap.json` with the mechanism and options of each layer; a warning says so.
  Whatever reads the weight files into a model that is swapped alike needs no more: `load_state_dict`, the `Trainer` of
  transformers (best model, resume), `accelerate.load_checkpoint_in_model`, `safetensors.torch.load_model`. These
  loaders fill every tensor that the swapped model computes with, but not the query rows that are kept aside for
  `restore_attention`: to restore later, load by `load_pretrained`, or into the plain model. Where accelerate
  is given a `device_map`, as by `load_checkpoint_and_dispatch`, a joint projection without its query (GPT-2) ends in
  its error of shapes: call `load_pretrained`, then `accelerate.dispatch_model`. The files have a key
  `saved_by_attnswap_load_with_load_pretrained`, which `strict=True` reports as unexpected.
  `attention_modules.load_pretrained(cls, folder)` builds the model swapped as it was; `cls` can be an Auto class or
  have another head, and further arguments are those of `from_pretrained`. A plain `from_pretrained` of such a folder
  builds plain attention: transformers then reports the tensors of mechanisms as unexpected, and a mark
  `...mechanism.saved_by_attnswap_load_with_load_pretrained` for each swapped layer. A mechanism without a registered
  short name is never imported because a file names it: give `mechanism=YourClass`, or where there are several a mapping
  by the names in the file. Swap the model that is saved: a model around the one that was given to `swap_attention` does
  not know of the swap.
- Models under accelerate's hooks (`device_map` over devices, offloading): remove the hooks, swap, dispatch again;
  `load_pretrained` loads onto one device. A projection that two layers share, as a module or a Parameter, cannot lose
  its query.
- Several networks in one model (a student and its teacher, an average of weights, two towers): `layers` counts within
  each, and the report lists them. What runs in series is one network: stages, lists of blocks beside each other, two
  encoders of equal shapes. Parts of equal shapes count apart where their values are equal, where each takes an input of
  its own, where one has a teacher's name (`teacher`, `momentum`, `encoder_k`), or where one is frozen behind one that
  trains. Layers that are copies of each other, value by value, get equal new Parameters. A swap that takes a layer of
  one network and not its counterpart in an equal one warns; so does one that cannot take an equal copy, as an object
  that is no module holds it (`ModelEma` of timm, a list). A network whose Parameters are all frozen, that is
  called a teacher, or that is part of a metric, beside one that trains and is not its equal, is swapped only where a
  pattern of `where` names it alone. `SwapAttention` warns where it swapped a network that was frozen later, or that no
  optimizer trains.
- New Parameters train where a Parameter of their layer does, so that a frozen backbone stays frozen, whether
  `BackboneFinetuning` stands before or after `SwapAttention`.
- Hooks: a Parameter with hooks of yours (W&B's watch, an optimizer step in the backward pass) is not replaced. The swap
  is refused by the hook's name. Mechanisms that use the query replace none. A mechanism whose own Parameters have hooks
  cannot be replaced by another. If a swap silences hooks that saw attention maps, a warning says so. A hook that reads
  the map which a layer returns (`output_attentions`) gets none from most mechanisms: take `attention_maps`.
- Positions: `position_bias` and the matrix of `scaled` have a weight for each position, `dam` one for each distance.
  They take a token's index in the sequence for its position, so that the two must be equal. Models of transformers
  check `position_ids`. In any layer, a mask of packed sequences, of padding before a sequence or of a tree is an error;
  sliding windows and padding behind are not. A program of `torch.jit.trace` keeps no such check. Models that drop or
  shuffle tokens (`patch_drop_rate`, ViTMAE) are refused. Vision transformers of timm, torchvision and transformers, and
  lightly's decoder, say how many tokens they have positions for. A call with fewer or more (lightly's `idx_keep`,
  another image size, whatever `num_tokens=` says) is an error. So is an image of another shape with as many patches,
  and a window of another size (timm's `set_input_size`).
  VJEPA2's predictor is refused, its encoder is not, and vision parts that are told the shape of each image are
  (Siglip2, Qwen-VL). Where the swap asks for `num_tokens=` (DINOv3, DETR's encoder, NaFlexViT) nothing is noticed:
  give images of one shape. What a model does before the blocks is not seen where its blocks alone are swapped.
- Tools that fold a norm or a scale into the projections of queries, keys and values (timm's `reparameterize_model` of
  NextViT, SmoothQuant, AWQ) know none that a mechanism adds (the gates of `gated` and `forgetting`, the decays of
  linear-time mechanisms): the output changes. Fold before the swap.
- DataParallel on several devices: `value_residual`, `neutreno` and `elliptical` end with an error. Use DDP.
- DistributedDataParallel and FSDP: swap before wrapping. A swap of its `.module` that changes Parameters is refused.
- A joint projection without its query rows is no `nn.Linear`: tools that choose layers by that class pass it by. Layers
  of transformers keep the configuration that they had: change `model.config` before the swap.
- A state dict of plain attention leaves the Parameters of mechanisms as they are; after `to_empty` they start anew. If
  they have changed since the swap, a warning says so.
- `save_pretrained` of other libraries (diffusers, segmentation-models-pytorch, huggingface_hub's mixin) writes weights
  alone and warns: build the model, swap it, and give `load_state_dict()` the file. The trainer of sentence-transformers
  reads its folders by plain classes: best model and resume leave the Parameters of mechanisms as they
  are in memory, with that warning.
- Limits. A static cache (`convert_and_export_with_cache`) cannot be exported with `symmetric` and `forgetting`: an
  error of `torch.export`. FSDP2's broadcast of a plain checkpoint (`broadcast_from_rank0=True`) into a model without a
  query is an error of sizes; without broadcast it loads. `value_residual` needs the model's own forward: timm's
  `forward_intermediates` and `get_intermediate_layers`, called on the model itself, raise.
- torch.fx takes a swapped layer as a leaf: name features by layers (`blocks.0.attn`). `torch.jit.script` is refused by
  name; `torch.jit.trace`, `torch.export` and `torch.compile` work.
- Pruned projections, `weight_norm` and `spectral_norm`: a projection without its query's rows must be permanent
  (`prune.remove`) before the query comes back; until then `restore_attention` is refused and the model stays as it is.
- LoRA (peft): a mechanism with a query sees the effective projection; one without asks for `merge_and_unload()` first.
  Over an `nn.MultiheadAttention` swap first, with a mechanism that uses the query, and then call `get_peft_model`.
  After a swap without one, adapt keys, values and the rest: an adapter on the query's projection (GPT-2: `c_attn`) is
  refused. `target_modules: [k_proj, v_proj]` (BERT: `[key, value]`) leaves the query out; where only some layers were
  swapped, a regular expression such as `'.*layer[.](0|1)[.].*query|.*(key|value)'` adapts the queries that are left.
  `save_pretrained` of the model within a peft model is refused, as nothing loads it: save what `merge_and_unload()`
  returns. Adapters hold a mechanism's own parameters (`scaled`'s `s`) only with `modules_to_save: [mechanism]`, and
  without it they are frozen. Swapped in after `get_peft_model` they train and are not in the adapter's file, which is a
  warning. """


TIMM = """\
## timm, model by model

Of timm {version}'s models, {number} are of families in which a model has attention among tokens. Softmax goes into
{softmax} of them ({by_name} in class attention alone, which `where` has to name), symmetric attention into
{symmetric}, RPC into {rpc}. A number in brackets is that of the family's
models for which the reason holds, where it is not all. [timm_models.csv](timm_models.csv) has a row per model, made by
`python -m tests.attention_modules.hosts.timm.models`, which builds each on the meta device and swaps all its layers.
In {maps} models {{func}}`~attnswap.attention_maps` gives what the layers write out without fused kernels, to 1e-5.
`pytest -m slow tests/attention_modules/hosts` counts anew, and runs every kind of layer of every model at its true
size, and a small model of each family whole, forward and backward, on real tensors.
"""


def cell(host: str, mechanism: str) -> str:
    """What the table test shows of a host and a mechanism."""
    case = HOSTS[host]
    text = case.refuses.get(mechanism) or case.refuses_call.get(mechanism)
    if text is None:
        return "✓"
    return REASONS[text] if mechanism in case.refuses else f"call {REASONS[text]}"


def columns() -> list[tuple[list[str], list[str]]]:
    """Mechanisms that all hosts treat alike, and what each host makes of them."""
    found: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
    for mechanism in MECHANISMS:
        cells = [cell(host, mechanism) for host in HOSTS]
        found.setdefault((*cells, mechanism in BETWEEN_LAYERS), ([], cells))[0].append(mechanism)
    return list(found.values())


def own_section() -> str:
    """What is said of layers of one's own, with what was tried."""
    lines = strangers.read()
    counts = {result: sum(line.result == result for line in lines) for result in ("equal", "refused", "not tried")}
    told = {"models": len(lines), "packages": len({line.package for line in lines} - {"own", "nanoGPT"}), **counts}
    return re.sub(r"\{(models|packages|equal|refused|not tried)\}", lambda match: str(told[match[1]]), OWN)


def table() -> str:
    """A column for mechanisms that all hosts treat alike, and a row per host, made of the cases of the table test."""
    groups = columns()
    letters = [chr(ord("A") + index) for index in range(len(groups))]
    lines = ["| Column | Mechanisms |", "|---|---|"]
    for letter, (members, _) in zip(letters, groups, strict=True):
        asks = "⁶" if members[0] in BETWEEN_LAYERS else ""
        lines.append(f"| {letter}{asks} | {', '.join(f'`{name}`' for name in members)} |")
    lines += ["", f"| Host | {' | '.join(letters)} |", "|---" * (len(letters) + 1) + "|"]
    for case, *row in zip(HOSTS.values(), *(cells for _, cells in groups), strict=True):
        lines.append(f"| {case.title} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page."""
    head = "# Hosts and mechanisms, as tested\n\n<!-- Made by `python -m tests.attention_modules.hosts.table` from the "
    return f"{head}cases of the table test. -->\n\n{own_section()}{table()}\n{NOTES}\n{timm_section()}"


def timm_section() -> str:
    """The models of timm, by family."""
    rows = timm_models.read()
    return (
        TIMM.format(
            version=timm_models.VERSION,
            number=len(rows),
            by_name=sum(row.by_name for row in rows),
            maps=sum(row.same_maps for row in rows),
            **timm_models.totals(rows),
        )
        + "\n"
        + (timm_models.table(rows))
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(markdown(), encoding="utf-8")
