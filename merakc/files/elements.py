"""The bytes of tensors, as they go into files, messages and hashes."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in row-major order, in one dim of uint8, on the CPU: a view where that
    has them so, else a copy.
    """
    dense = tensor.detach().cpu().contiguous()
    # One element may have any stride and be contiguous, and is no bytes by it.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
