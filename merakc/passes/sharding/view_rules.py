"""The sharding rules of views and of parts of dims: their dims, in terms of their arguments'."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch

from merakc.ir.graph import Node, Ref
from merakc.passes.sharding.dims import (
    Dims,
    argument,
    broadcast,
    broadcast_dims,
    given,
    need_whole,
    opaque,
)
from merakc.passes.sharding.factors import (
    Dim,
    Factor,
    block,
    leaves,
    new_dim,
    piece,
    regroup,
    segments_of,
    size,
    unify,
)


def _reshape(dims: Dims, node: Node) -> None:
    own = dims.of[node.refs[0]]
    found = regroup(own, node.spec.shape)
    if found is None and not node.spec.numel:  # nothing lies as one likes
        dims.put(node, [new_dim(n) for n in node.spec.shape])
    else:
        dims.put(node, found or _by_groups(own, node))


def _by_groups(own: list[Dim], node: Node) -> list[Dim]:
    """The dims of a reshape, where only neighbours that do not divide are needed whole."""
    why = f"{node.op} at {node.source}"
    found: list[Dim] = []
    rest, shape = list(own), list(node.spec.shape)
    while rest or shape:
        into, out = rest[:1], shape[:1]
        del rest[:1], shape[:1]
        while (have := math.prod(map(size, into))) != (want := math.prod(out)):
            if have < want:
                into.append(rest.pop(0))
            else:
                out.append(shape.pop(0))
        made = regroup(into, tuple(out))
        if made is None:
            for dim in into:
                block(dim, why)
            made = [new_dim(n, why) for n in out]
        found += made
    return found


def _expand(dims: Dims, node: Node) -> None:
    own, shape = dims.of[node.refs[0]], node.spec.shape
    new = len(shape) - len(own)
    out = [new_dim(s) for s in shape[:new]]
    for dim, full in zip(own, shape[new:], strict=True):
        out.append(dim if size(dim) == full else new_dim(full))
    dims.put(node, out)


def _transpose(dims: Dims, node: Node) -> None:
    out = list(dims.of[node.refs[0]])
    a, b = node.args[1:3]
    out[a], out[b] = out[b], out[a]
    dims.put(node, out)


def _permute(dims: Dims, node: Node) -> None:
    own = dims.of[node.refs[0]]
    dims.put(node, [own[k] for k in node.args[1]])


def _t(dims: Dims, node: Node) -> None:
    dims.put(node, dims.of[node.refs[0]][::-1])


def _unsqueeze(dims: Dims, node: Node) -> None:
    out = list(dims.of[node.refs[0]])
    out.insert(node.args[1] % (len(out) + 1), [])
    dims.put(node, out)


def _squeeze(dims: Dims, node: Node) -> None:
    own = dims.of[node.refs[0]]
    named = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    gone = {k % len(own) for k in named}
    dims.put(node, [d for k, d in enumerate(own) if k not in gone or size(d) != 1])


def _slice(dims: Dims, node: Node) -> None:
    out = list(dims.of[node.refs[0]])
    dim = argument(node, 1, "dim", 0) % len(out)
    full, length = size(out[dim]), node.spec.shape[dim]
    if length != full:
        why = f"a slice at {node.source}"
        start = _from_front(argument(node, 2, "start"), full)
        one_by_one = argument(node, 4, "step", 1) == 1
        part = piece(out[dim], start, start + length) if one_by_one and length else None
        if part is None:
            block(out[dim], why)
            part = new_dim(length, why)
        out[dim] = part
    dims.put(node, out)


def _from_front(start: int | None, full: int) -> int:
    return 0 if start is None else max(start + full, 0) if start < 0 else start


def _select(dims: Dims, node: Node) -> None:
    out = list(dims.of[node.refs[0]])
    dim = argument(node, 1, "dim", 0) % len(out)
    need_whole(out[dim], node)
    del out[dim]
    for index in range(len(node.outputs)):
        dims.put(node, out, index)


def _index(dims: Dims, node: Node) -> None:
    """Dims that tensors of integers pick from; the other dims stay."""
    found = _picked(dims, node)
    if found is None:
        opaque(dims, node)
    else:
        before, chosen, after = found
        dims.put(node, [*before, *chosen, *after])


def _picked(dims: Dims, node: Node) -> tuple[list[Dim], list[Dim], list[Dim]] | None:
    """The dims of `x[indices]`: before, in the place of, and behind the dims picked from.

    Where these are no neighbours, torch puts what they become first. None where a mask picks.
    """
    own = dims.of[node.args[0]]
    picked = [k for k, index in enumerate(node.args[1]) if index is not None]
    indices = [node.args[1][k] for k in picked]
    if not picked or any(dims.dtypes[r] in (torch.bool, torch.uint8) for r in indices):
        return None
    for k in picked:
        need_whole(own[k], node)
    owns = [dims.of[r] for r in indices]
    chosen = broadcast_dims(owns, max(map(len, owns)))
    first, last = picked[0], picked[-1]
    if picked != list(range(first, last + 1)):
        return [], chosen, [d for k, d in enumerate(own) if k not in picked]
    return own[:first], chosen, own[last + 1 :]


def _index_put(dims: Dims, node: Node) -> None:
    """The values are those of `x[indices]`; which places they go to is needed whole."""
    found = _picked(dims, node)
    if found is None:
        opaque(dims, node)
        return
    before, chosen, after = found
    for dim in chosen:
        need_whole(dim, node)
    values, places = dims.of[node.args[2]], [*before, *chosen, *after]
    broadcast_dims([places, values], len(places))
    dims.put(node, list(dims.of[node.args[0]]))


def _index_select(dims: Dims, node: Node) -> None:
    out = list(dims.of[node.args[0]])
    (index,) = dims.of[given(node, "index")] or [[]]
    if not out:
        dims.put(node, out)
        return
    dim = given(node, "dim") % len(out)
    need_whole(out[dim], node)
    out[dim] = index
    dims.put(node, out)


def _select_scatter(dims: Dims, node: Node) -> None:
    own = dims.of[node.args[0]]
    dim = given(node, "dim") % len(own)
    need_whole(own[dim], node)
    rest = [d for k, d in enumerate(own) if k != dim]
    for first, second in zip(rest, dims.of[given(node, "src")], strict=True):
        unify(first, second)
    dims.put(node, list(own))


def _diagonal(dims: Dims, node: Node) -> None:
    own = dims.of[node.args[0]]
    gone = {given(node, name) % len(own) for name in ("dim1", "dim2")}
    for k in gone:
        need_whole(own[k], node)
    rest = [d for k, d in enumerate(own) if k not in gone]
    dims.put(node, [*rest, new_dim(node.spec.shape[-1], node.op)])


def _unfold(dims: Dims, node: Node) -> None:
    """Windows along one dim: how many stays in its place, the window comes last."""
    out = list(dims.of[node.args[0]])
    dim = given(node, "dimension") % max(len(out), 1)
    if not out:
        opaque(dims, node)
        return
    need_whole(out[dim], node)
    out[dim] = new_dim(node.spec.shape[dim], node.op)
    dims.put(node, [*out, new_dim(node.spec.shape[-1], node.op)])


def _glu(dims: Dims, node: Node) -> None:
    """The two halves of a dim, each with the result's dims."""
    out = list(dims.of[node.refs[0]])
    dim = given(node, "dim") % len(out)
    half = new_dim(node.spec.shape[dim])
    unify(out[dim], [*new_dim(2, node.op), *half])
    out[dim] = half
    dims.put(node, out)


def _repeat(dims: Dims, node: Node) -> None:
    """Each dim becomes its copies times itself; new dims are copies alone."""
    own, copies = dims.of[node.refs[0]], node.args[1]
    new = len(copies) - len(own)
    padded: list[Dim] = [[] for _ in range(new)] + list(own)
    dims.put(node, [[*new_dim(c), *dim] for c, dim in zip(copies, padded, strict=True)])


def _view_as_real(dims: Dims, node: Node) -> None:
    dims.put(node, [*dims.of[node.refs[0]], new_dim(2, node.op)])


def _view_as_complex(dims: Dims, node: Node) -> None:
    *out, parts = dims.of[node.refs[0]]
    need_whole(parts, node)
    dims.put(node, out)


def _split(dims: Dims, node: Node) -> None:
    own = dims.of[node.refs[0]]
    dim = argument(node, 2, "dim", 0) % len(own)
    sizes = [spec.shape[dim] for spec in node.outputs if spec is not None]
    ends = list(accumulate(sizes))
    why = f"a split at {node.source}"
    if len(set(sizes)) == 1:
        outer, inner = Factor(len(sizes), why), new_dim(sizes[0])
        unify(own[dim], [outer, *inner] if len(sizes) > 1 else inner)
        parts = [inner] * len(sizes)
    else:
        pieces = [piece(own[dim], e - s, e) if s else [] for e, s in zip(ends, sizes, strict=True)]
        parts = [p for p in pieces if p is not None]
        if len(parts) < len(pieces):
            block(own[dim], why)
            parts = [new_dim(s, why) for s in sizes]
    for index, part in enumerate(parts):
        dims.put(node, [*own[:dim], part, *own[dim + 1 :]], index)


def _cat(dims: Dims, node: Node) -> None:
    """The parts are segments of the joined dim, split each on its own."""
    refs = [r for r in node.args[0] if math.prod(dims.shapes[r])] or list(node.args[0])[:1]
    dim = given(node, "dim") % len(node.spec.shape)
    out = list(dims.of[refs[0]])
    for ref in dict.fromkeys(node.args[0]):  # of what is empty too, but for the legacy `[0]`
        for k, other in enumerate(dims.of[ref]):
            if k != dim and len(dims.shapes[ref]) == len(out):
                unify(out[k], other)
    if len(refs) > 1:
        joined = Factor(node.spec.shape[dim])
        joined.segments = [s for ref in refs for s in _segments(dims.of[ref][dim])]
        out[dim] = [joined]
    dims.put(node, out)


def _segments(dim: Dim) -> list[Dim]:
    own = leaves(dim)
    return segments_of(own[0]) if len(own) == 1 else [own]


def _stack(dims: Dims, node: Node) -> None:
    refs = node.args[0]
    out = broadcast(dims, list(refs), dims.shapes[refs[0]])
    dim = argument(node, 1, "dim", 0) % len(node.spec.shape)
    out.insert(dim, new_dim(len(refs), f"a stack at {node.source}"))
    dims.put(node, out)


def _pad(dims: Dims, node: Node) -> None:
    """Padded at both ends, dims from the last on; one cut as much as it is padded is shifted."""
    out = list(dims.of[node.refs[0]])
    ends = node.args[1]
    for k, full in enumerate(reversed(node.spec.shape), start=1):
        if any(ends[2 * k - 2 : 2 * k]):
            need_whole(out[-k], node)
            out[-k] = new_dim(full, node.op)
    dims.put(node, out)


def _fresh(dims: Dims, node: Node) -> None:
    for index in range(len(node.outputs)):
        dims.fresh(Ref(node.name, index))


VIEW_RULES: dict[str, Callable[[Dims, Node], None]] = {
    "cat": _cat,
    "diagonal": _diagonal,
    "expand": _expand,
    "fresh": _fresh,
    "glu": _glu,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "pad": _pad,
    "permute": _permute,
    "repeat": _repeat,
    "reshape": _reshape,
    "select": _select,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
}
