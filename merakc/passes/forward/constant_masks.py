"""Attention masks that depend on nothing but their shape: recognised as causal, or as none at all.

Models that are traced write such masks out, and kernels that know of a causal mask do half of the
work and read none. Of a mask in which each row sees one run of columns, these are told from its
vectors (`mask_intervals.py`). Any other is looked at in blocks of rows, whose ops are computed one
block at a time: a mask of long sequences would not fit the memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.kernels.ops import resolve_op
from merakc.passes.forward.fixed_values import MOST_ELEMENTS, FixedValues, tags
from merakc.passes.forward.mask_intervals import AND, RunReader, Runs

ATTENTION = "merakc.attention.default"
MASK, CAUSAL, WITHIN = 3, 4, 8  # places among its arguments
EXPAND, UNSQUEEZE = "aten.expand.default", "aten.unsqueeze.default"


def with_known_masks(graph: Graph) -> Graph:
    """The same function, whose attentions are told of masks that are causal, or that hide nothing,
    and of others how far rows see at most.

    A mask of floats is causal where it is 0 for what is seen and so low elsewhere that nothing of
    it is left.
    """
    masks, specs = _Masks(graph), graph.specs()
    told: dict[Ref, str] = {}
    nodes = []
    for node in graph.nodes:
        mask = node.args[MASK] if node.op == ATTENTION and len(node.args) > CAUSAL else None
        if isinstance(mask, Ref):
            if mask not in told:
                told[mask] = masks.kind(mask)
            is_row = (
                told[mask] == "causal" and specs[mask].shape[-2] != specs[node.args[0]].shape[-2]
            )
            if told[mask] and not is_row:  # one row for all queries is that of the first alone
                causal = node.args[CAUSAL] or told[mask] == "causal"
                args = (*node.args[:MASK], None, causal, *node.args[CAUSAL + 1 :])
                node = replace(node, args=args)
            elif (within := masks.within(mask)) and len(node.args) < WITHIN and not node.kwargs:
                rest = (0, None)[len(node.args) - WITHIN :]  # no start, no sink
                node = replace(node, args=(*node.args, *rest, within))
        nodes.append(node)
    if not any(told.values()):
        return graph.with_nodes(nodes) if tuple(nodes) != graph.nodes else graph
    return replace(graph, nodes=tuple(nodes)).pruned()


class _Masks:
    """The values of a graph that follow from constants, where they are needed."""

    def __init__(self, graph: Graph) -> None:
        self.specs, self.fixed = graph.specs(), FixedValues(graph)
        self.nodes = self.fixed.nodes
        self.runs = RunReader(self.nodes, self.specs, self.fixed.whole, _is_spread)

    def within(self, mask: Ref) -> tuple[int, int] | None:
        """How many columns before it a row sees at most, and how many behind, where there are as
        many of both; None where nothing is known of it.
        """
        shape, runs = self.specs[mask].shape, self.bound(mask)
        if runs is None or shape[-2:] != (runs.columns, runs.columns):
            return None
        rows = torch.arange(runs.columns)
        starts, ends = (x.expand(runs.columns) for x in (runs.starts, runs.ends))
        sees = starts < ends
        before, behind = (rows - starts)[sees], (ends - 1 - rows)[sees]
        if not len(before):
            return 0, 0
        return max(int(before.max()), 0), max(int(behind.max()), 0)

    def bound(self, mask: Ref) -> Runs | None:
        """What each row sees at most: of what is seen where several masks see it, what those do
        that follow from constants.
        """
        node, spec = self.nodes.get(mask.node), self.specs[mask]
        if mask.node in self.fixed.names:
            return self.runs.seen(mask) if self._is_one(mask) else None
        if node is None or spec.dtype != torch.bool or not _is_spread(node):
            return None
        if node.op not in (EXPAND, UNSQUEEZE) and node.op.split(".")[1] not in AND:
            return None
        found: Runs | None = None
        for ref in node.refs:
            if self.specs[ref].shape[-1:] == spec.shape[-1:] and (own := self.bound(ref)):
                found = own if found is None else found.both(own)
        return found

    def _is_one(self, mask: Ref) -> bool:
        """Whether the mask has rows and columns, and is the same along all other dims."""
        shape = self.specs[mask].shape
        if len(shape) < 2 or 0 in shape:
            return False
        return all(self._is_alike(mask, dim) for dim, n in enumerate(shape[:-2]) if n > 1)

    def kind(self, mask: Ref) -> str:
        """What a mask is: "causal", "none" where all is seen, "" for any other."""
        if mask.node not in self.fixed.names or not self._is_one(mask):
            return ""
        rows, columns = self.specs[mask].shape[-2:]
        runs = self.runs.seen(mask)
        if runs is not None:
            return runs.kind(rows)
        height = max(1, min(rows, MOST_ELEMENTS // columns))
        kinds = {"causal", "none"}
        for first in range(0, rows, height):
            own = self._block(mask, len(self.specs[mask].shape), first, min(first + height, rows))
            if own is None:
                return ""
            seen = _seen(own.reshape(-1, columns))
            if seen is None:
                return ""
            future = torch.arange(columns) > torch.arange(first, first + len(seen))[:, None]
            if not seen.all():
                kinds.discard("none")
            if not torch.equal(seen, ~future):
                kinds.discard("causal")
            if not kinds:
                return ""
        return sorted(kinds)[-1]

    def _is_alike(self, ref: Ref, dim: int) -> bool:
        """Whether a value is the same all along a dim, as seen on what it is computed from."""
        place = dim - len(self.specs[ref].shape)
        stack, known = [ref], set()
        while stack:
            now = stack.pop()
            shape = self.specs[now].shape
            if now in known or -place > len(shape) or shape[place] == 1:
                continue
            known.add(now)
            node, value = self.nodes.get(now.node), self.fixed.whole(now)
            if value is None and node is not None and _is_spread(node):
                stack.extend(node.refs)
                continue
            if value is None or not torch.equal(value, value.narrow(place, 0, 1).expand_as(value)):
                return False
        return True

    def _block(self, ref: Ref, dims: int, first: int, last: int) -> torch.Tensor | None:
        """Some rows of the first of a value's outer indices; of `dims` dims, or fewer."""
        node = self.nodes.get(ref.node)
        if node is None or not _is_spread(node):
            value = self.fixed.whole(ref)
            if value is None or value.dim() < 2:
                return value
            value = value.narrow(-2, first, last - first) if value.shape[-2] > 1 else value
            for dim in range(value.dim() - 2):
                value = value.narrow(dim, 0, 1)
            return value
        parts = {r: self._block(r, dims, first, last) for r in node.refs}
        if any(part is None for part in parts.values()):
            return None
        if node.op == UNSQUEEZE:
            return parts[node.refs[0]]
        if node.op == EXPAND:
            (part,) = parts.values()
            assert part is not None
            rows, columns = self.specs[ref].shape[-2:]
            height = last - first if rows > 1 else 1
            return part.expand(*part.shape[:-2], height, columns) if part.dim() > 1 else part
        args = map_refs(node.args, parts.__getitem__)
        kwargs = {k: map_refs(v, parts.__getitem__) for k, v in node.kwargs}
        found: torch.Tensor = resolve_op(node.op)(*args, **kwargs)
        return found


def _is_spread(node: Node) -> bool:
    """Whether each element of the result follows from those of the arguments at its place, counted
    from the last dim.
    """
    if node.op == UNSQUEEZE:
        rank = len(node.spec.shape)
        return bool(node.args[1] % rank < rank - 2)
    return node.op == EXPAND or torch.Tag.pointwise in tags(node)


def _seen(block: torch.Tensor) -> torch.Tensor | None:
    """What may be attended; None where a mask of floats does something else."""
    if block.dtype == torch.bool:
        return block
    seen = block == 0
    lowest = torch.finfo(block.dtype).min / 2
    return seen if bool((seen | (block <= lowest)).all()) else None
