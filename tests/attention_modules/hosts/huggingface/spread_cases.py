"""A tiny Llama on several processes by ``tp_plan="auto"``, which a test starts, or on one: FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config

from attnswap import AttentionSwapError, attention_maps, load_pretrained, restore_attention, swap_attention

# Without a Parameter; with numbers, rows and tables of each head; with Parameters that all heads share; with the input.
TAKEN: dict[str, dict[str, Any]] = {
    "softmax": {},
    "neutreno": {},
    "ssmax": {},
    "position_bias": {"num_tokens": 8},
    "qk_norm": {"gain": "scalar"},
    "gated": {"gate": "element"},
    "forgetting": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "talking_heads": {},
    "differential": {"pairs": "heads"},
    "rpc": {},
    "dam": {"num_tokens": 8},
}


SIZES = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "pad_token_id": 0}
MODELS = {
    "plain": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
    "one key head": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1),
    "joint": Phi3Config(**SIZES, num_attention_heads=4, num_key_value_heads=4),
}


def save_plain(folder: Path) -> None:
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(folder / name)


def load(folder: Path, name: str = "plain") -> Any:
    several = {"tp_plan": "auto"} if distributed.is_initialized() else {}
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, **several).train()


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def disturb(model: Any) -> None:
    """Give mechanisms other values than those at their start, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".mechanism." in name:
            values = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if hasattr(parameter, "device_mesh"):
                values = distributed.tensor.distribute_tensor(values, parameter.device_mesh, parameter.placements)
            with torch.no_grad():
                parameter.copy_(values)


def step(model: Any) -> dict[str, Any]:
    """Logits, gradients, and weights after a step."""
    tokens = torch.arange(14).view(2, 7) % 19
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
    optimizer.step()
    weights = {name: whole(each) for name, each in model.named_parameters()}
    return {"logits": output.logits.detach(), "gradients": gradients, "weights": weights}


def error_of(action: Any) -> str:
    try:
        action()
    except (AttentionSwapError, RuntimeError) as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mechanism, options in TAKEN.items():
        model = load(folder)
        swap_attention(model, mechanism, **options)
        disturb(model)
        found[mechanism] = step(model)
        if mechanism == "gated":
            main_process = not distributed.is_initialized() or distributed.get_rank() == 0
            name = "several" if distributed.is_initialized() else "one"
            model.save_pretrained(folder / name, is_main_process=main_process)
            again = load_pretrained(
                LlamaForCausalLM, folder / name, dtype=torch.float64, **({"tp_plan": "auto"} if name != "one" else {})
            )
            found["loaded"] = {key: whole(each) for key, each in again.named_parameters()}
            found["maps"] = error_of(lambda model=model: attention_maps(model, torch.arange(7)[None]))
            restore_attention(model)
            found["restored"] = whole(model(input_ids=torch.arange(7)[None], use_cache=False).logits)
    if not distributed.is_initialized():
        return found
    model = load(folder)
    before = {name: id(each) for name, each in model.named_parameters()}
    for mechanism, options in REFUSED.items():
        found[f"refused {mechanism}"] = error_of(lambda: swap_attention(model, mechanism, **options))  # noqa: B023
    for name in ("one key head", "joint"):
        found[f"refused {name}"] = error_of(lambda: swap_attention(load(folder, name), "sink"))  # noqa: B023
    found["unchanged"] = before == {name: id(each) for name, each in model.named_parameters()}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2"}
    distributed.init_process_group("gloo")
    result = main(Path(sys.argv[1]))
    torch.save(result, Path(sys.argv[1], f"found_{distributed.get_rank()}.pt"))
    distributed.barrier()  # what ends first would cut off the other, which may still load
    distributed.destroy_process_group()
