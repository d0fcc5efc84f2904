from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.runtime.codegen import Hooks, compile_graph, returns_tuple

CPU = torch.device("cpu")
SPEC = TensorSpec((2, 4), torch.float32)
HALF = TensorSpec((2, 2), torch.float32)


def node(name: str, op: str, *args: Any, outputs: tuple[TensorSpec, ...] = (SPEC,)) -> Node:
    return Node(name, op, args, (), outputs)


def graph(nodes: tuple[Node, ...], *outputs: Ref, inputs: tuple[str, ...] = ("x",)) -> Graph:
    made = Graph(
        tuple(Input(name, InputKind.BATCH, SPEC) for name in inputs),
        nodes,
        tuple(Output(str(ref), OutputKind.RESULT, ref) for ref in outputs),
    )
    made.verify()
    return made


def test_runs_calls_in_order_with_several_outputs() -> None:
    split = node("parts.0", "aten.split.Tensor", Ref("x"), 2, 1, outputs=(HALF, HALF))
    cat = node("cat", "aten.cat.default", (Ref("parts.0", 1), Ref("parts.0")), 1)
    add = Node("add", "aten.add.Tensor", (Ref("cat"), Ref("x")), (("alpha", 0.5),), (SPEC,))
    run = compile_graph(graph((split, cat, add), Ref("add"), Ref("parts.0", 1)), CPU)
    x = torch.arange(8.0).view(2, 4)
    total, second = run([x])
    assert torch.equal(total, torch.cat([x[:, 2:], x[:, :2]], 1) + 0.5 * x)
    assert torch.equal(second, x[:, 2:])


def test_numbers_without_a_literal() -> None:
    calls = (
        node("a", "aten.clamp.default", Ref("x"), -math.inf, math.inf),
        node("b", "aten.full_like.default", Ref("a"), math.nan),
        Node("c", "aten.to.dtype", (Ref("b"), torch.float64), (), (SPEC,)),
    )
    (found,) = compile_graph(graph(calls, Ref("c")), CPU)([torch.zeros(2, 4)])
    assert found.dtype == torch.float64
    assert found.isnan().all()


def test_tensors_are_made_on_the_device_that_is_asked_for() -> None:
    calls = (node("ones", "aten.ones.default", (2, 4)),)
    (found,) = compile_graph(graph(calls, Ref("ones"), inputs=()), torch.device("meta"))([])
    assert found.is_meta


def test_an_input_may_be_an_output() -> None:
    x = torch.zeros(2, 4)
    assert compile_graph(graph((), Ref("x")), CPU)([x])[0] is x


def test_values_are_freed_after_their_last_reader() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            alive.append(sum(ref() is not None for ref in seen))
            seen.append(weakref.ref(out))
            return out

    calls = tuple(
        node(f"n{k}", "aten.sin.default", Ref(f"n{k - 1}" if k else "x")) for k in range(5)
    )
    given = [torch.zeros(2, 4)]
    seen.append(weakref.ref(given[0]))
    run = compile_graph(graph(calls, Ref("n4")), CPU)
    with Watch():
        run(given)
    assert given == []
    assert alive == [1, 1, 1, 1, 1]


def test_lists_are_tuples_too() -> None:
    one = node("one", "aten.split.Tensor", Ref("x"), 4, 1)
    assert returns_tuple(one)
    assert not returns_tuple(node("neg", "aten.neg.default", Ref("x")))
    (found,) = compile_graph(graph((one,), Ref("one")), CPU)([torch.ones(2, 4)])
    assert torch.equal(found, torch.ones(2, 4))


def test_gradients_are_added_to_those_that_are_there() -> None:
    """By the product that makes them; a sum is handed out as it is."""
    square = TensorSpec((2, 2), torch.float32)
    nodes = (
        node("t", "aten.t.default", Ref("x"), outputs=(TensorSpec((4, 2), torch.float32),)),
        node("own", "aten.mm.default", Ref("x"), Ref("t"), outputs=(square,)),
        node("sum", "aten.add.Tensor", Ref("t"), Ref("t"), outputs=(square,)),
    )
    totals: dict[str, torch.Tensor] = {}
    sunk: dict[str, torch.Tensor] = {}
    names = {"%own": "own", "%sum": "sum"}
    made = graph(nodes, Ref("own"), Ref("sum"))
    assert {o.name for o in made.outputs} == names.keys()
    run = compile_graph(
        made,
        CPU,
        Hooks(
            lambda name: x, sunk.__setitem__, {}, names,
            lambda name: (totals.get(name), name in sunk), {"%own"},
        ),
    )  # fmt: skip
    x = torch.arange(8.0).view(2, 4)
    assert run([x]) == []
    first = sunk["own"]
    assert torch.equal(first, x @ x.t())
    assert torch.equal(sunk["sum"], 2 * x.t())
    totals["own"] = first
    run([x + 1])
    assert sunk["own"] is first
    assert torch.equal(first, x @ x.t() + (x + 1) @ (x + 1).t())
    sunk.clear()  # what is there is of another step
    run([x])
    assert sunk["own"] is first
    assert torch.equal(first, x @ x.t())


def test_autograd_is_left_out_where_no_call_may_need_it() -> None:
    """Seen by what a call is told: whether autograd's layers of the dispatcher would be run."""
    key = torch._C.DispatchKey.AutogradCPU
    left_out: list[bool] = []

    def ours(x: torch.Tensor) -> torch.Tensor:
        left_out.append(torch._C._dispatch_tls_is_dispatch_key_excluded(key))
        return x.clone()

    with torch.library._scoped_library("merakc_test_codegen", "DEF") as library:
        library.define("seen(Tensor x) -> Tensor")
        library.impl("seen", ours, "CPU")
        foreign = node("seen", "merakc_test_codegen.seen.default", Ref("x"))
        (found,) = compile_graph(graph((foreign,), Ref("seen")), CPU)([torch.ones(2, 4)])
    assert left_out == [False]  # it may differentiate something itself
    run = compile_graph(graph((node("neg", "aten.neg.default", Ref("x")),), Ref("neg")), CPU)
    weight = torch.nn.Parameter(torch.ones(2, 4))
    (found,) = run([weight])  # with gradients on: only the layers can have left them out
    assert not found.requires_grad
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def test_equal_ops_share_a_function_and_constants_are_made_once() -> None:
    calls = (
        node("a", "aten.view.default", Ref("x"), (4, 2)),
        node("b", "aten.view.default", Ref("a"), (2, 4)),
    )
    run = compile_graph(graph(calls, Ref("b")), CPU)
    inner = run.__closure__[0].cell_contents  # type: ignore[attr-defined]
    assert sum(name.startswith("f0") for name in inner.__globals__) == 1
    assert (4, 2) in inner.__defaults__[0]
