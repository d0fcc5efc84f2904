"""The sharding rules that are no einsum: each op's dims, in terms of its arguments' dims."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from merakc.ir.graph import Node, Ref
from merakc.passes.dims import Dims, argument, broadcast, opaque
from merakc.passes.factors import Dim, Factor, block, new_dim, piece, regroup, size, unify


def _addmm(dims: Dims, node: Node) -> None:
    bias, x, w = (dims.of[a] for a in node.args[:3])
    unify(x[1], w[0])
    out = [x[0], w[1]]
    for dim, target in zip(reversed(bias), reversed(out), strict=False):
        if size(dim) > 1:
            unify(dim, target)
    dims.put(node, out)
    dims.summed[node.name] = [x[1]]


def _matmul(dims: Dims, node: Node) -> None:
    x, y = (dims.of[a] for a in node.args[:2])
    if len(x) < 2 or len(y) < 2:
        opaque(dims, node)
        return
    unify(x[-1], y[-2])
    dims.summed[node.name] = [x[-1]]
    lead: list[Dim] = []
    rank = max(len(x), len(y)) - 2
    for k in range(-rank - 2, -2):
        a = x[k] if -k <= len(x) else []
        b = y[k] if -k <= len(y) else []
        if size(a) > 1 and size(b) > 1:
            unify(a, b)
        lead.append(a if size(a) > 1 else b)
    dims.put(node, [*lead, x[-2], y[-1]])


def _attention(dims: Dims, node: Node) -> None:
    query, key, value = (dims.of[a] for a in node.args[:3])
    for first, second in ((query[0], key[0]), (key[0], value[0]), (key[1], value[1])):
        unify(first, second)
    heads, groups = size(query[1]), size(key[1])
    if heads == groups:
        unify(query[1], key[1])
    elif groups > 1:
        shared, repeats = Factor(groups), Factor(heads // groups)
        unify(query[1], [shared, repeats])
        unify([shared], key[1])
    unify(key[2], value[2])
    unify(query[3], key[3])
    for dim in (query[2], key[2], query[3]):
        block(dim, node.op)
    if isinstance(node.args[3], Ref):
        mask = dims.of[node.args[3]]
        scores = [query[0], query[1], query[2], key[2]]
        for dim, target in zip(reversed(mask), reversed(scores), strict=False):
            if size(dim) > 1:
                unify(dim, target)
    dims.put(node, [query[0], query[1], query[2], value[3]])
    dims.put(node, query[:3], 1)


def _convolution(dims: Dims, node: Node) -> None:
    x, w = dims.of[node.args[0]], dims.of[node.args[1]]
    groups = node.args[8]
    spec = node.spec
    for dim in (*x[2:], *w[2:]):
        block(dim, node.op)
    spatial = [new_dim(s, node.op) for s in spec.shape[2:]]
    if groups > 1 or node.args[6]:
        for dim in (x[1], w[0], w[1]):
            block(dim, "grouped or transposed convolution")
        out = new_dim(spec.shape[1], "grouped or transposed convolution")
    else:
        unify(x[1], w[1])
        dims.summed[node.name] = [x[1]]
        out = w[0]
    if isinstance(node.args[2], Ref):
        unify(dims.of[node.args[2]][0], out)
    dims.put(node, [x[0], out, *spatial])


def _embedding(dims: Dims, node: Node) -> None:
    table, ids = dims.of[node.args[0]], dims.of[node.args[1]]
    if argument(node, 3, "scale_grad_by_freq", False):
        block(table[0], "embedding with gradients scaled by frequency")
    dims.put(node, [*ids, table[1]])
    dims.summed[node.name] = [table[0]]


def _cross_entropy(dims: Dims, node: Node) -> None:
    logits, target = dims.of[node.args[0]], dims.of[node.args[1]]
    weight = argument(node, 2, "weight")
    classes = logits[1] if len(logits) > 1 else logits[0]
    if weight is not None or len(target) == len(logits) or len(logits) != 2:
        block(classes, "cross-entropy with class weights, class probabilities or extra dims")
    else:
        unify(logits[0], target[0])
        dims.summed[node.name] = [classes]
    for dim in (*logits[:1], *logits[2:], *target):
        if dim is not classes:
            block(dim, "the samples of a loss")
    dims.fresh(Ref(node.name), "a loss")


def _norm(dims: Dims, node: Node) -> None:
    x = dims.of[node.args[0]]
    normalised = x[-len(node.args[1]) :]
    for dim in normalised:
        block(dim, node.op)
    for arg in node.args[2:4]:
        if isinstance(arg, Ref):
            for own, dim in zip(dims.of[arg], normalised, strict=True):
                unify(own, dim)
    dims.put(node, list(x))


def _batch_norm(dims: Dims, node: Node) -> None:
    x = dims.of[node.args[0]]
    for k, dim in enumerate(x):
        if k != 1:
            block(dim, node.op)
    for arg in node.args[1:5]:
        if isinstance(arg, Ref):
            unify(dims.of[arg][0], x[1])
    dims.put(node, list(x))


def _reshape(dims: Dims, node: Node) -> None:
    own = dims.of[node.refs[0]]
    found = regroup(own, node.spec.shape)
    if found is None:
        opaque(dims, node)
    else:
        dims.put(node, found)


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
    block(out[dim], f"an index at {node.source}")
    del out[dim]
    for index in range(len(node.outputs)):
        dims.put(node, out, index)


def _index(dims: Dims, node: Node) -> None:
    """Neighbouring dims that tensors of integers pick from; the other dims stay."""
    own = dims.of[node.args[0]]
    picked = [k for k, index in enumerate(node.args[1]) if index is not None]
    indices = [node.args[1][k] for k in picked]
    if picked != list(range(picked[0], picked[-1] + 1)):
        opaque(dims, node)
        return
    for k in picked:
        block(own[k], f"an index at {node.source}")
    ranks = [len(dims.shapes[r]) for r in indices]
    shape = node.spec.shape[picked[0] : picked[0] + max(ranks)]
    out = broadcast(dims, indices, shape)
    dims.put(node, [*own[: picked[0]], *out, *own[picked[-1] + 1 :]])


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
    refs = [r for r in node.args[0] if math.prod(dims.shapes[r])]
    dim = argument(node, 1, "dim", 0) % len(node.spec.shape)
    out = list(dims.of[refs[0]])
    for ref in refs:
        own = dims.of[ref]
        block(own[dim], f"a concatenation at {node.source}")
        for k, other in enumerate(own):
            if k != dim:
                unify(out[k], other)
    out[dim] = new_dim(node.spec.shape[dim], f"a concatenation at {node.source}")
    dims.put(node, out)


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
            block(out[-k], node.op)
            out[-k] = new_dim(full, node.op)
    dims.put(node, out)


def _fresh(dims: Dims, node: Node) -> None:
    for index in range(len(node.outputs)):
        dims.fresh(Ref(node.name, index))


SHAPES: dict[str, Callable[[Dims, Node], None]] = {
    "addmm": _addmm,
    "attention": _attention,
    "batch_norm": _batch_norm,
    "cat": _cat,
    "convolution": _convolution,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "expand": _expand,
    "index": _index,
    "fresh": _fresh,
    "matmul": _matmul,
    "norm": _norm,
    "opaque": opaque,
    "pad": _pad,
    "permute": _permute,
    "reshape": _reshape,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
}
