from __future__ import annotations

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, Mesh, StageGraphs
from merakc.passes.autodiff.recompute import checkpointed
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.pipeline import differentiate
from merakc.passes.programs.schedule import build_programs
from merakc.runtime.pieces import Piece, Stage, message_specs
from merakc.schedules.text import parse_schedule

CPU = torch.device("cpu")
SPEC = TensorSpec((4, 4), torch.float64)


def chunk() -> StageGraphs:
    """y = sin(x a) b of a received x, with all pieces; it counts its calls in a buffer."""
    received = Input("x", InputKind.ACTIVATION, SPEC, "x", True)
    weights = [Input(n, InputKind.PARAMETER, SPEC, n, True) for n in "ab"]
    scale = Input("s", InputKind.BUFFER, SPEC, "s")
    nodes = (
        Node("scaled", "aten.mul.Tensor", (Ref("x"), Ref("s")), (), (SPEC,)),
        Node("xa", "aten.mm.default", (Ref("scaled"), Ref("a")), (), (SPEC,)),
        Node("sin", "aten.sin.default", (Ref("xa"),), (), (SPEC,)),
        Node("y", "aten.mm.default", (Ref("sin"), Ref("b")), (), (SPEC,)),
        Node("more", "aten.mul.Tensor", (Ref("s"), Ref("s")), (), (SPEC,)),
    )
    outputs = (
        Output("y", OutputKind.ACTIVATION, Ref("y")),
        Output("s", OutputKind.BUFFER, Ref("more")),
    )
    made = checkpointed(differentiate(Graph((received, *weights, scale), nodes, outputs)), ())
    input_grad, weight_grad = split_backward(made)
    return StageGraphs(
        made.forward, made.backward, made.checkpoint, made.recompute, input_grad, weight_grad
    )


def leaves(text: str) -> dict[str, set[str]]:
    """What later computes of micro-batch 0 take, for each of its computes, saved values as one."""
    stage = Stage(0, chunk(), build_programs(Mesh(), parse_schedule(text), [])[0], CPU)
    found = {}
    for kind in stage.orders[0]:
        piece = stage.piece(kind, 0)
        assert piece is not None
        found[str(kind)] = {"saved" if k.startswith("%") else k for k in piece.leaves}
    return found


def test_what_is_left_for_later_pieces() -> None:
    assert leaves("0F0 0B0") == {"F": {"saved", "s", "y"}, "B": set()}
    again = leaves("0F0 0R0 0B0")
    assert again == {"F": {"saved", "x", "s", "y"}, "R": {"saved", "s", "y"}, "B": set()}
    split = leaves("0F0 0I0 0W0")
    assert split == {"F": {"saved", "s", "y"}, "I": {"saved", "y"}, "W": set()}


def test_only_pieces_that_run_are_compiled() -> None:
    program = build_programs(Mesh(), parse_schedule("0F0 0I0 0W0 0F1 0R1 0B1"), [])[0]
    stage = Stage(0, chunk(), program, CPU)
    first, second = stage.piece(ActionKind.FORWARD, 0), stage.piece(ActionKind.FORWARD, 1)
    assert first is not None
    assert second is not None
    assert first.graph is stage.chunk.forward
    assert second.graph is stage.chunk.checkpoint
    assert (stage.orders[0], ActionKind.BACKWARD) not in stage.pieces
    assert stage.rewritten == ("s",)


def test_a_chunk_without_a_backward_runs_nothing_for_it() -> None:
    program = build_programs(Mesh(), parse_schedule("0F0 0B0"), [])[0]
    stage = Stage(0, StageGraphs(chunk().forward, None), program, CPU)
    assert stage.piece(ActionKind.BACKWARD, 0) is None
    assert stage.rewritten == ()


def test_the_shapes_of_messages() -> None:
    assert message_specs(chunk()) == {"x": SPEC, "y": SPEC}


def both() -> tuple[Stage, Piece, Piece]:
    """A stage with its forward and its backward."""
    program = build_programs(Mesh(), parse_schedule("0F0 0B0"), [])[0]
    stage = Stage(0, chunk(), program, CPU)
    forward, backward = (stage.piece(k, 0) for k in (ActionKind.FORWARD, ActionKind.BACKWARD))
    assert forward is not None
    assert backward is not None
    return stage, forward, backward


def test_where_values_come_from_and_go() -> None:
    _, forward, backward = both()
    for piece in (forward, backward):
        held = {i.name: name for i, name in zip(piece.given, piece.held, strict=True)}
        assert {n: held[n] for n in ("a", "b") if n in held} == {
            n: n for n in ("a", "b") if n in held
        }
        # The buffer that the forward writes: the micro-batch keeps its value from before.
        assert not [name for n, name in held.items() if n not in ("a", "b") and name is not None]
    names = [o.name for o in forward.returned]
    assert forward.routes.sent == ((names.index("y"), "y", False),)
    assert forward.routes.buffers == ((names.index("s"), "s"),)
    assert {name for _, name in forward.routes.saved} == set(names) - {"y", "s"}
    names = [o.name for o in backward.returned]
    assert backward.routes.sent == ((names.index("x"), "x", True),)
    assert backward.routes.gradients == ()  # they are added up by the products that make them


def test_products_add_up_gradients() -> None:
    """As many times as they run, in the memory of the first."""
    stage, forward, backward = both()
    generator = torch.Generator().manual_seed(0)
    a, b, s, x = (torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    values = {"a": a, "b": b, "s": s, "x": x}
    outs = forward.run([values[i.name] for i in forward.given])
    values |= {o.name: v for o, v in zip(forward.returned, outs, strict=True)} | {"s": s}
    tangent = {i.name for i in backward.given if i.kind is InputKind.TANGENT}
    values |= dict.fromkeys(tangent, torch.ones_like(x))
    wanted = torch.sin(x * s @ a).t() @ torch.ones_like(x)
    places = set()
    for times in (1, 2, 3):
        given = [values[i.name if i.name in values else i.key] for i in backward.given]
        assert len(backward.run(given)) == 1  # the gradient of x
        assert stage.sums.keys() == {"a", "b"}
        torch.testing.assert_close(stage.sums["b"], times * wanted)
        places.add(stage.sums["b"].data_ptr())
    assert len(places) == 1
