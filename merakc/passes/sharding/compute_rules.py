"""The sharding rules, other than views, that are no einsum: products, norms, losses, windows."""

from __future__ import annotations

from collections.abc import Callable

from merakc.ir.graph import Node, Ref
from merakc.kernels.ring.attention import RING
from merakc.passes.sharding.dims import Dims, argument, broadcast_dims, given, need_whole
from merakc.passes.sharding.factors import Dim, Factor, block, new_dim, size, unify

SUM = 2  # at::Reduction


def _addmm(dims: Dims, node: Node) -> None:
    bias, x, w = (dims.of[a] for a in node.args[:3])
    unify(x[1], w[0])
    out = [x[0], w[1]]
    for dim, target in zip(reversed(bias), reversed(out), strict=False):
        if size(dim) > 1:
            unify(dim, target)
    dims.put(node, out)
    dims.summed[node.name] = [x[1]]
    if dict(node.kwargs):
        block(x[1], "addmm with alpha or beta")


def _matmul(dims: Dims, node: Node) -> None:
    x, y = (dims.of[a] for a in node.args[:2])
    columns = y[-1:] if len(y) > 1 else []
    inner = y[-2] if len(y) > 1 else y[0]
    unify(x[-1], inner)
    dims.summed[node.name] = [x[-1]]
    rank = max(len(x), len(y), 2) - 2
    lead = broadcast_dims([x[:-2], y[:-2]], rank)
    dims.put(node, [*lead, *x[-2:-1], *columns])


def _gathered(dims: Dims, node: Node) -> None:
    """A product of which the columns may be split before and not behind."""
    out = list(dims.of[node.args[0]])
    dim = node.args[1]
    out[dim] = new_dim(node.spec.shape[dim], f"the gathered product at {node.source}")
    dims.put(node, out)


def _sent(dims: Dims, node: Node) -> None:
    """Rows that travel whole, or each rank's part of them; where groups end is needed whole."""
    rows, *others = dims.of[node.args[0]]
    for dim in (rows, *(d for ref in node.refs[1:] for d in dims.of[ref])):
        need_whole(dim, node)
    dims.put(node, [new_dim(node.spec.shape[0], node.op), *others])


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
    rows = [query[2]] if node.op == RING else []  # ranks of cp know of their own
    for dim in (key[2], query[3], *rows):
        need_whole(dim, node)
    if isinstance(node.args[3], Ref):
        mask, columns = dims.of[node.args[3]], key[2]
        if node.op == RING:  # all of them, of which a rank has some keys
            need_whole(columns := mask[-1], node)
        scores = [query[0], query[1], query[2], columns]
        for dim, target in zip(reversed(mask), reversed(scores), strict=False):
            if size(dim) > 1:
                unify(dim, target)
    if (sink := given(node, "sink")) is not None:
        unify(dims.of[sink][0], query[1])
    dims.put(node, [query[0], query[1], query[2], value[3]])
    dims.put(node, query[:3], 1)


def _convolution(dims: Dims, node: Node) -> None:
    """Channels are groups of channels; a depthwise convolution sums over none."""
    x, w = dims.of[node.args[0]], dims.of[node.args[1]]
    transposed, groups = given(node, "transposed"), given(node, "groups")
    for dim in (*x[2:], *w[2:]):
        need_whole(dim, node)
    spatial = [new_dim(s, node.op) for s in node.spec.shape[2:]]
    group: Dim = new_dim(groups)
    inner = new_dim(size(x[1]) // groups)
    unify(x[1], [*group, *inner])
    if transposed:
        unify(w[0], [*group, *inner])
        out = [*group, *w[1]]
    else:
        unify(w[1], inner)
        out = [*group, *new_dim(size(w[0]) // groups)]
        unify(w[0], out)
    dims.summed[node.name] = [inner]
    if isinstance(node.args[2], Ref):
        unify(dims.of[node.args[2]][0], out)
    dims.put(node, [x[0], out, *spatial])


def _embedding(dims: Dims, node: Node) -> None:
    table, ids = dims.of[node.args[0]], dims.of[node.args[1]]
    if argument(node, 3, "scale_grad_by_freq", False):
        why = "embedding with gradients scaled by frequency"
        block([*table[0], *(factor for dim in ids for factor in dim)], why)
    dims.put(node, [*ids, table[1]])
    dims.summed[node.name] = [table[0]]


def _searchsorted(dims: Dims, node: Node) -> None:
    """Each row of values is looked up in a row of its own, or all in one."""
    values = dims.of[node.args[1]]
    for ref in (node.args[0], given(node, "sorter")):
        if ref is not None:
            *rows, row = dims.of[ref]
            need_whole(row, node)
            for mine, other in zip(rows, values, strict=False):
                unify(mine, other)
    dims.put(node, values)


def _cross_entropy(dims: Dims, node: Node) -> None:
    logits, target = dims.of[node.args[0]], dims.of[node.args[1]]
    at = 1 if len(logits) > 1 else 0
    classes, samples = logits[at], logits[:at] + logits[at + 1 :]
    is_index = len(target) < len(logits)
    for own, dim in zip(
        samples, target if is_index else target[:at] + target[at + 1 :], strict=True
    ):
        unify(own, dim)
    summed = []
    if argument(node, 2, "weight") is not None or not is_index or len(logits) != 2:
        why = "cross-entropy with class weights, class probabilities or extra dims"
        block([*classes, *(target[at] if not is_index else [])], why)
    else:
        summed.append(classes)
    if given(node, "reduction") == SUM:
        dims.summed[node.name] = [*summed, *samples]
        dims.put(node, [])
        return
    dims.summed[node.name] = summed
    for dim in samples:
        block(dim, "the samples of a loss")
    dims.fresh(Ref(node.name), "a loss")


def _norm(dims: Dims, node: Node) -> None:
    """Layer and RMS norm; the native form also returns statistics, of which dims are kept as 1."""
    x = dims.of[node.args[0]]
    lead = len(x) - len(node.args[1])
    for dim in x[lead:]:
        need_whole(dim, node)
    for arg in node.args[2:4]:
        if isinstance(arg, Ref):
            for own, dim in zip(dims.of[arg], x[lead:], strict=True):
                unify(own, dim)
    dims.put(node, list(x))
    for index in range(1, len(node.outputs)):
        dims.put(node, [*x[:lead], *([] for _ in x[lead:])], index)


def _group_norm(dims: Dims, node: Node) -> None:
    """Groups of channels are normalised each on its own, and may be split."""
    x = dims.of[node.args[0]]
    groups = node.args[1]
    each = new_dim(size(x[1]) // groups, node.op)
    unify(x[1], [*new_dim(groups), *each])
    for dim in x[2:]:
        need_whole(dim, node)
    for name in ("weight", "bias"):
        if isinstance(given(node, name), Ref):
            unify(dims.of[given(node, name)][0], x[1])
    dims.put(node, list(x))


def _batch_norm(dims: Dims, node: Node) -> None:
    x = dims.of[node.args[0]]
    for k, dim in enumerate(x):
        if k != 1:
            need_whole(dim, node)
    for arg in node.args[1:5]:
        if isinstance(arg, Ref):
            unify(dims.of[arg][0], x[1])
    dims.put(node, list(x))


def _weight_norm(dims: Dims, node: Node) -> None:
    """The norm is over all dims but the named one, which alone may be split."""
    v, g = (dims.of[a] for a in node.args[:2])
    kept = given(node, "dim") % len(v)
    for k, (dim, scale) in enumerate(zip(v, g, strict=True)):
        if k == kept:
            unify(dim, scale)
        else:
            need_whole(dim, node)
    dims.put(node, list(v))
    dims.put(node, list(g), 1)


def _im2col(dims: Dims, node: Node) -> None:
    """`[n, c, h, w]` (n may be missing) to `[n, c·window, places]`."""
    x = dims.of[node.args[0]]
    *lead, channels, height, width = x
    for dim in (height, width):
        need_whole(dim, node)
    *_, rows, places = node.spec.shape
    window = new_dim(rows // size(channels), node.op)
    dims.put(node, [*lead, [*channels, *window], new_dim(places, node.op)])


def _col2im(dims: Dims, node: Node) -> None:
    """`[n, c·window, places]` (n may be missing) to `[n, c, h, w]`."""
    *lead, rows, places = dims.of[node.args[0]]
    *_, channels, height, width = node.spec.shape
    out = new_dim(channels)
    unify(rows, [*out, *new_dim(size(rows) // channels, node.op)])
    need_whole(places, node)
    dims.put(node, [*lead, out, new_dim(height, node.op), new_dim(width, node.op)])


def _pixel_shuffle(dims: Dims, node: Node) -> None:
    """`[*, c·r·r, h, w]` to `[*, c, h·r, w·r]`."""
    *lead, rows, height, width = dims.of[node.args[0]]
    *_, channels, tall, wide = node.spec.shape
    out = new_dim(channels)
    unify(rows, [*out, *new_dim(size(rows) // channels, node.op)])
    for dim in (height, width):
        need_whole(dim, node)
    dims.put(node, [*lead, out, new_dim(tall, node.op), new_dim(wide, node.op)])


def _pixel_unshuffle(dims: Dims, node: Node) -> None:
    """`[*, c, h·r, w·r]` to `[*, c·r·r, h, w]`."""
    *lead, channels, tall, wide = dims.of[node.args[0]]
    *_, rows, height, width = node.spec.shape
    for dim in (tall, wide):
        need_whole(dim, node)
    out = [*channels, *new_dim(rows // size(channels), node.op)]
    dims.put(node, [*lead, out, new_dim(height, node.op), new_dim(width, node.op)])


def _channel_shuffle(dims: Dims, node: Node) -> None:
    """Channels `[groups, each]` become `[each, groups]`."""
    own = dims.of[node.args[0]]
    groups = new_dim(node.args[1], node.op)
    each = new_dim(size(own[1]) // node.args[1])
    unify(own[1], [*groups, *each])
    dims.put(node, [own[0], [*each, *groups], *own[2:]])


COMPUTE_RULES: dict[str, Callable[[Dims, Node], None]] = {
    "addmm": _addmm,
    "attention": _attention,
    "batch_norm": _batch_norm,
    "channel_shuffle": _channel_shuffle,
    "col2im": _col2im,
    "convolution": _convolution,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "gathered": _gathered,
    "group_norm": _group_norm,
    "im2col": _im2col,
    "matmul": _matmul,
    "norm": _norm,
    "pixel_shuffle": _pixel_shuffle,
    "searchsorted": _searchsorted,
    "sent": _sent,
    "pixel_unshuffle": _pixel_unshuffle,
    "weight_norm": _weight_norm,
}
