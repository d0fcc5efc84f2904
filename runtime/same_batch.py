"""Whether the ranks of a data-parallel replica were given one batch, at every step.

Each rank adds one number to a message that is sent anyway, the sum of the losses. It is a hash of
the rank's batch, times a coefficient: those of a replica's ranks add up to zero, so that equal
hashes do. The replicas' hashes are scrambled differently, lest batches that were swapped between
two of them cancel out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from merakc.errors import MismatchError
from merakc.ir.program import Mesh
from merakc.runtime.state import digest

# Of a larger tensor, blocks of elements at even distances, others at every step: to hash a batch of
# images takes a tenth of a millisecond then.
MAX_BYTES, _BLOCK = 2**18, 256
REMEDY = "pick batches by model.data_parallel_rank, not by the global rank"
_BITS = 31  # of a hash: its multiples and their sums over ranks are exact in float64
_ODD = 0x9E3779B97F4A7C15  # the fractional digits of the golden ratio, which scatter bits


def batch_mark(leaves: Iterable[Any], mesh: Mesh, rank: int, step: int) -> float:
    """What this rank adds for its batch, of these leaves; over all ranks the sum is zero.

    Every rank gives the same `step`.
    """
    found = 0
    for leaf in leaves:
        data = _sample(leaf, step) if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
        found = zlib.crc32(data, found)
    dp, pipeline_rank, tp_rank = mesh.coordinates(rank)
    scrambled = (found + 1) * (2 * dp + 1) * _ODD % 2**64 >> 64 - _BITS
    ranks = mesh.tp * mesh.pp
    return float(scrambled * (ranks - 1 if pipeline_rank == tp_rank == 0 else -1))


def compare_batches(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises `MismatchError` where the ranks of a replica, the group, were given other tensors.

    A sampler that counts ranks in place of dp ranks would train on garbage.
    """
    if group is None:
        return
    digests = [""] * group.size()
    dist.all_gather_object(digests, digest(tensors), group=group)
    ranks = dist.get_process_group_ranks(group)
    odd = [r for r, d in zip(ranks, digests, strict=True) if d != digests[0]]
    if odd:
        raise MismatchError(
            f"ranks {odd} were given another batch than rank {ranks[0]}, with which they form one "
            f"data-parallel replica; {REMEDY}"
        )


def _sample(tensor: torch.Tensor, step: int) -> Any:
    """The bytes of a tensor on the CPU; of a large one, of some of its elements."""
    flat = tensor.detach().reshape(-1)
    stride = -(-flat.numel() * flat.element_size() // MAX_BYTES)
    if stride > 1:
        whole = flat.numel() // _BLOCK * _BLOCK
        flat = flat[:whole].view(-1, _BLOCK)[step % stride :: stride]
    return flat.cpu().contiguous().view(torch.uint8).numpy()
