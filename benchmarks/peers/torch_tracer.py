"""torch.distributed.pipelining with the stages that its tracer cuts, as in its tutorial."""

from __future__ import annotations

import torch
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from benchmarks.peers.llama_stage import cut, head_layers, next_word_loss
from benchmarks.peers.training import Contestant, Tensors, Training, adamw, gathered, split


def build(training: Training, form: str, rank: int) -> Contestant:
    """The stage on this rank; `form` is not used."""
    model = training.model()
    layers = cut(training.layers, training.pp, head_layers(model))
    words = split(training.batch(0, 0), training.micro_batches)[0]["input_ids"]
    pipe = pipeline(
        model,
        mb_args=(),
        mb_kwargs={"input_ids": words},
        split_spec={f"model.layers.{part[0]}": SplitPoint.BEGINNING for part in layers[1:]},
    )
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        training.micro_batches,
        loss_fn=lambda output, labels: next_word_loss(output["logits"], labels),
    )
    optimizer = adamw(stage.submod.parameters())

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(input_ids=batch["input_ids"])
        elif rank == training.pp - 1:
            schedule.step(target=batch["labels"])
        else:
            schedule.step()
        optimizer.step()

    def weights() -> Tensors:
        return gathered(dict(stage.submod.named_parameters()), training, rank)

    return Contestant(step, weights)
