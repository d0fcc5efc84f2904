"""Rules of nodes of which the sharding row says less of samples than can be known.

Each takes the node's place and returns its outcome, or None where the row is to speak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from merakc.ir.graph import Graph, Node, Ref
from merakc.passes.batches.normalise import CROSS_ENTROPY, MEAN, NLL
from merakc.passes.batches.states import (
    SAMPLES,
    Dim,
    Kind,
    Outcome,
    State,
    coupled,
    ends,
    every,
    size,
    sums,
)
from merakc.passes.sharding.dims import given

MARGIN = ("aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default")
SCATTERED = {"aten.scatter_add.default": "src", "aten.index_add.default": "source"}
BATCH_NORM = "aten.batch_norm.default"
COUNTS = "aten.arange.default"
CASTS = (
    "aten.to.dtype", "aten.to.device", "aten.contiguous.default", "aten.unsqueeze.default",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A node of the part's graph, its twin in the whole batch's, and what is known so far.

    `states` are those of what it reads, as it sees them, `before` those of all values before it;
    `samples` and `total` the numbers of samples.
    """

    part: Graph
    whole: Graph
    node: Node
    twin: Node
    states: Mapping[Ref, State]
    before: Mapping[Ref, State]
    makers: Mapping[str, Node]
    samples: int
    total: int

    def state(self, name: str) -> State:
        """The state of a tensor argument, by its name in the schema."""
        return self.states[given(self.node, name)]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The shape of a value of the part."""
        return self.part.specs()[ref].shape


def own_rule(place: Place) -> Outcome | None:
    """The outcome of a node that has a rule of its own; None where it has none for this call."""
    rule = _RULES.get(place.node.op)
    return rule(place) if rule is not None else None


def _dims(state: State) -> tuple[Dim, ...]:
    assert state.dims is not None
    return state.dims


def _with(dims: tuple[Dim, ...], k: int, dim: Dim) -> State:
    return State(Kind.ROWS, (*dims[:k], tuple(f for f in dim if f != 1), *dims[k + 1 :]))


def _cat(place: Place) -> Outcome | None:
    """Views of the samples, one behind the other."""
    node = place.node
    refs = [r for r in node.args[0] if math.prod(place.shape(r))]
    dim = given(node, "dim") % len(node.spec.shape)
    along = [_dims(place.states[r])[dim] for r in refs]
    if not any(SAMPLES in d for d in along):
        return None
    if not all(SAMPLES in d for d in along) or len({ends(d)[1] for d in along}) > 1:
        return coupled(node, "samples stand beside what are none")
    dims = _dims(place.states[refs[0]])
    others = [_dims(place.states[r]) for r in refs]
    if any(SAMPLES in d for own in others for k, d in enumerate(own) if k != dim):
        return coupled(node, "samples meet other samples")
    outer = sum(ends(d)[0] for d in along)
    return Outcome((_with(dims, dim, (outer, SAMPLES, ends(along[0])[1])),))


def _slice(place: Place) -> Outcome | None:
    """Whole views of the samples, of several that stand one behind the other."""
    node = place.node
    dims = _dims(place.states[node.refs[0]])
    dim = given(node, "dim") % len(dims)
    if SAMPLES not in dims[dim]:
        return None
    outer, inner = ends(dims[dim])

    def views(of: Node, samples: int) -> tuple[int, int] | None:
        each, full = samples * inner, samples * inner * outer
        start = given(of, "start") or 0
        start = max(start + full, 0) if start < 0 else start
        size = of.spec.shape[dim]
        fits = given(of, "step") == 1 and start % each == 0 and size % each == 0 and size
        return (start // each, size // each) if fits else None

    here, there = views(node, place.samples), views(place.twin, place.total)
    if here is None or here != there:
        return coupled(node, "some of the samples are taken")
    return Outcome((_with(dims, dim, (here[1], SAMPLES, inner)),))


def _labelled(place: Place) -> Outcome | None:
    """A loss over classes: the dims of the scores but the classes are those of the labels."""
    node = place.node
    scores, labels = (place.states[r] for r in node.args[:2])
    one, two = _dims(scores), _dims(labels)
    if not scores.sampled and not labels.sampled:
        return None
    classes = 1 if len(one) > 1 else 0
    alike = len(two) == len(one) and node.op == CROSS_ENTROPY  # probabilities of classes
    rest = [d for k, d in enumerate(one) if k != classes]
    own = [d for k, d in enumerate(two) if not (alike and k == classes)]
    if node.op in MARGIN:
        rest, own = list(one[:1]), list(two[:1])
    weight = given(node, "weight") if node.op not in MARGIN[1:] else None
    split = SAMPLES in one[classes] or (alike and SAMPLES in two[classes])
    if split or (weight is not None and place.states[weight].sampled):
        return coupled(node, "samples stand where the classes do")
    if [_outer(d, place.samples) for d in rest] != [_outer(d, place.samples) for d in own]:
        return coupled(node, "labels that are not those of their own samples")
    code = given(node, "reduction")
    if code == 0:
        return Outcome(every(node, State(Kind.ROWS, tuple(rest))))
    return sums(node, scaled=code == MEAN)


def _outer(dim: Dim, samples: int) -> tuple[int, int | None]:
    """The size of a dim, and what stands outside of its samples."""
    return size(dim, samples), ends(dim)[0] if SAMPLES in dim else None


def _batch_norm(place: Place) -> Outcome | None:
    """By convention: each part is normalised by itself, as in all of data parallelism.

    Where the samples are channels, as in an instance norm, each is normalised by itself anyhow.
    """
    node = place.node
    x, training = place.states[node.args[0]], given(node, "training")
    if not x.sampled:
        return None
    dims = _dims(x)
    others = [place.states[r] for r in node.refs[1:] if place.states[r].sampled]
    if x.rows is not None and x.rows.dim == 1 and all(s.dims == (dims[1],) for s in others):
        return Outcome(every(node, State(Kind.ROWS, dims))) if len(node.outputs) == 1 else None
    if others or x.rows is None or x.rows.dim != 0:  # as in an instance norm along the samples
        return coupled(node, "samples stand where the channels do, or along them")
    told = "batch norm is over each micro-batch by itself" if training else ""
    return Outcome(every(node, State(Kind.ROWS, dims)), assumed=told)


def _scatter(place: Place) -> Outcome | None:
    """Samples added into the places of a constant."""
    node = place.node
    base, index = place.state("self"), place.state("index")
    source = place.state(SCATTERED[node.op])
    dim = given(node, "dim") % max(len(_dims(base)), 1)
    at = min(dim, len(_dims(index)) - 1)
    if base.sampled or not _dims(source) or not _dims(index):
        return None
    first, second = _dims(index)[at], _dims(source)[dim]
    elsewhere = [d for k, d in enumerate(_dims(source)) if k != dim]
    elsewhere += [d for k, d in enumerate(_dims(index)) if k != at]
    if SAMPLES not in first or SAMPLES not in second or any(SAMPLES in d for d in elsewhere):
        return None
    if _outer(first, place.samples) != _outer(second, place.samples):
        return coupled(node, "samples in another order")
    if not node.spec.dtype.is_floating_point:
        return coupled(node, "whole numbers added up")
    return sums(node, once=True)


def _copies(place: Place) -> Outcome | None:
    """The outcome of an expand or repeat that copies a value without samples for each sample."""
    node, state = place.node, place.states[place.node.refs[0]]
    mine, other = node.args[1], place.twin.args[1]
    if mine == other:
        return None
    dims, repeats = _dims(state), "repeat" in node.op
    if state.sampled:
        own = dims[::-1]
        kept = zip(mine[::-1], other[::-1], own, strict=False)
        same = not repeats and len(mine) == len(dims)
        fine = same and all(x == y or SAMPLES in d for x, y, d in kept)
        return None if fine else coupled(node, "copies of samples for each sample")
    each = [_each(place, x, y) for x, y in zip(mine, other, strict=True)]
    if sum(x != y for x, y in zip(mine, other, strict=True)) != 1 or not any(each):
        return coupled(node, "copies whose number grows otherwise than the samples")
    if not repeats:
        shape = zip(each, node.spec.shape, strict=True)
        return Outcome((State(Kind.ROWS, tuple(k or (n,) for k, n in shape)),))
    padded = ((1,),) * (len(mine) - len(dims)) + dims
    copies = zip(each, mine, padded, strict=True)
    return Outcome((State(Kind.ROWS, tuple((*(k or (x,)), *d) for k, x, d in copies)),))


def _each(place: Place, mine: int, whole: int) -> Dim:
    """The factors of a number of copies that grows with the samples; none where it does not."""
    each, rest = divmod(mine, place.samples)
    if mine == whole or rest or each * place.total != whole:
        return ()
    return (SAMPLES,) if each == 1 else (SAMPLES, each)


def _index(place: Place) -> Outcome | None:
    """`x[arange(rows), which]`: of each sample its own."""
    node = place.node
    picked = _own_places(place, node.args[0], node.args[1])
    if picked is None:
        return None
    first, k, count, shape = picked
    dims = _dims(place.states[node.args[0]])
    at = (*dims[: k + 1], *((n,) for n in shape[1:]), *dims[k + count :])
    return Outcome((State(Kind.ROWS, at),), places=node.refs.index(first))


def _index_put(place: Place) -> Outcome | None:
    """`x[arange(rows), which] = values`: to each sample its own; or `x[:, which] = values`."""
    node = place.node
    picked = _own_places(place, node.args[0], node.args[1])
    if picked is None:
        return _put_behind(place)
    first, k, count, shape = picked
    dims, values = _dims(place.states[node.args[0]]), node.args[2]
    behind = len(dims) - count + len(shape) - k  # the dims of the values from the rows on
    own = _dims(place.states[values])
    at = len(own) - behind
    if any(SAMPLES in d and (j != at or d != dims[k]) for j, d in enumerate(own)):
        return None
    return Outcome((State(Kind.ROWS, dims),), places=node.refs.index(first))


def _put_behind(place: Place) -> Outcome | None:
    """Writes to the same places of every sample, which are told by one index behind the samples."""
    x, indices, values = place.node.args[:3]
    dims, own = _dims(place.states[x]), _dims(place.states[values])
    picks = [(j, ref) for j, ref in enumerate(indices) if ref is not None]
    sampled = [k for k, d in enumerate(dims) if SAMPLES in d]
    if len(picks) != 1 or len(sampled) != 1:
        return None
    ((j, ref),), (k,) = picks, sampled
    if j <= k or place.states[ref].sampled:
        return None
    rank = len(place.shape(ref))
    is_mask = place.part.specs()[ref].dtype in (torch.bool, torch.uint8)
    takes, gives = (rank, 1) if is_mask else (1, rank)
    at = len(own) - (len(dims) - takes + gives - k)  # where the values have the samples
    if any(SAMPLES in d and (i != at or d != dims[k]) for i, d in enumerate(own)):
        return None
    if at >= 0 and not place.states[values].sampled and place.shape(values)[at] != 1:
        return None
    return Outcome((State(Kind.ROWS, dims),))


def _own_places(
    place: Place, x: Ref, indices: tuple[Ref | None, ...]
) -> tuple[Ref, int, int, tuple[int, ...]] | None:
    """Of `x[arange(rows), which]`, in which `which` may have several places for each row: the count
    of the rows, their dim in `x`, how many dims are picked from, and the shape of all picks
    together; None where it is another call.
    """
    picks = [(j, r) for j, r in enumerate(indices) if r is not None]
    (k, first), *rest = picks
    dims, rows = _dims(place.states[x]), place.shape(x)[k]
    if SAMPLES not in dims[k] or not rest or not counts(place, first, rows):
        return None
    if place.node.refs.count(first) > 1:  # as a number it is the whole batch's
        return None
    if [j for j, _ in picks] != list(range(k, k + len(picks))):
        return None
    if any(SAMPLES in d for j, d in enumerate(dims) if j != k):
        return None
    shape = _together(*(place.shape(r) for _, r in picks))
    for _, ref in rest:
        own = _dims(place.states[ref])
        at = len(own) - len(shape)  # the place of the rows, if it has them
        if any(SAMPLES in d and (j != at or d != dims[k]) for j, d in enumerate(own)):
            return None
    return (first, k, len(picks), shape) if len(place.shape(first)) == len(shape) else None


def _together(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that these are broadcast to."""
    width = max(map(len, shapes))
    padded = [(1,) * (width - len(s)) + s for s in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def counts(place: Place, ref: Ref, rows: int) -> bool:
    """Whether a value is 0, 1, 2, ... over so many rows, in its first dim."""
    shape, dims = place.shape(ref), place.states[ref].dims
    node = place.makers.get(ref.node)
    while node is not None and node.op in CASTS:
        node = place.makers.get(node.refs[0].node)
    grows = dims is not None and SAMPLES in dims[0] and math.prod(shape) == shape[0] == rows
    return grows and node is not None and node.op == COUNTS


def _masked_scatter(place: Place) -> Outcome | None:
    """Values put into the places of a mask: of each sample its own, where a part has as many."""
    node = place.node
    x, mask, source = (place.states[r] for r in node.refs)
    shape, own = place.shape(node.refs[0]), place.shape(node.refs[1])
    first = all(s.dims and s.dims[0][:1] == (SAMPLES,) for s in (x, mask, source))
    values = math.prod(place.shape(node.refs[2])) * math.prod(own)
    if not first or len(own) != len(shape) or values % (math.prod(shape) * place.samples):
        return None
    return Outcome((State(Kind.ROWS, x.dims),), filled=True)


def _histogram(place: Place) -> Outcome | None:
    """How many of all samples' elements lie in each of some fixed bins."""
    node = place.node
    fixed = given(node, "min") != given(node, "max")  # or else they are those of the values
    return sums(node) if place.states[node.refs[0]].sampled and fixed else None


def _embedding(place: Place) -> Outcome | None:
    if given(place.node, "scale_grad_by_freq"):
        return coupled(place.node, "gradients scaled by how often a word comes in the batch")
    return None


_RULES: Mapping[str, Callable[[Place], Outcome | None]] = {
    "aten.cat.default": _cat,
    "aten.slice.Tensor": _slice,
    CROSS_ENTROPY: _labelled,
    **dict.fromkeys((*NLL, *MARGIN), _labelled),
    BATCH_NORM: _batch_norm,
    **dict.fromkeys(SCATTERED, _scatter),
    "aten.expand.default": _copies,
    "aten.repeat.default": _copies,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.embedding.default": _embedding,
    "aten.masked_scatter.default": _masked_scatter,
    "aten.histc.default": _histogram,
}
