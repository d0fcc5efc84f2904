"""The mesh, and the text form of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.ir.layout import parse_layout
from merakc.ir.program import Action, ActionKind, Collective, CollectiveKind, Mesh, Program

DEGREES = st.integers(1, 5)
MESHES = st.builds(Mesh, DEGREES, DEGREES, DEGREES, cp=DEGREES)


@given(MESHES)
def test_coordinates_undo_rank(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        dp, pp, lane = mesh.coordinates(rank)
        assert 0 <= dp < mesh.dp
        assert 0 <= pp < mesh.pp
        assert 0 <= lane < mesh.tp * mesh.cp
        assert mesh.rank(dp=dp, pp=pp, lane=lane) == rank


@given(MESHES, st.booleans())
def test_ranks_that_share_state_have_the_same_parts_of_weights(mesh: Mesh, experts: bool) -> None:
    """Of experts with as many parts as there are lanes; of others with one for each of tp."""
    mesh = replace(mesh, experts=experts)
    for of_experts, parts in ((False, mesh.tp), (True, mesh.weight_ranks)):
        seen = mesh.sharers(of_experts=of_experts)
        assert (seen.world_size, seen.lanes, seen.tp) == (mesh.world_size, mesh.lanes, parts)
        assert seen.state_ranks * parts == mesh.dp * mesh.lanes
        for rank in range(mesh.world_size):
            sharing = seen.sharing(rank)
            _, stage, lane = mesh.coordinates(rank)
            assert len(sharing) == seen.state_ranks
            assert sharing[seen.state_rank(rank)] == rank
            for other in sharing:
                _, its_stage, its_lane = mesh.coordinates(other)
                assert stage == its_stage
                assert lane % parts == its_lane % parts


def test_weights_of_experts_are_split_along_their_ranks() -> None:
    alone, both = Mesh(cp=2, experts=True), Mesh(tp=4, cp=2, experts=True)
    of_experts = [(alone, "8* x 3"), (alone, "3@1"), (both, "8*2/4 x 3"), (both, "8*2/4 x 8*4")]
    for mesh, text in of_experts:
        assert mesh.is_of_experts(parse_layout(text))
        assert not replace(mesh, experts=False).is_of_experts(parse_layout(text))
    for mesh, text in ((alone, "8 x 3"), (both, "8 x 3"), (both, "8*4 x 3")):
        assert not mesh.is_of_experts(parse_layout(text))


def test_tp_varies_fastest_then_pp_then_dp() -> None:
    mesh = Mesh(dp=2, tp=2, pp=3)
    assert mesh.world_size == 12
    assert [mesh.coordinates(rank) for rank in (0, 1, 2, 6)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
    ]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(ActionKind.FORWARD, 2, 0), "2F0"),
        (Action(ActionKind.BACKWARD, 2, 1), "2B1"),
        (Action(ActionKind.INPUT_GRAD, 0, 3), "0I3"),
        (Action(ActionKind.WEIGHT_GRAD, 0, 3), "0W3"),
        (Action(ActionKind.SEND, 2, 0, "add_7", 3), "send 2F0 add_7 -> 3"),
        (Action(ActionKind.RECV, 1, 0, "add_3", 1), "recv 1F0 add_3 <- 1"),
        (Action(ActionKind.SEND, 1, 4, "add_3", 1, 8, is_grad=True), "send 1B4 add_3 -> 1"),
        (Action(ActionKind.REDUCE, 1), "reduce 1"),
    ],
)
def test_text_form_of_an_action(action: Action, text: str) -> None:
    assert str(action) == text


def test_text_form_of_a_program() -> None:
    actions = (Action(ActionKind.FORWARD, 0), Action(ActionKind.SEND, 0, 0, "h", 1))
    assert str(Program(0, actions)) == "rank 0: 0F0; send 0F0 h -> 1"


def test_text_form_of_collectives() -> None:
    marks = (
        Collective(CollectiveKind.WAIT, "0:0", "linear"),
        Collective(CollectiveKind.GATHER, "0:1", "linear", 0.25),
    )
    actions = (
        Action(ActionKind.GATHER, 0, collectives=(Collective(CollectiveKind.REFRESH, "0:0"),)),
        Action(ActionKind.FORWARD, 0, 2, collectives=marks),
    )
    assert str(actions[1]) == "0F2"  # the label of its event
    assert str(Program(0, actions)) == (
        "rank 0: gather 0 [refresh 0:0]; 0F2 [wait 0:0 @ linear, gather 0:1 @ linear]"
    )


def test_a_send_and_its_receive_carry_the_same_message() -> None:
    send = Action(ActionKind.SEND, 0, 2, "h", peer=1, size_bytes=64, peer_stage=1)
    recv = Action(ActionKind.RECV, 1, 2, "h", peer=0, size_bytes=64, peer_stage=0)
    gradient = replace(recv, is_grad=True)
    assert send.message == recv.message
    assert send.message != gradient.message
