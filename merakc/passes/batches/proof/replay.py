"""A step in parts on real tensors, in one process: what tests and certificates compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from merakc.ir.batches import BatchSplit, Rows, Share, ShareKind
from merakc.ir.graph import Graph, Input, InputKind, OutputKind
from merakc.passes.autodiff.interpret import interpret

Tensors = Mapping[str, torch.Tensor]


def replay(
    splits: Sequence[BatchSplit],
    sizes: Sequence[int],
    state: Tensors,
    batch: Tensors,
    sampled: Mapping[str, Rows],
    seed: int = 0,
) -> torch.Tensor:
    """The loss of the whole batch, as parts of these sizes give it.

    `splits[k]` is the step of part k; `state` holds parameters and buffers by name, `batch` the
    tensors of the whole batch. The loss can be differentiated.
    """
    firsts = [sum(sizes[:k]) for k in range(len(sizes))]
    known: dict[str, torch.Tensor] = {}

    def given(item: Input, k: int | None) -> torch.Tensor:
        if item.kind is InputKind.SCALAR:
            first = 0 if k is None else firsts[k]
            return torch.tensor(seed if item.target == "seed" else first)
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return state[item.target]
        value, rows = batch.get(item.target), sampled.get(item.target)
        if item.target in known:
            value, rows = known[item.target], known_rows[item.target]
        assert value is not None, item
        return value if rows is None or k is None else rows.take(value, firsts[k], sizes[k])

    def outputs(graph: Graph, k: int) -> Tensors:
        inputs = {i.name: given(i, k) for i in graph.inputs if i.name not in graph.constants}
        return dict(zip((o.name for o in graph.outputs), interpret(graph, inputs), strict=True))

    known_rows: dict[str, Rows | None] = {}
    before = splits[0].known
    if before is not None:
        own = [outputs(s.known.part, k) for k, s in enumerate(splits) if s.known is not None]
        together = {s.name: joined(s, [p[s.name] for p in own], sizes) for s in before.whole.waist}
        names = [o.name for o in before.whole.graph.outputs]
        known = dict(zip(names, interpret(before.whole.graph, together), strict=True))
        known_rows = dict(before.rows)
    found = [outputs(s.graph, k) for k, s in enumerate(splits)]
    head = splits[0].head
    if head is None:
        (loss,) = [o.name for o in splits[0].graph.outputs if o.kind is OutputKind.LOSS]
        return torch.stack([f[loss].sum() for f in found]).sum()
    inputs = {s.name: joined(s, [f[s.name] for f in found], sizes) for s in head.waist}
    inputs |= {i.name: given(i, None) for i in head.graph.inputs if i.name not in inputs}
    results = dict(zip(head.graph.outputs, interpret(head.graph, inputs), strict=True))
    (total,) = [x for o, x in results.items() if o.kind is OutputKind.LOSS]
    loss_of_head: torch.Tensor = total.sum()
    return loss_of_head


def joined(share: Share, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The value of the whole batch from those of its parts, of so many samples each."""
    if share.kind is ShareKind.ROWS:
        assert share.rows is not None
        return share.rows.join(parts)
    if share.kind is ShareKind.SUM:
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    if not parts[0].is_floating_point():
        return parts[0]
    total = sum(sizes)
    return torch.stack([p * (n / total) for p, n in zip(parts, sizes, strict=True)]).sum(0)
