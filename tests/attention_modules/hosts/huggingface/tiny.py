"""Tiny random models of every folder of transformers that calls the attention interface, and inputs for them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.huggingface.source import calls_interface
from tests.attention_modules.hosts.huggingface.peculiar import OF, Peculiar

BATCH, TOKENS, VOCABULARY, IMAGE = 2, 12, 99, 32
LARGEST = 40_000_000  # parameters of a model that is still tried
# Of models with attention in some layers alone: in which.
_HYBRID = {
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "layers_block_type": ["mamba", "attention"],
    "block_types": ["recurrent", "attention"],
}
_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_LEFT_OUT = ("transformers_version", "out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
_KEPT = ("rope_parameters", "rope_scaling", "id2label", "label2id", "quantization_config", "dtype", "generation_config")
# What a number of a configuration becomes: the first pattern that its name has.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_feat_extract_layers|^conv_", 10_000),  # as many as its lists have entries
    (r"vocab", VOCABULARY),
    (r"(num|n)_?.*(experts|expert)s?_?(per_tok|_used)|top_?k$|moe_topk|moe_k$|experts_per_tok", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(num|n)_.*experts$|num_experts|n_shared_experts|moe_num_experts", 4),
    (r"bottleneck", 64),
    (r"qk_rope_head_dim", 8),
    (r"head_dim|d_kv|kv_lora_rank|q_lora_rank|o_lora_rank|attention_head_size|index_head_dim", 16),
    (r"key_value_heads|kv_heads|index_n_heads|linear_num_key_heads", 2),
    (r"heads?$|num_heads|n_head|attention_heads", 4),
    (r"max_position|n_positions|max_.*positions?$|max_seq|n_ctx|max_sequence", 128),
    (r"(num|n)_.*layers?$|layers$|^depth$|num_blocks|^n_layer$", 2),
    (r"image_size|input_size|img_size", IMAGE),
    (r"^patch_size$", 8),
    (r"window", 4),
    (r"intermediate|ffn|mlp_dim|d_ff|inner_dim|feedforward", 64),
    (r"hidden_size|hidden_dim|d_model|embed_dim|n_embd|embedding_size|projection_dim|width|^dim$|output_dim", 64),
)


def folders() -> list[str]:
    """Folders of ``transformers.models`` with a class whose forward calls the interface, by their source."""
    import transformers.models

    (root,) = transformers.models.__path__
    found = {
        path.parent.name for path in Path(root).glob("*/modeling_*.py") if "ALL_ATTENTION_FUNCTIONS" in _text(path)
    }
    return sorted(found)


def _text(path: Path) -> str:
    """A file from its first class that has a forward on: an import alone is no call."""
    return re.sub(r"^(from|import) .*?$|^    [A-Z_]+,$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def modules_of(folder: str) -> list[Any]:
    """The modules of a folder that define models."""
    package = importlib.import_module(f"transformers.models.{folder}")
    names = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name.startswith("modeling_")]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def classes_of(folder: str) -> tuple[list[type[nn.Module]], list[type[nn.Module]]]:
    """The folder's own attention classes that call the interface, and its models, the plain ones first."""
    from transformers import PreTrainedModel

    own = [
        each
        for module in modules_of(folder)
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, nn.Module) and each.__module__ == module.__name__
    ]
    callers = [each for each in own if calls_interface(each)]
    models = [
        each for each in own if issubclass(each, PreTrainedModel) and not each.__name__.endswith("PreTrainedModel")
    ]
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model", "")
    return callers, sorted(
        models, key=lambda each: next(i for i, end in enumerate(endings) if each.__name__.endswith(end))
    )


def shrunk(config: dict[str, Any], lists: bool = True) -> dict[str, Any]:
    """A configuration's numbers, made small."""
    found: dict[str, Any] = {}
    ids = iter(range(VOCABULARY - 1, 40, -1))
    for name, value in config.items():
        if name in _KEPT or (name == "layer_types" and lists) or name in _LEFT_OUT:
            if name in _KEPT and value is not None:
                found[name] = _rotary(value)
            continue
        found[name] = _small(name, value, lists, ids)
    heads, groups = (config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads is not None and heads == groups:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if found.get("qk_rope_head_dim") and found.get("head_dim"):  # latent attention: the width that is rotated
        found["head_dim"] = found["qk_rope_head_dim"]
    if isinstance(found.get("mamba_d_head"), (int, str)) and isinstance(found.get("hidden_size"), int):
        inner = found["hidden_size"] * (found.get("mamba_expand") or 2)
        found |= {"mamba_n_heads": 4, "mamba_d_head": inner // 4}
        found |= {"mamba_d_ssm": inner} if "mamba_d_ssm" in found else {}
    return found


def sliced(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with a layer of each kind, where it lists its layers; that of its parts too."""
    found = {name: sliced(value) if isinstance(value, dict) else value for name, value in config.items()}
    count = next((found[name] for name in _COUNTS if isinstance(found.get(name), int)), None)
    lists = {name: value for name, value in found.items() if isinstance(value, list) and len(value) == count}
    for name in ("per_layer_config", "layer_configs"):
        if isinstance(found.get(name), dict):
            found.pop(name)
    if not count or not lists:
        return found
    chosen = list({str([value[place] for value in lists.values()]): place for place in reversed(range(count))}.values())
    chosen = sorted(chosen)[:4]
    if len(chosen) < 2:
        chosen = list(range(min(2, count)))
    found |= {name: [value[place] for place in chosen] for name, value in lists.items()}
    return found | {name: len(chosen) for name in _COUNTS if found.get(name) == count}


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose sizes are all given, where the default leaves some to be set."""
    found = {name: filled(value) if isinstance(value, dict) else value for name, value in config.items()}
    for name, value in found.items():
        if value is None and not name.startswith(("mlp_layer", "layer_types")):
            size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
            if size is not None and size < 1000 and not name.endswith(("_id", "_index", "window", "_list")):
                found[name] = size
    return found | {name: 4 for name in ("prediction_length",) if name in found and not found[name]}


def _rotary(value: Any) -> Any:
    """Rotary positions of several axes, whose parts add up to half of a head's 16 features."""
    if not isinstance(value, dict):
        return value
    found = {name: _rotary(each) for name, each in value.items()}
    return found | ({"mrope_section": [2, 3, 3]} if "mrope_section" in found else {})


def _small(name: str, value: Any, lists: bool, ids: Iterator[int]) -> Any:
    if isinstance(value, dict):
        return shrunk(value, lists)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, int):
        if name.endswith(("token_id", "token_index", "_id")):
            return next(ids) if value > 40 else value
        for pattern, size in _SIZES:
            if re.search(pattern, name):
                return min(size, value) if value > 0 else value
        return value
    if isinstance(value, list) and lists and value and all(type(each) is int for each in value):
        if re.search("depth|layers|num_blocks", name):
            return [1 for _ in value]
        if re.search("size|dim|channels|widths", name) and not re.search("patch|kernel|stride|window|image", name):
            return [min(each, 32) for each in value]
        if re.search("image_size", name):
            return [IMAGE for _ in value]
        if re.search("heads", name):
            return [2 for _ in value]
    return value


class NotBuilt(Exception):
    """No tiny model of a class could be built, and why."""


def built(kind: Any) -> nn.Module:
    """As :func:`running`, the model alone."""
    return running(kind)[0]


def running(kind: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny random model of a class, in eval mode, in float32, and inputs that it takes."""
    reasons = []
    peculiar = OF.get(kind.__module__.split(".")[2], Peculiar())
    for given in _configurations(kind.config_class, peculiar.settings):
        try:
            config = kind.config_class(**given)
        except Exception as error:
            reasons.append(f"configure {kind.__name__}: {_said(error)}")
            continue
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in kind(config).parameters())
        except Exception:  # some cannot be built without weights
            count = 0
        if count > LARGEST:
            reasons.append(f"build {kind.__name__}: {count:,} parameters")
            continue
        try:
            torch.manual_seed(0)
            model = settled(kind(config).float().eval())
        except Exception as error:
            reasons.append(f"build {kind.__name__}: {_said(error)}")
            continue
        if not any(calls_interface(type(module)) for module in model.modules()):
            reasons.append(f"build {kind.__name__}: no layer that calls the interface")
            continue
        try:
            return model, first_that_runs(model, peculiar)
        except NotBuilt as error:
            reasons.append(str(error))
    raise NotBuilt(" / ".join(dict.fromkeys(reasons)))


def _configurations(config_class: Any, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments for a small configuration, that with the folder's own settings and the plainest first."""
    config = _default(config_class)
    config.pop("model_type", None)
    if settings:
        yield _with(shrunk(config), settings)
    yield shrunk(config)
    yield shrunk(config, lists=False)
    for more in (sliced(config), filled(sliced(config))):
        yield _with_counts(shrunk(more, lists=False), more)
    yield shrunk(filled(config))
    yield _with_axes(shrunk(config))
    for hybrid in (_HYBRID, _HYBRID | {"layer_types": ["conv", "full_attention"]}):
        yield shrunk(config) | {name: value for name, value in hybrid.items() if name in config}
    if isinstance(config.get("backbone_config"), dict):  # whose stages must fit what is asked of them
        yield shrunk(config, lists=False) | {"backbone_config": config["backbone_config"]}


def _with(small: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A small configuration with some settings in place of its own; ``None`` leaves one to its default."""
    found = dict(small)
    for name, value in settings.items():
        inner = found.get(name)
        found[name] = _with(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def _with_axes(small: dict[str, Any]) -> dict[str, Any]:
    """A small configuration whose rotary positions have the three axes that some models take for given."""
    found = {name: _with_axes(value) if isinstance(value, dict) else value for name, value in small.items()}
    return found | ({"mrope_section": [2, 3, 3]} if "rope_theta" in found and "rope_type" in found else {})


def _with_counts(small: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """A small configuration with as many layers as one that was sliced."""
    parts = {name: _with_counts(value, sizes[name]) for name, value in small.items() if isinstance(value, dict)}
    counts = {name: sizes[name] for name in _COUNTS if isinstance(sizes.get(name), int) and sizes[name] <= 4}
    return small | parts | counts


def _default(config_class: Any) -> dict[str, Any]:
    return config_class().to_dict()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def settled(model: nn.Module) -> nn.Module:
    """Weights of a size at which logits are about one, and biases that count."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1 and parameter.numel():
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(model.config.languages)))
    return model


def ids(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    """``[B, N]``, none of them special."""
    return torch.randint(5, 35, (BATCH, tokens), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int) -> Tensor:
    """Random numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def inputs_of(model: Any) -> list[dict[str, Any]]:
    """Inputs that the model may take, the likeliest first."""
    names = inspect.signature(model.forward).parameters
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    config = model.config
    text = {"input_ids": ids(), "attention_mask": mask}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = ids(1, 7)
    text = {name: value for name, value in text.items() if name in names or name == "input_ids"}
    size = _image_size(config)
    channels = _find(config, "num_channels") or 3
    image = {"pixel_values": randn(BATCH, channels, *size)}
    found: list[dict[str, Any]] = []
    width = _find(config, "hidden_size") or _find(config, "d_model") or 64
    if "pixel_values" in names and "input_ids" in names:
        found.append({**text, **image})
    if "input_ids" in names:
        found.append(text)
    if "pixel_values" in names:
        found += [image, {"pixel_values": randn(BATCH, 2, channels, *size)}, {**image, "input_ids": ids()}]
        found.append({"pixel_values": randn(BATCH, _find(config, "num_frames") or 4, channels, *size)})
        patch = _find(config, "patch_size") or 8
        found.append({"pixel_values": randn(BATCH, 16, channels * patch * patch)})
    if "pixel_values_videos" in names:
        found.append({"pixel_values_videos": randn(BATCH, _find(config, "frames_per_clip") or 4, channels, *size)})
    if "input_features" in names:
        mels = _find(config, "num_mel_bins") or _find(config, "feature_size") or _find(config, "input_dim") or 80
        frames = 2 * (_find(config, "max_source_positions") or 50)
        extra = {"decoder_input_ids": ids(1, 7)} if "decoder_input_ids" in names else {}
        found += [
            {"input_features": randn(BATCH, mels, frames), **extra},
            {"input_features": randn(BATCH, 40, mels), **extra},
            {"input_features": randn(BATCH, 40, _find(config, "feature_projection_input_dim") or 2 * mels), **extra},
        ]
    if "input_values" in names:
        found += [
            {"input_values": randn(BATCH, 4000)},
            {"input_values": randn(BATCH, 1, 4000)},
            {"input_values": randn(BATCH, _find(config, "max_length") or 64, _find(config, "num_mel_bins") or 16)},
        ]
    if "inputs_embeds" in names:
        hidden = {"inputs_embeds": randn(BATCH, TOKENS, width)}
        found += [{**hidden, "attention_mask": mask}, hidden]
    if "past_values" in names:
        found += _series(config)
    if "hidden_states" in names:
        found.append({"hidden_states": randn(BATCH, TOKENS, width)})
    return found


def _series(config: Any) -> list[dict[str, Any]]:
    length = max(getattr(config, "lags_sequence", None) or [0]) + (getattr(config, "context_length", None) or 16)
    channels = getattr(config, "num_input_channels", None) or getattr(config, "input_size", None) or 1
    ahead = getattr(config, "prediction_length", None) or 4
    times = _find(config, "num_time_features") or 0
    plain = {"past_values": randn(BATCH, length, channels)}
    timed = {
        "past_values": randn(BATCH, length) if channels == 1 else randn(BATCH, length, channels),
        "past_time_features": randn(BATCH, length, times),
        "past_observed_mask": torch.ones(BATCH, length) if channels == 1 else torch.ones(BATCH, length, channels),
        "future_values": randn(BATCH, ahead) if channels == 1 else randn(BATCH, ahead, channels),
        "future_time_features": randn(BATCH, ahead, times),
    }
    padded = {"past_values": randn(BATCH, 32), "past_values_padding": torch.zeros(BATCH, 32, dtype=torch.long)}
    return [plain, timed, {**padded, "freq": torch.zeros(BATCH, 1, dtype=torch.long)}]


def _find(config: Any, name: str) -> Any:
    """A number of the configuration, or of one inside it."""
    value = getattr(config, name, None)
    if isinstance(value, int):
        return value
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and isinstance(found := _find(inner, name), int):
            return found
    return None


def _image_size(config: Any) -> tuple[int, int]:
    for inner in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        size = getattr(inner, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
    return IMAGE, IMAGE


def tensors_of(output: Any) -> list[Tensor]:
    """Every floating tensor of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


def run(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The model's floating outputs, the same at every call."""
    torch.manual_seed(0)
    with contextlib.suppress(AttributeError):
        model.config.use_cache = False
    return tensors_of(model(**inputs))


def first_that_runs(model: nn.Module, peculiar: Peculiar | None = None) -> dict[str, Any]:
    """Inputs that the model takes: those of its folder, else the first of those that are known by name."""
    reasons = []
    for inputs in [peculiar.inputs()] if peculiar and peculiar.inputs else inputs_of(model):
        try:
            with torch.no_grad():
                out = run(model, inputs)
        except Exception as error:
            reasons.append(f"{sorted(inputs)}: {_said(error)}")
            continue
        if out and any(tensor.numel() for tensor in out):
            return inputs
        reasons.append(f"{sorted(inputs)}: no output")
    raise NotBuilt(f"run {type(model).__name__} {reasons[0] if reasons else 'with no known inputs'}")
