"""Which meshes and schedules a request has."""

from __future__ import annotations

from pathlib import Path

import pytest

from merakc.errors import ConfigError, ProgramError
from merakc.ir.program import Mesh
from merakc.planner.request import Request, meshes, micro_batches_for, with_schedule


def test_all_meshes_of_the_world_multiply_to_it() -> None:
    found = meshes(Request(12, 8))
    assert len(found) == len(set(found)) == 18
    assert all(mesh.world_size == 12 for mesh in found)


def test_fixed_degrees_are_kept() -> None:
    assert meshes(Request(8, 8, tp=2, pp=4)) == [Mesh(1, 2, 4)]
    assert {mesh.dp for mesh in meshes(Request(8, 8, dp=2))} == {2}


@pytest.mark.parametrize("degrees", [{"tp": 3}, {"dp": 2, "pp": 8}, {"dp": 1, "tp": 1, "pp": 1}])
def test_degrees_that_do_not_multiply_to_the_world_are_refused(degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="does not multiply to the 8 ranks"):
        meshes(Request(8, 8, **degrees))


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp is 0"):
        meshes(Request(8, 8, tp=0))


def test_micro_batches_divide_the_batch() -> None:
    assert micro_batches_for(Request(4, 8), Mesh(4, 1, 1)) == 1
    assert micro_batches_for(Request(2, 8), Mesh(1, 1, 2)) == 8
    assert micro_batches_for(Request(2, 24), Mesh(1, 1, 2)) == 8
    assert micro_batches_for(Request(4, 12), Mesh(1, 1, 4)) == 12
    assert micro_batches_for(Request(2, 8, micro_batches=4), Mesh(1, 1, 2)) == 4
    for wrong in (3, 0, 16):
        with pytest.raises(ConfigError, match=f"8 samples does not divide into {wrong} micro-"):
            micro_batches_for(Request(2, 8, micro_batches=wrong), Mesh(1, 1, 2))


def test_a_schedule_is_a_name_a_text_or_a_file(tmp_path: Path) -> None:
    text = "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"
    (tmp_path / "mine.txt").write_text(f"# by hand\n{text}")
    for given, name in ((text, "custom"), (str(tmp_path / "mine.txt"), "mine")):
        found = with_schedule(Request(2, 8, schedule=given))
        assert found.schedule == name
        assert found.order == ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert with_schedule(Request(2, 8, schedule="zb-v")).order == ()
    with pytest.raises(ConfigError, match="'2f2b' is not known, and no file; choose one of auto"):
        with_schedule(Request(2, 8, schedule="2f2b"))
    picture = tmp_path / "order.png"
    picture.write_bytes(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"order\.png: 'utf-8' codec .*; give a file of text"):
        with_schedule(Request(2, 8, schedule=str(picture)))
    with pytest.raises(ProgramError, match="0B1: is missing"):
        with_schedule(Request(2, 8, schedule="0F0 0F1 0B0; 1F0 1B0 1F1 1B1"))


def test_ranks_share_sequences_and_experts_beside_weights() -> None:
    assert Request(4, 8).with_parts(None, None) == Request(4, 8)
    shared = Request(4, 8).with_parts(2, None)
    assert (shared.tp, shared.cp) == (None, 2)
    assert [*map(str, meshes(Request(8, 8, tp=2).with_parts(2, None)))] == [
        *map(str, (Mesh(1, 2, 2, cp=2), Mesh(2, 2, 1, cp=2)))
    ]
    with pytest.raises(ConfigError, match="cp=2 x tp=4 does not multiply to the 4 ranks"):
        meshes(Request(4, 8, tp=4).with_parts(2, None))
    experts = Request(4, 8, tp=2).with_parts(None, 2)
    assert [*map(str, meshes(experts))] == [str(Mesh(1, 2, 1, cp=2, experts=True))]
    assert Request(4, 8).with_parts(None, 2).tp is None
    with pytest.raises(ConfigError, match="cp=2 and sequence_parallel=True: sequences"):
        Request(4, 8, sequence_parallel=True).with_parts(2, None)
    with pytest.raises(ConfigError, match="cp is 0; a degree is at least 1"):
        Request(4, 8).with_parts(0, None)


def test_what_experts_get_are_shares() -> None:
    assert Request(4, 8).with_parts(None, 2, [3, 1, 0]).expert_load == (0.75, 0.25, 0.0)
    for wrong in ([0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ConfigError, match="give how many tokens each expert gets"):
            Request(4, 8).with_parts(None, 2, wrong)
    with pytest.raises(ConfigError, match="ep=1: no ranks share experts; give ep"):
        Request(4, 8).with_parts(None, 1, [1.0, 2.0])
