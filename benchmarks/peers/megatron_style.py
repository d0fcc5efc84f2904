"""A Megatron-style baseline, written anew from the papers: not Megatron-LM itself.

The layers are those of `megatron_layers`. The pipeline is 1F1B without flushes between
micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), each rank waiting for its
messages; dp adds up one flat buffer of gradients after the last backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers.llama_stage import cut, head_layers
from benchmarks.peers.megatron_layers import Part, TensorParallel
from benchmarks.peers.training import Contestant, Tensors, Training, adamw, gathered, split


class Pipeline:
    """This rank's place in the pipeline: its part, its neighbours, and what is under way."""

    def __init__(self, part: Part, training: Training, rank: int) -> None:
        self.part, self.training = part, training
        self.place, self.count = training.pp_rank(rank), training.pp
        self.before, self.after = rank - training.tp, rank + training.tp
        samples = training.samples // training.micro_batches
        self.shape = (samples, training.sequence, training.hidden)
        self.held: list[tuple[Tensor, Tensor]] = []  # inputs and outputs that wait for gradients

    def step(self, batch: Tensors) -> None:
        """Forward and backward of all micro-batches: warm-up, one of each in turns, cool-down."""
        parts = split(batch, self.training.micro_batches)
        warm_up = min(self.count - 1 - self.place, len(parts))
        for part in parts[:warm_up]:
            self.exchange_forward(self.forward(part, self.receive_forward()))
        steady = parts[warm_up:]
        given = self.receive_forward() if steady else None
        for k, part in enumerate(steady):
            gradient = self.exchange_forward(self.forward(part, given), want_gradient=True)
            given = self.exchange_backward(self.backward(gradient), k + 1 < len(steady))
        for _ in range(warm_up):
            self.exchange_backward(self.backward(self.receive_backward()), False)

    def forward(self, part: Tensors, given: Tensor | None) -> Tensor:
        """One micro-batch; what the rank before gave, or the words."""
        x = part["input_ids"] if given is None else given.requires_grad_()
        y = self.part(x, part["labels"])
        self.held.append((x, y))
        return y

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """The oldest micro-batch; gives the gradient of its input."""
        x, y = self.held.pop(0)
        if gradient is None:
            gradient = torch.tensor(1 / self.training.micro_batches)
        torch.autograd.backward(y, gradient)
        return x.grad if x.requires_grad else None

    def exchange_forward(self, y: Tensor, *, want_gradient: bool = False) -> Tensor | None:
        """Sends on, and receives the gradient of an earlier one with it."""
        if self.place == self.count - 1:
            return None
        wanted = self.empty() if want_gradient else None
        self.wait(send=(y.detach(), self.after), receive=(wanted, self.after))
        return wanted

    def exchange_backward(self, gradient: Tensor | None, want_input: bool) -> Tensor | None:
        """Sends a gradient back, and receives another micro-batch with it."""
        if self.place == 0:
            return None
        wanted = self.empty() if want_input else None
        self.wait(send=(gradient, self.before), receive=(wanted, self.before))
        return wanted

    def receive_forward(self) -> Tensor | None:
        """From the rank before; None on the first."""
        wanted = None if self.place == 0 else self.empty()
        self.wait(receive=(wanted, self.before))
        return wanted

    def receive_backward(self) -> Tensor | None:
        """From the rank after; None on the last."""
        wanted = None if self.place == self.count - 1 else self.empty()
        self.wait(receive=(wanted, self.after))
        return wanted

    def empty(self) -> Tensor:
        """Where a message goes."""
        return torch.empty(self.shape)

    def wait(
        self,
        *,
        send: tuple[Tensor | None, int] = (None, 0),
        receive: tuple[Tensor | None, int] = (None, 0),
    ) -> None:
        """Sends and receives, and waits for both."""
        pairs: list[tuple[Any, tuple[Tensor | None, int]]] = [
            (dist.isend, send),
            (dist.irecv, receive),
        ]
        ops = [dist.P2POp(call, x.contiguous(), to) for call, (x, to) in pairs if x is not None]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def reduce_gradients(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """The mean over dp, in one collective."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, mean in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))


def build(training: Training, form: str, rank: int) -> Contestant:
    """The part on this rank, for "none", "full" or "selective" recomputation."""
    mesh = init_device_mesh(
        "cpu", (training.dp, training.pp, training.tp), mesh_dim_names=("dp", "pp", "tp")
    )
    tp = TensorParallel(mesh.get_group("tp"), training.tp_rank(rank), training.tp)
    model = training.model()
    place = training.pp_rank(rank)
    which = cut(training.layers, training.pp, head_layers(model))[place]
    part = Part(model, which, tp, form, first=place == 0, last=place == training.pp - 1)
    optimizer = adamw(part.parameters())
    pipeline = Pipeline(part, training, rank)
    parameters = list(part.parameters())

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        pipeline.step(batch)
        if training.dp > 1:
            reduce_gradients(parameters, mesh.get_group("dp"))
        optimizer.step()

    return Contestant(step, lambda: gathered(dict(part.whole()), training, rank))
