"""Fused graphs against the plain ones: values, memory, what is compiled once, what stays."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

import pytest
import torch

from merakc.errors import ConfigError
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.runtime import fused
from merakc.runtime.codegen import compile_graph
from merakc.runtime.fused import Fuser, check_compiler, to_fx, traces_doubles

CPU = torch.device("cpu")
SPEC = TensorSpec((4, 4), torch.float64)

compiles = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here"
)


def node(name: str, op: str, *args: Any, outputs: tuple[TensorSpec, ...] = (SPEC,)) -> Node:
    return Node(name, op, args, (), outputs)


def graph(*nodes: Node, outs: tuple[Ref, ...]) -> Graph:
    inputs = tuple(Input(n, InputKind.PARAMETER, SPEC, n) for n in ("x", "w", "v"))
    return Graph(inputs, nodes, tuple(Output(str(r), OutputKind.GRADIENT, r) for r in outs))


def layer(name: str, x: str, w: str) -> tuple[Node, ...]:
    return (
        node(f"{name}.p", "aten.mm.default", Ref(x), Ref(w)),
        node(f"{name}.t", "aten.tanh.default", Ref(f"{name}.p")),
        node(f"{name}.a", "aten.add.Tensor", Ref(f"{name}.t"), Ref(x)),
    )


def own_op(name: str, x: str) -> Node:
    """What the code generator must not see: it stays where it stands."""
    return node(name, "merakc.copy_to.default", Ref(x), "tp")


STACK = graph(
    *layer("a", "x", "w"), own_op("c", "a.a"), *layer("b", "c", "v"),
    node("parts", "aten.split.Tensor", Ref("b.a"), 2, 1,
         outputs=(TensorSpec((4, 2), torch.float64),) * 2),
    outs=(Ref("b.a"), Ref("parts", 1), Ref("a.t")),
)  # fmt: skip


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_runs_between_what_stays() -> None:
    STACK.verify()
    found = Fuser(CPU).fuse(STACK)
    found.verify()
    assert [n.op for n in found.nodes] == ["fused.0", "merakc.copy_to.default", "fused.1"]
    assert [o.name for o in found.outputs] == [o.name for o in STACK.outputs]
    assert found.specs()[found.outputs[1].ref] == TensorSpec((4, 2), torch.float64)


def test_equal_runs_share_a_function() -> None:
    calls = (*layer("a", "x", "w"), own_op("c", "a.a"), *layer("b", "c", "v"))
    fuser = Fuser(CPU)
    found = fuser.fuse(graph(*calls, outs=(Ref("b.a"),)))
    assert found.functions["fused.0"] is found.functions["fused.1"]
    again = fuser.fuse(graph(*layer("z", "w", "x"), outs=(Ref("z.a"),)))
    assert again.functions["fused.0"] is found.functions["fused.0"]
    other = fuser.fuse(graph(*layer("z", "w", "x"), outs=(Ref("z.t"),)))
    assert other.functions["fused.0"] is not found.functions["fused.0"]


def test_as_a_module_of_fx_it_computes_the_same() -> None:
    calls = tuple(n for n in STACK.nodes if n.name != "c")
    plain = graph(*calls, outs=(Ref("parts"), Ref("parts", 1))).renamed({Ref("c"): Ref("a.a")})
    zeros = Node("zeros", "aten.zeros.default", ((4,),), (("dtype", torch.float64),),
                 (TensorSpec((4,), torch.float64),))  # fmt: skip
    outputs = (*plain.outputs, Output("z", OutputKind.SAVED, Ref("zeros")))
    more = Graph(plain.inputs, (zeros, *plain.nodes), outputs)
    wanted = compile_graph(more, CPU)(values())
    found = to_fx(more, CPU)(*values())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@compiles
def test_compiled_it_computes_the_same() -> None:
    wanted = compile_graph(STACK, CPU)(values())
    run = compile_graph(Fuser(CPU).fuse(STACK), CPU)
    for _ in range(2):
        found = run(values())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    turned = [x.t().contiguous().t() for x in values()]  # other layouts, the same numbers
    for a, b in zip(run(turned), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@compiles
def test_what_is_given_is_not_checked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen

    def checks(_: object) -> None:
        raise AssertionError("it writes checks of what is given")

    monkeypatch.setattr(wrapper, "codegen_input_size_asserts", checks)
    calls = (*layer("a", "x", "w"), node("q", "aten.cos.default", Ref("a.a")))  # not yet known
    compile_graph(Fuser(CPU).fuse(graph(*calls, outs=(Ref("q"),))), CPU)(values())
    assert wrapper.codegen_input_size_asserts is checks


@compiles
def test_a_run_keeps_nothing_of_what_it_was_given() -> None:
    run = Fuser(CPU).fuse(graph(*layer("a", "x", "w"), outs=(Ref("a.a"),))).functions["fused.0"]
    for _ in range(2):
        given = values()[:2]
        run(given)
        assert given == []
    (function,) = run.made.values()  # type: ignore[attr-defined]
    assert function._boxed_call  # torch's own, which lets go of arguments on its way
    given = values()[:2]
    assert fused._emptying(lambda *own: list(own))(given)
    assert given == []


@compiles
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_traced_to_its_kernel(causal: bool) -> None:
    heads, rows = TensorSpec((2, 3, 8, 16), torch.float64), TensorSpec((2, 3, 8), torch.float64)
    inputs = tuple(Input(n, InputKind.SAVED, heads) for n in "qkv")
    forward = Node("f", "merakc.attention.default", (*map(Ref, "qkv"), None, causal, 0.25), (),
                   (heads, rows))  # fmt: skip
    backward = Node(
        "b", "merakc.attention_backward.default",
        (Ref("q"), *map(Ref, "qkv"), Ref("f"), Ref("f", 1), None, causal, 0.25), (), (heads,) * 3,
    )  # fmt: skip
    outs = (Ref("f"), *(Ref("b", k) for k in range(3)))
    made = Graph(inputs, (forward, backward),
                 tuple(Output(str(r), OutputKind.SAVED, r) for r in outs))  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 3, 8, 16, generator=generator, dtype=torch.float64) for _ in "qkv"]
    wanted = compile_graph(made, CPU)(list(given))
    found = compile_graph(Fuser(CPU).fuse(made), CPU)(list(given))
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    called = {n.target for n in to_fx(made, CPU).graph.nodes}
    assert (torch.ops.merakc.attention.default in called) != traces_doubles()


@compiles
def test_what_owns_its_memory_owns_it_when_compiled() -> None:
    """Equal values, of which the code generator makes one."""
    calls = (
        node("a", "aten.sin.default", Ref("x")),
        node("b", "aten.clone.default", Ref("a")),
        node("c", "aten.add.Tensor", Ref("a"), 0.0),
        node("d", "aten.sin.default", Ref("x")),
    )
    made = graph(*calls, outs=tuple(map(Ref, "abcd")))
    run = compile_graph(Fuser(CPU).fuse(made), CPU)
    for _ in range(2):
        found = run(values())
        assert len({x.untyped_storage().data_ptr() for x in found}) == 4
        assert all(torch.equal(x, values()[0].sin()) for x in found)


def test_without_a_compiler_the_user_is_told() -> None:
    import torch._inductor.config as config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ConfigError, match=r"C\+\+ compiler.*install g\+\+"):
        check_compiler(CPU)


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="Triton"):
        check_compiler(torch.device("cuda"))


def test_only_known_ops_are_fused() -> None:
    assert all(name.startswith("merakc.") for name in fused.CALLED)
    foreign = node("f", "somebody.own_op.default", Ref("x"))
    assert not fused._fuses(foreign)
