"""Bytes of state from buckets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.analysis.buckets import BucketSpec
from merakc.costs.work.memory import Sum
from merakc.costs.work.sharded import (
    StateBytes,
    read_at_once,
    state_bytes,
    sunk_gradients,
    whole_bytes,
)
from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
)
from merakc.ir.precision import NAMED
from merakc.ir.state import StateShards

P = 1000
BUCKET = BucketSpec("0:0", (0,), ("a", "b"), torch.float32, P, StateShards(), True, False)
MIXED = NAMED["bf16-mixed"]


def sharded(*counts: int) -> BucketSpec:
    return replace(BUCKET, shards=StateShards(*counts))


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 4), (1, 4, 4), (4, 4, 4), (2, 2, 4)])
def test_mixed_precision_has_a_master_and_two_states(counts: tuple[int, int, int]) -> None:
    """2P / s_p + 2P / s_g + 12P / s_os between two micro-batches."""
    s_p, s_g, s_os = counts
    found = state_bytes([sharded(*counts)], MIXED)
    assert found.kept_bytes == 2 * P // s_p + 12 * P // s_os
    assert found.parameter_bytes == 2 * P // s_p
    assert found.summed_bytes == 2 * P // s_g
    assert found.reduced_bytes == 4 * P // s_os
    assert found.gathered_bytes == (2 * P if s_p > 1 else 0)
    assert found.filling_bytes == (2 * P if s_g > 1 else 0)


def test_without_it_parameters_are_optimized_as_they_are() -> None:
    found = state_bytes([sharded(4, 4, 4)])
    assert found == StateBytes(4 * P // 4 + 8 * P // 4, 4 * P // 4, 4 * P, P, 4 * P, P)


def test_two_buckets_are_whole_at_a_time_and_one_is_filled() -> None:
    buckets = [replace(sharded(4, 4, 4), numel=n) for n in (10, 40, 30, 20)]
    found = state_bytes(buckets)
    assert (found.gathered_bytes, found.filling_bytes) == (4 * (40 + 30), 4 * 40)


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    frozen = replace(sharded(4, 4, 4), is_trained=False, dtype=torch.bfloat16)
    assert state_bytes([frozen], MIXED) == StateBytes(2 * P // 4, 2 * P // 4, 2 * P, 0, 0, 0)


def test_an_odd_shard_is_rounded_up() -> None:
    assert state_bytes([replace(sharded(1, 1, 4), numel=9)]).reduced_bytes == 3 * 4


def test_what_gradients_are_added_to() -> None:
    tied = replace(BUCKET, name="0+2:0", stages=(0, 2), members=("tied",), is_shared=True)
    other = replace(sharded(1, 4, 4), name="1+2:0", stages=(1, 2), members=("c",))
    frozen = replace(BUCKET, name="2:1", members=("frozen",), is_trained=False)
    found = sunk_gradients([BUCKET, tied, other, frozen], {0, 2}, MIXED)
    assert found.keys() == {0, 2}
    assert found[0].sums == (Sum(frozenset("ab"), 2 * P, reducing_bytes=4 * P),)  # cast
    assert (found[0].held_bytes, found[0].reduced_bytes) == (2 * P, 2 * 4 * P)
    assert found[2].sums == (Sum(frozenset("c"), 2 * P, True, 2 * P),)
    (plain,) = sunk_gradients([sharded(1, 1, 4)], {0})[0].sums
    assert (plain.size_bytes, plain.reducing_bytes) == (4 * P, 4 * P)
    assert (found[2].held_bytes, found[2].reduced_bytes) == (2 * P // 4, 4 * P // 4)


def test_what_a_graph_has_in_use_is_whole_with_the_buckets_at_its_ends() -> None:
    sizes = [(10, True), (40, False), (30, True), (20, True)]
    assert whole_bytes(sizes) == 40 + 30
    assert whole_bytes(sizes, read_bytes=25) == 25 + 30 + 25  # its own, the last's rest, the next
    assert whole_bytes(sizes, read_bytes=90) == 10 + 40 + 30 + 20  # and no more than there is
    assert whole_bytes([]) == 0
    buckets = [replace(sharded(4, 4, 4), numel=n) for n in (10, 40, 30, 20)]
    assert state_bytes(buckets, read_bytes=4 * 25).gathered_bytes == 4 * (25 + 40 + 25)


def test_parameters_are_in_use_from_their_first_reader_to_their_last() -> None:
    spec = TensorSpec((4,), torch.float32)
    given = [Input(name, InputKind.PARAMETER, spec, name) for name in "abc"]
    given.append(Input("x", InputKind.BATCH, spec, "x"))
    reads = [("1", "a", "x"), ("2", "b", "1"), ("3", "a", "2"), ("4", "c", "3")]
    nodes = [Node(n, "aten.mul.Tensor", (Ref(r), Ref(s)), (), (spec,)) for n, r, s in reads]
    graph = Graph(tuple(given), tuple(nodes), (Output("4", OutputKind.RESULT, Ref("4")),))
    assert read_at_once(graph) == 2 * spec.size_bytes  # a and b


def test_gradients_of_one_micro_batch_leave_for_the_host() -> None:
    buckets = [replace(BUCKET, numel=n, on_host=True) for n in (10, 40, 30, 20)]
    several, one = state_bytes(buckets, MIXED), state_bytes(buckets, MIXED, one=True)
    assert (several.summed_bytes, several.filling_bytes) == (2 * 100, 0)
    assert (one.summed_bytes, one.filling_bytes) == (0, 2 * (40 + 30))
    assert one.kept_bytes == several.kept_bytes == one.parameter_bytes == 2 * 100
    fetched = state_bytes([replace(b, fetched=True) for b in buckets], MIXED, one=True)
    assert (fetched.kept_bytes, fetched.gathered_bytes) == (0, 2 * (40 + 30 + 20))
    assert fetched.host_bytes == one.host_bytes + 2 * 100
