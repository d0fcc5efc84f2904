"""torch.distributed.pipelining with stages made by hand, as in its tutorial.

With tp `parallelize_module` splits every stage, with dp `DistributedDataParallel` wraps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.dtensor_tp import TP_PLAN, whole
from benchmarks.peers.llama_stage import LlamaStage, cut, head_layers, next_word_loss, original_name
from benchmarks.peers.training import Contestant, Tensors, Training, adamw, gathered

CHUNKS = {"ScheduleInterleaved1F1B": 2, "ScheduleZBVZeroBubble": 2}  # stages of a rank


def own_stages(form: str, pp: int, rank: int) -> list[int]:
    """The stages of a pipeline rank, in a loop or, for ZBV, down and up again."""
    if form == "ScheduleZBVZeroBubble":
        return [rank, 2 * pp - 1 - rank]
    return [rank + k * pp for k in range(CHUNKS.get(form, 1))]


def build(training: Training, form: str, rank: int) -> Contestant:
    """The stages on this rank, for the name of a schedule of torch's."""
    mesh = init_device_mesh(
        "cpu", (training.dp, training.pp, training.tp), mesh_dim_names=("dp", "pp", "tp")
    )
    model = training.model()
    count = training.pp * CHUNKS.get(form, 1)
    layers = cut(training.layers, count, head_layers(model))
    own = own_stages(form, training.pp, mesh.get_local_rank("pp"))
    stages: list[PipelineStage] = []
    for k in own:
        part: torch.nn.Module = LlamaStage(model, layers[k], first=k == 0, last=k == count - 1)
        if training.tp > 1:
            plan = {name.removeprefix("model."): style for name, style in TP_PLAN.items()}
            parallelize_module(part, mesh["tp"], plan)
        if training.dp > 1:
            part = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        stages.append(
            PipelineStage(part, k, count, torch.device("cpu"), group=mesh.get_group("pp"))
        )
    held: Any = stages if form in CHUNKS else stages[0]
    kind = getattr(pipelining, form)
    schedule = kind(held, training.micro_batches, loss_fn=next_word_loss)
    optimizer = adamw([p for stage in stages for p in stage.submod.parameters()])

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        words = (batch["input_ids"],) if 0 in own else ()
        target = {"target": batch["labels"]} if count - 1 in own else {}
        schedule.step(*words, **target)
        optimizer.step()

    def weights() -> Tensors:
        parts = {
            original_name(name): whole(p)
            for stage in stages
            for name, p in stage.submod.named_parameters()
        }
        return gathered(parts, training, rank)

    return Contestant(step, weights)
