"""What is known of a batch before its step runs: computed by every rank, over all dp ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from merakc.ir.batches import BatchLayout, Known
from merakc.ir.graph import InputKind
from merakc.passes.pipeline import differentiate
from merakc.runtime.codegen import compile_graph
from merakc.runtime.head import HeadRunner

Tensors = dict[str, torch.Tensor]


class Knowledge:
    """Runs a `Known` on batches that lie as `layout` says; `group` joins the dp ranks.

    `state` gives the buffers that it reads, whole, by the names of the model; collective over tp.
    """

    def __init__(
        self,
        known: Known,
        layout: BatchLayout,
        state: Callable[[str], torch.Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.known, self.layout, self.state = known.without_nodes(), layout, state
        self.part = compile_graph(known.part, device)
        constants = {name: c.to(device) for name, c in known.part.constants.items()}
        self.given = [
            (i.kind is InputKind.BATCH, i.target, constants.get(i.name)) for i in known.part.inputs
        ]
        self.whole = HeadRunner(
            known.whole, differentiate(known.whole.graph), layout, device, group
        )
        self.whole.let_go()

    def run(self, batches: Sequence[Tensors]) -> Tensors:
        """The values of the whole batch, by name, from this rank's micro-batches; collective."""
        return self.whole.run(self.whole.whole(self.parts(batches)), {}, 1.0).results

    def parts(self, batches: Sequence[Tensors]) -> dict[str, list[torch.Tensor]]:
        """What this rank's micro-batches say, by name; collective over tp alone."""
        parts: dict[str, list[torch.Tensor]] = {s.name: [] for s in self.known.whole.waist}
        state = {
            t: self.state(t)
            for of_batch, t, constant in self.given
            if constant is None and not of_batch
        }
        for batch in batches:
            inputs = [
                (batch if of_batch else state)[t] if constant is None else constant
                for of_batch, t, constant in self.given
            ]
            outs = self.part(inputs)
            for share, value in zip(self.known.part.outputs, outs, strict=True):
                parts[share.name].append(value)
        return parts

    def of_part(self, values: Mapping[str, torch.Tensor], micro_batch: int) -> Tensors:
        """What one micro-batch of this rank sees of them."""
        layout = self.layout
        return {
            name: value
            if (rows := self.known.rows[name]) is None
            else rows.take(value, layout.first(micro_batch), layout.each)
            for name, value in values.items()
        }
