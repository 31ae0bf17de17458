"""Digests of tensors."""

from __future__ import annotations

from typing import Any

import torch


def update_digest(digest: Any, tensor: torch.Tensor) -> None:
    """Add shape and content of a tensor to a digest, whatever its layout; of one without values its shape."""
    if tensor.is_nested:
        for part in tensor.unbind():
            update_digest(digest, part)
        return
    if tensor.layout != torch.strided:
        digest.update(str(tuple(tensor.shape)).encode())
        entries = tensor.detach().to_sparse_coo().coalesce()
        update_digest(digest, entries.indices())
        update_digest(digest, entries.values())
        return
    if tensor.is_meta:
        digest.update(str(tuple(tensor.shape)).encode())
        return
    content = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    digest.update(str(tuple(content.shape)).encode())
    digest.update(content.flatten().view(torch.uint8).numpy())
