"""Backwards that make cheap values again: the same numbers, from less that is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers

from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.precision import NAMED
from merakc.ir.program import Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.autodiff import rematerialise
from merakc.passes.autodiff.loss_gradient import without_zeros
from merakc.passes.autodiff.rematerialise import late, lean, rematerialised
from merakc.passes.pipeline import differentiate
from merakc.passes.recompute.blocks import saved_roots
from merakc.planner.sources.source import source_of
from tests.passes.autodiff.test_recompute import STAGES, lowered, run, values

DEAR = (
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default",
    "aten.sum.dim_IntList", "merakc.attention.default", "merakc.dropout.default",
)  # fmt: skip
SPEC = TensorSpec((8, 8), torch.float64)


def plain_chunk(name: str, stage: int) -> StageGraphs:
    """A chunk that keeps everything."""
    return without_zeros(differentiate(lowered(name).local(stage, 0)))


def saved_bytes(chunk: StageGraphs) -> int:
    specs = chunk.forward.specs()
    kept = {o.ref for o in chunk.forward.outputs if o.kind is OutputKind.SAVED}
    return sum(specs[r].size_bytes for r in kept)


def root_bytes(chunk: StageGraphs) -> int:
    """Those of each memory once."""
    specs = chunk.forward.specs()
    return sum(specs[ref].size_bytes for ref in saved_roots(chunk.forward))


def both(chunk: StageGraphs, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What forward and backward give, but for what passes between them."""
    assert chunk.backward is not None
    tangents = (i for i in chunk.backward.inputs if i.kind is InputKind.TANGENT)
    ones = {i.key: torch.ones(i.spec.shape, dtype=i.spec.dtype) for i in tangents}
    found = run(chunk.forward, given)
    kept = {o.name for o in chunk.forward.outputs if o.kind is OutputKind.SAVED}
    results = {f"forward {k}": v for k, v in found.items() if k not in kept}
    return results | run(chunk.backward, given | found | ones)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small values count, too."""
    monkeypatch.setattr(rematerialise, "LEAST_BYTES", 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("made_lean", [rematerialised, lean])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "whisper", "mixtral"])
def test_the_same_bits_from_less(
    name: str, made_lean: Callable[[StageGraphs], StageGraphs]
) -> None:
    for stage in range(STAGES):
        chunk = plain_chunk(name, stage)
        less = made_lean(chunk)
        assert less.backward is not None
        assert chunk.backward is not None
        less.forward.verify()
        less.backward.verify()
        assert less.backward.outputs != ()
        given = values(chunk.forward)
        wanted, found = both(chunk, given), both(less, given)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key].nan_to_num(), value.nan_to_num()), key
        share = 0.9 if name in ("gpt2", "llama") else 1.0
        assert saved_bytes(less) <= share * saved_bytes(chunk)
        before = Counter(n.op for g in (chunk.forward, chunk.backward) for n in g.nodes)
        after = Counter(n.op for g in (less.forward, less.backward) for n in g.nodes)
        for op in DEAR:
            assert after[op] == before[op], op


@pytest.mark.usefixtures("small")
def test_calls_one_by_one_make_again_what_gives_back_as_much() -> None:
    chunk = gated(8)
    less = lean(chunk)
    assert chunk.backward is not None
    assert less.backward is not None
    assert saved_bytes(chunk) == 4 * SPEC.size_bytes  # both products, silu and what is multiplied
    assert saved_bytes(less) == 2 * SPEC.size_bytes
    added = Counter(n.op for n in less.backward.nodes)
    added.subtract(Counter(n.op for n in chunk.backward.nodes))
    assert +added == {"aten.silu.default": 1, "aten.mul.Tensor": 1, "aten.t.default": 1}


def test_small_values_are_kept() -> None:
    small, large = gated(8), gated(2048)
    assert lean(small) is small
    assert saved_bytes(lean(large)) < saved_bytes(large)


def test_what_costs_nothing_stands_where_it_is_read() -> None:
    nodes = (
        Node("a", "aten.neg.default", (Ref("x"),), (), (SPEC,)),
        Node("t", "aten.t.default", (Ref("a"),), (), (SPEC,)),
        Node("m", "aten.mm.default", (Ref("x"), Ref("x")), (), (SPEC,)),
        Node("n", "aten.mm.default", (Ref("m"), Ref("t")), (), (SPEC,)),
        Node("o", "aten.neg.default", (Ref("n"),), (), (SPEC,)),
        Node("p", "aten.mm.default", (Ref("a"), Ref("o")), (), (SPEC,)),
    )
    inputs = (Input("x", InputKind.SAVED, SPEC, "x"),)
    graph = late(Graph(inputs, nodes, (Output("p", OutputKind.GRADIENT, Ref("p")),)))
    graph.verify()
    assert "".join(n.name for n in graph.nodes) == "matnop"


def gated(rows: int) -> StageGraphs:
    """A product times the silu of another, and a product of that."""
    spec, weight = TensorSpec((rows, 8), torch.float64), SPEC
    inputs = [Input("x", InputKind.BATCH, spec, "x")]
    inputs += [Input(f"w{k}", InputKind.PARAMETER, weight, f"w{k}", True) for k in range(3)]
    nodes = (
        Node("gate", "aten.mm.default", (Ref("x"), Ref("w0")), (), (spec,)),
        Node("up", "aten.mm.default", (Ref("x"), Ref("w1")), (), (spec,)),
        Node("act", "aten.silu.default", (Ref("gate"),), (), (spec,)),
        Node("both", "aten.mul.Tensor", (Ref("act"), Ref("up")), (), (spec,)),
        Node("down", "aten.mm.default", (Ref("both"), Ref("w2")), (), (spec,)),
        Node("loss", "aten.sum.default", (Ref("down"),), (), (TensorSpec((), torch.float64),)),
    )
    outputs = (Output("loss", OutputKind.LOSS, Ref("loss")),)
    return differentiate(Graph(tuple(inputs), nodes, outputs))


def chain(layers: int) -> StageGraphs:
    """A stream to which every layer adds the tanh of a product of it."""
    inputs = [Input("x", InputKind.BATCH, SPEC, "x")]
    nodes, at = [], Ref("x")
    for k in range(layers):
        inputs.append(Input(f"w{k}", InputKind.PARAMETER, SPEC, f"w{k}", True))
        nodes += [
            Node(f"m{k}", "aten.mm.default", (at, Ref(f"w{k}")), (), (SPEC,)),
            Node(f"t{k}", "aten.tanh.default", (Ref(f"m{k}"),), (), (SPEC,)),
            Node(f"a{k}", "aten.add.Tensor", (at, Ref(f"t{k}")), (), (SPEC,)),
        ]
        at = Ref(f"a{k}")
    nodes.append(Node("loss", "aten.sum.default", (at,), (), (TensorSpec((), torch.float64),)))
    outputs = (Output("loss", OutputKind.LOSS, Ref("loss")),)
    return differentiate(Graph(tuple(inputs), tuple(nodes), outputs))


def test_a_stream_is_kept_and_not_added_up_anew() -> None:
    chunk = chain(6)
    less = rematerialised(chunk)
    assert chunk.backward is not None
    assert less.backward is not None
    added = [n for n in less.backward.nodes if n.op == "aten.add.Tensor"]
    assert len(added) == len([n for n in chunk.backward.nodes if n.op == "aten.add.Tensor"])
    assert saved_bytes(less) <= saved_bytes(chunk)


def llama(layers: int) -> StageGraphs:
    """A Llama in bf16-mixed, that keeps everything: 8 heads of 64 in 4 groups, 1,024 tokens."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=512, intermediate_size=1024, vocab_size=64,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    source, precision = source_of("llama", config, 1024), NAMED["bf16-mixed"]
    recording = record_part(
        source.model, (), source.batch(1), BatchLayout((1,), 1), torch.device("cpu"), precision
    )
    strategy = Strategy().on(Mesh(), micro_batches=1)
    return without_zeros(differentiate(make_plan(recording, strategy, NOMINAL_CPU).local(0, 0)))


def test_what_a_layer_keeps_in_half_precision() -> None:
    """Nothing in float32, no normalised rows, and keys and values in their groups."""
    table = {
        "the streams before both norms": 2 * 512, "queries": 512, "keys and values": 2 * 256,
        "the output of attention": 512, "gate and up": 2 * 1024,
    }  # fmt: skip
    two, three = llama(2), llama(3)
    layer_bytes = root_bytes(lean(three)) - root_bytes(lean(two))
    assert layer_bytes == pytest.approx(1024 * 2 * sum(table.values()), rel=0.02)
    given = values(two.forward)
    wanted, found = both(two, given), both(lean(two), given)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_casts_of_weights_are_made_again() -> None:
    half = TensorSpec(SPEC.shape, torch.bfloat16)
    cast = (("dtype", torch.bfloat16),)
    inputs = (
        Input("x", InputKind.ACTIVATION, half, "x", True),
        Input("w", InputKind.PARAMETER, SPEC, "w", True),
    )
    nodes = (
        Node("c", "aten._to_copy.default", (Ref("w"),), cast, (half,)),
        Node("m", "aten.mm.default", (Ref("x"), Ref("c")), (), (half,)),
    )
    chunk = differentiate(Graph(inputs, nodes, (Output("m", OutputKind.ACTIVATION, Ref("m")),)))
    assert saved_bytes(chunk) == half.size_bytes
    less = rematerialised(chunk)
    assert saved_bytes(less) == 0
    assert less.backward is not None
    assert [i.name for i in less.backward.inputs if i.kind is InputKind.PARAMETER] == ["w"]


def test_pieces_that_differentiate_nothing_stay() -> None:
    chunk = chain(2)
    frozen = replace(chunk, backward=None)
    assert rematerialised(frozen) is frozen
