"""DeepSpeed's pipeline, as in its tutorial: a list of layers and `train_batch`."""

from __future__ import annotations

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]
from torch import nn

from benchmarks.peers.llama_stage import next_word_loss
from benchmarks.peers.training import Contestant, Tensors, Training, adamw, gathered, split


class Block(nn.Module):
    """A layer, with the positions that it wants beside its input."""

    def __init__(self, layer: nn.Module, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary_emb = layer, rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, sequence, hidden]."""
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return self.layer(x, position_embeddings=self.rotary_emb(x, positions))


def build(training: Training, form: str, rank: int) -> Contestant:
    """The stage on this rank; `form` is not used."""
    model = training.model()
    names = {id(p): name for name, p in model.named_parameters()}
    deepspeed.init_distributed(dist_backend="gloo")
    inner = model.model
    net = PipelineModule(
        layers=[
            inner.embed_tokens,
            *(Block(layer, inner.rotary_emb) for layer in inner.layers),
            inner.norm,
            model.lm_head,
        ],
        loss_fn=next_word_loss,
        num_stages=training.pp,
        partition_method="parameters",
    )
    config = {
        "train_micro_batch_size_per_gpu": training.samples // training.micro_batches,
        "gradient_accumulation_steps": training.micro_batches,
        "gradient_clipping": 0.0,  # or it clips at 1, as nobody else does
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=adamw(net.parameters()), config=config)

    def step(batch: Tensors) -> None:
        parts = split(batch, training.micro_batches)
        engine.train_batch(iter([(part["input_ids"], part["labels"]) for part in parts]))

    def weights() -> Tensors:
        return gathered({names[id(p)]: p for p in net.parameters()}, training, rank)

    return Contestant(step, weights, rank % training.dp)
