"""DTensor's `parallelize_module`, as in torch's tutorial, with FSDP2 where there is dp, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.peers.training import Contestant, Tensors, Training, adamw, plain_step

TP_PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank; `form` is not used."""
    mesh = init_device_mesh("cpu", (training.dp, training.tp), mesh_dim_names=("dp", "tp"))
    model = training.model()
    parallelize_module(model, mesh["tp"], TP_PLAN)
    if training.dp > 1:
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def weights() -> Tensors:
        return {name: whole(parameter) for name, parameter in model.named_parameters()}

    return Contestant(plain_step(model, adamw(model.parameters())), weights)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that may be a DTensor, gathered; collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
