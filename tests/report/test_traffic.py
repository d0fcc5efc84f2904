"""Communication by axis: bytes by hand, seconds as they are simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.program import Mesh
from merakc.ir.report import AxisTraffic
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_GPU, Cluster
from merakc.machines.cluster_files import preset
from merakc.planner.host_state import with_host_states
from merakc.report.traffic import ring_bytes
from tests.recorded import one_of_several
from tests.report.made import MICRO_BATCHES, SLOW, lowered, report
from tests.small_buckets import small_buckets
from tests.small_source import small

BYTES_PER_S = SLOW.link_bytes_per_s


def over(axis: str, made: Lowered, cluster: Cluster = SLOW) -> AxisTraffic:
    return next(t for t in report(made, cluster).traffic if t.axis == axis)


def two_layers(mesh: Mesh) -> Lowered:
    """8 -> 16 -> 8 on four samples a micro-batch."""
    model, batch = small()
    recording = one_of_several(model, batch)
    return make_plan(
        recording,
        Strategy().on(mesh, micro_batches=MICRO_BATCHES, batch_size=4 * MICRO_BATCHES),
        SLOW,
    )


def test_axes_of_one_rank_are_left_out() -> None:
    assert [t.axis for t in report().traffic] == ["tp", "pp", "dp"]
    assert [t.axis for t in report(lowered(Mesh(pp=2))).traffic] == ["pp"]
    assert report(lowered(Mesh())).traffic == ()


def test_tp_sums_the_second_product() -> None:
    """The batch needs no gradient, so that nothing is reduced in the backward."""
    found = over("tp", two_layers(Mesh(tp=2)))
    size_bytes = 4 * 8 * 4
    assert found.sent_bytes == MICRO_BATCHES * 2 * ring_bytes(size_bytes, 2)
    assert found.seconds > 0
    assert found.exposed_s == found.seconds


def test_parameters_come_from_the_host_in_every_forward_and_backward() -> None:
    made = lowered(Mesh(pp=2))
    plain = replace(made, prediction=predict(made, NOMINAL_GPU, dp_rank=0)[0])
    with small_buckets():
        fetched = with_host_states(plain, "parameters", NOMINAL_GPU)
        found = over("host", fetched, NOMINAL_GPU)
    held = [sum(b.numel * b.dtype.itemsize for b in own) for own in fetched.buckets]
    times = found.sent_bytes / held[found.rank]
    assert made.plan.micro_batches < times <= 2 * made.plan.micro_batches
    assert 0 < found.exposed_s <= found.seconds


def test_tp_that_runs_under_computation_is_hidden() -> None:
    made = lowered(Mesh(tp=2))
    blocking = over("tp", made)
    gain = 0.1
    plan = replace(made.plan, sub_batches=(2,))
    hidden = over("tp", replace(made, plan=plan, gains=(gain,)))
    assert hidden.seconds == pytest.approx(blocking.seconds)
    saved_s = gain * sum(r.compute_s for r in report(made).ranks)
    assert hidden.exposed_s == pytest.approx(blocking.exposed_s - saved_s)
    assert 0 < hidden.hidden_share < 1


def test_pp_sends_activations_and_their_gradients() -> None:
    made = two_layers(Mesh(pp=2))
    size_bytes = sum(t.size_bytes for t in made.stages.transfers if t.grad)
    assert size_bytes
    found = over("pp", made)
    assert found.sent_bytes == MICRO_BATCHES * size_bytes
    assert 0 < found.exposed_s <= found.seconds


def test_messages_that_take_no_time_are_not_waited_for() -> None:
    quick = replace(SLOW, link_bytes_per_s=1e18)
    assert over("pp", two_layers(Mesh(pp=2)), quick).exposed_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shards", [(1, 1, 1), (1, 1, 4), (1, 4, 4), (2, 4, 4), (4, 4, 4)])
def test_dp_takes_what_its_bytes_take(shards: tuple[int, int, int]) -> None:
    """Over links without latency seconds are bytes over the bandwidth."""
    made = lowered(Mesh(dp=4), shards=shards)
    _, simulation = predict(made, SLOW, dp_rank=0)
    found = over("dp", made)
    assert found.seconds == simulation.communication_s[0] > 0
    assert found.exposed_s == simulation.exposed_s[0]
    assert found.sent_bytes == pytest.approx(found.seconds * BYTES_PER_S, rel=1e-4)


def test_pp_sends_over_the_links_that_are_simulated() -> None:
    """Between ranks of a node, where a slower network joins the nodes."""
    hardware = preset("h100", 2)
    inner, outer = hardware.links[0], replace(hardware.links[-1], bytes_per_s=1e6)
    slow = replace(hardware, links=(inner, outer))
    made = two_layers(Mesh(pp=2))
    assert over("pp", made, slow.flat()) == over("pp", made, hardware.flat())
