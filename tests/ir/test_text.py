"""The text form of a graph parses back to an equal graph, or is refused with its line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models import MODELS
from merakc.errors import ConfigError
from merakc.frontend.values.symbols import Number
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.text import graph_text, parse_graph
from merakc.kernels.opaque import OPAQUE, Call, enter
from merakc.passes.pipeline import differentiate
from tests.ir.test_graph import GRAPH
from tests.recorded import recorded

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
SPECS = st.builds(
    TensorSpec, st.lists(st.integers(0, 9), max_size=3).map(tuple), DTYPES
)  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
# Of values: as the recorder makes them, from names of modules and parameters.
KEYS = st.from_regex(r"[a-z_.:][a-z0-9_.:]{0,6}", fullmatch=True)
LITERALS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), NAMES, DTYPES,
    st.complex_numbers(allow_nan=False),
    st.sampled_from(
        [torch.strided, torch.contiguous_format, torch.device("cpu"), torch.device("cuda", 1)]
    ),
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Small graphs with every kind of argument, and names of users of any letters."""
    names = iter(draw(st.lists(KEYS, min_size=6, max_size=6, unique=True)))
    inputs = tuple(
        Input(next(names), kind, draw(SPECS), draw(NAMES), draw(st.booleans()))
        for kind in draw(st.lists(st.sampled_from(InputKind), min_size=1, max_size=3))
    )
    known = [Ref(i.name) for i in inputs]
    nodes: list[Node] = []
    for _ in range(draw(st.integers(0, 2))):
        nests = st.recursive(
            st.sampled_from(known) | LITERALS, lambda inner: st.lists(inner, max_size=3).map(tuple)
        )
        outputs = tuple(draw(st.lists(st.none() | SPECS, min_size=1, max_size=2)))
        args = tuple(draw(st.lists(nests, max_size=3)))
        kwargs = tuple((k, draw(nests)) for k in draw(st.sets(st.sampled_from(["dim", "dtype"]))))
        names_of = (draw(NAMES), draw(NAMES))
        name, grad = next(names), draw(st.booleans())
        nodes.append(Node(name, "aten.add.Tensor", args, kwargs, outputs, *names_of, grad))
        known += nodes[-1].made
    outs = draw(st.lists(st.tuples(NAMES, st.sampled_from(OutputKind), st.sampled_from(known))))
    return Graph(inputs, tuple(nodes), tuple(Output(*out) for out in outs))


@given(graphs())
def test_every_graph_parses_back(graph: Graph) -> None:
    assert parse_graph(graph_text(graph)) == graph


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "resnet"])
def test_recordings_and_their_gradients_parse_back(name: str) -> None:
    graph = recorded(MODELS[name].model(), MODELS[name].batch(4), 2).graph
    for each in (graph, *differentiate(graph).graphs):
        again = parse_graph(graph_text(each), each.constants, each.functions)
        assert again == each
        assert again.constants is each.constants


def test_the_form_is_one_to_read() -> None:
    assert graph_text(GRAPH).splitlines() == [
        "parameter %proj_weight: float32[4,3] proj.weight requires_grad",
        "batch %x: float32[2,3] x",
        "%cast: float32[2,3] = aten._to_copy.default(%x, dtype=float32) no_grad",
        "%linear: float32[2,4] = aten.linear.default(%cast, %proj_weight)  # proj at model.py:7",
        "%unread: float32[2,4] = aten.relu.default(%linear)  # proj at model.py:7",
        "%max: float32[2], int64[2] = aten.max.dim(%linear, 1)  # proj at model.py:7",
        "%stack: float32[2,4] = aten.stack.default((%max, %max))  # proj at model.py:7",
        "result values = %stack",
        "result indices = %max:1",
    ]


def test_the_end_of_a_name_is_no_index() -> None:
    item = Input("a:1", InputKind.SAVED, TensorSpec((), torch.float32))
    graph = Graph((item,), (), (Output("a", OutputKind.SAVED, Ref("a:1")),))
    assert parse_graph(graph_text(graph)) == graph


def with_argument(value: Any, op: str = "aten.view.default") -> Graph:
    node = Node("v", op, (Ref("x"), value), (), (TensorSpec((), torch.float32),))
    return replace(GRAPH, nodes=(node,), outputs=())


def test_an_opaque_module_of_this_process_parses_back_and_no_other() -> None:
    call = Call(lambda tensors: tensors, (), "net.odd")
    graph = with_argument(enter(call), OPAQUE)
    assert parse_graph(graph_text(graph)) == graph
    text = graph_text(graph)
    del call, graph
    with pytest.raises(ConfigError, match=r"line 3.*'net.odd at 0x\w+', which this process has no"):
        parse_graph(text)


def test_what_only_values_say_is_refused() -> None:
    text = graph_text(with_argument(Number(sympy.Symbol("u0") + 1)))
    assert "(%x, <Number u0 + 1>)" in text
    with pytest.raises(ConfigError, match=r"line 3.*known only from the values of a batch"):
        parse_graph(text)
    spec = TensorSpec((Number(sympy.Symbol("u0")),), torch.float32)  # type: ignore[arg-type]
    sized = Graph((Input("x", InputKind.BATCH, spec),), (), ())
    with pytest.raises(ConfigError, match=r"line 1.*has a size that only the values"):
        parse_graph(graph_text(sized))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("%linear, 1)", "%linear, 1", "follows an argument"),
        ("%linear, 1)", "%linear, 1 2)", "follows an argument"),
        ("%linear, 1)", "%linear, ?)", "is no argument"),
        ("%linear, 1)", "%linear, float33)", "no constant of torch's"),
        ("%linear, 1)", "%linear, torch.nn)", "no constant of torch's"),
        ("%linear, 1)", "%linear, 1) hm", "is no end of a node"),
        ("aten.max.dim(", "aten.max.dim ", "is no node"),
        ("%cast: float32[2,3]", "%cast: float33[2,3]", "no dtype and shape"),
        ("%cast: float32[2,3]", "%cast: float32[2,-3]", "no dtype and shape"),
        ("batch %x", "bunch %x", "is no input, node or output"),
        ("result values", "reset values", "is no input, node or output"),
        ("%linear, 1)", "%line, 1)", "reads %line, which is not defined"),
    ],
)
def test_text_that_is_no_graph_is_refused(old: str, new: str, problem: str) -> None:
    text = graph_text(GRAPH)
    assert text.count(old) == 1
    with pytest.raises(ConfigError, match=problem):
        parse_graph(text.replace(old, new))
