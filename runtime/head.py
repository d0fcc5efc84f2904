"""What couples the samples of a batch: run once a step, on what all parts of the batch hand over.

Every tp and dp rank of a pipeline rank runs it on the same values, and so makes the same gradients,
of which each part takes its own: those of its rows, those of sums whole, and of what is the same in
all parts its share, so that the parts' gradients add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from merakc.ir.batches import BatchLayout, Head, Share, ShareKind
from merakc.ir.graph import Input, InputKind, OutputKind
from merakc.ir.program import StageGraphs
from merakc.kernels.collectives import gather_into
from merakc.runtime.codegen import NO_HOOKS, compile_graph
from merakc.runtime.fused import Fuser
from merakc.runtime.pieces import Compiler

Tensors = dict[str, torch.Tensor]
# Where the values of a message begin: no dtype has larger elements.
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The loss and the other results of the whole batch; the gradients of each micro-batch of this
    rank, by the names of the waist.
    """

    loss: torch.Tensor | None
    results: Tensors
    gradients: list[Tensors]


class HeadRunner:
    """Runs a `Head` again and again, compiled from its `chunk`, on the parts of a batch.

    `group` joins the dp ranks of which `layout` has the samples. With a `fuser` the graphs are
    fused, `compiler` compiles them.
    """

    def __init__(
        self,
        head: Head,
        chunk: StageGraphs,
        layout: BatchLayout,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        fuser: Fuser | None = None,
        compiler: Compiler = compile_graph,
    ) -> None:
        assert (group is None) is (len(layout.sizes) == 1), "dp ranks without a group, or one alone"
        self.head, self.chunk, self.layout = head, chunk, layout
        self.device, self.group = device, group
        graphs = [g for g in (chunk.forward, chunk.backward) if g is not None]
        read = [{i.key for g in graphs[k:] for i in g.inputs} for k in range(1, len(graphs) + 1)]
        self.graphs = [
            (g, compiler(fuser.fuse(g) if fuser else g, device, NO_HOOKS), later)
            for g, later in zip(graphs, read, strict=True)
        ]
        self.constants = {
            name: c.to(device) for g in graphs for name, c in g.constants.items()
        }  # fmt: skip
        waist = {share.name for share in head.waist}
        self.brought = tuple(
            i for i in chunk.forward.inputs if i.name not in self.constants and i.name not in waist
        )

    def let_go(self) -> None:
        """Lets go of the graphs, but for what goes in and comes out."""
        self.chunk = StageGraphs(self.chunk.forward.without_nodes(), None)
        self.head = replace(self.head, graph=self.head.graph.without_nodes())
        self.graphs = [(g.without_nodes(), run, later) for g, run, later in self.graphs]

    def run(
        self, waist: Tensors, known: Mapping[str, torch.Tensor], loss_scale: float
    ) -> HeadResult:
        """`waist`, which is emptied, is that of the whole batch, `known` what else is read, by the
        names of its inputs. Gradients are of the loss times `loss_scale`.
        """
        values = waist | {i.name: known[i.name] for i in self.brought}
        waist.clear()
        found: dict[tuple[OutputKind, str], torch.Tensor] = {}
        for graph, run, later in self.graphs:
            given = [self._given(i, values, loss_scale) for i in graph.inputs]
            values = {name: v for name, v in values.items() if name in later}
            outs = run(given)
            values |= {o.name: v for o, v in zip(graph.outputs, outs, strict=True)
                       if o.kind is OutputKind.SAVED}  # fmt: skip
            found |= {(o.kind, o.name): v for o, v in zip(graph.outputs, outs, strict=True)
                      if o.kind is not OutputKind.SAVED}  # fmt: skip
            del outs
        loss = next((v for (kind, _), v in found.items() if kind is OutputKind.LOSS), None)
        results = {name: v for (kind, name), v in found.items() if kind is OutputKind.RESULT}
        gradients = {name: v for (kind, name), v in found.items() if kind is OutputKind.GRADIENT}
        return HeadResult(loss, results, self._parted(gradients))

    def _given(self, item: Input, values: Tensors, loss_scale: float) -> torch.Tensor:
        if item.kind is InputKind.TANGENT:
            shape, dtype = item.spec.shape, item.spec.dtype
            return torch.full(shape, loss_scale, dtype=dtype, device=self.device)
        return values[item.key] if item.key in values else self.constants[item.name]

    def whole(self, parts: dict[str, list[torch.Tensor]]) -> Tensors:
        """The waist of the whole batch, from that of this rank's micro-batches, which is taken.
        Collective over dp.

        One message has it all, as bytes: sums are added up in the order of ranks, everywhere alike.
        """
        own = {s.name: _joined(s, parts.pop(s.name)) for s in self.head.waist}
        moved = [s for s in self.head.waist if s.kind is not ShareKind.CONSTANT]
        if self.group is None or not moved:
            return own
        ends = [self._spans(moved, rank)[1] for rank in range(len(self.layout.sizes))]
        size = max(ALIGNED_BYTES, *ends)  # of no tokens there is nothing to tell
        sent = torch.zeros(size, dtype=torch.uint8, device=self.device)
        for place, share in zip(self._places(moved, sent, self.layout.dp_rank), moved, strict=True):
            place.copy_(own.pop(share.name))
        come = sent.new_empty(len(self.layout.sizes) * size)
        gather_into(come, sent, self.group).wait()
        ranks = [list(self._places(moved, c, r)) for r, c in enumerate(come.view(-1, size))]
        return own | {s.name: _joined(s, [r[k] for r in ranks]) for k, s in enumerate(moved)}

    def _spans(self, shares: Sequence[Share], rank: int) -> tuple[list[int], int]:
        """Where the values of a dp rank begin in its message, in bytes, and where that ends."""
        starts, end = [], 0
        for share in shares:
            starts.append(end)
            size_bytes = math.prod(self._shape(share, rank)) * share.spec.dtype.itemsize
            end += -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return starts, end

    def _places(
        self, shares: Sequence[Share], message: torch.Tensor, rank: int
    ) -> Iterator[torch.Tensor]:
        """The values in the message of a dp rank."""
        for share, start in zip(shares, self._spans(shares, rank)[0], strict=True):
            shape, dtype = self._shape(share, rank), share.spec.dtype
            yield message[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _shape(self, share: Share, rank: int) -> tuple[int, ...]:
        """Of a dp rank's value."""
        shape = share.spec.shape
        return share.rows.sized(shape, self.layout.sizes[rank]) if share.rows else shape

    def _parted(self, gradients: Mapping[str, torch.Tensor]) -> list[Tensors]:
        """The gradients of each micro-batch of this rank."""
        layout, shared = self.layout, dict(gradients)
        rows = {s.name: s.rows for s in self.head.waist if s.rows and s.name in gradients}
        for share in self.head.waist:
            if share.kind is ShareKind.CONSTANT and share.name in gradients:
                shared[share.name] = gradients[share.name] * layout.share
        return [
            {
                name: rows[name]
                .take(value, layout.first(j), layout.each)
                .clone(
                    memory_format=torch.contiguous_format
                )  # the whole gradient is not kept for a part's
                if name in rows
                else value.contiguous()
                for name, value in shared.items()
            }
            for j in range(layout.micro_batches)
        ]


def _joined(share: Share, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A value of the waist, from those of parts in their order."""
    if share.rows is not None:
        return share.rows.join(parts)
    if share.kind is ShareKind.CONSTANT:
        return parts[0]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
