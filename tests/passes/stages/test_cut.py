"""Stages of abstract graphs: chains, encoder-decoders, towers and random ones."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.errors import CutError
from merakc.ir.report import CutReport
from merakc.passes.stages.cut import CutProblem, _contract, _moves, _refine, cut
from merakc.passes.stages.interval import cut_bytes, largest_load


def chain(weights_s: list[float], sizes: list[int] | None = None) -> CutProblem:
    """Each node reads the one before it."""
    sizes = sizes or [100] * len(weights_s)
    edges = tuple((i, i + 1, sizes[i]) for i in range(len(weights_s) - 1))
    return CutProblem(tuple(weights_s), edges)


def encoder_decoder(layers: int, size_bytes: int = 100) -> CutProblem:
    """`layers` encoder nodes, then as many decoder nodes that all read the last of them."""
    last = layers - 1
    edges = [(i, i + 1, size_bytes) for i in range(2 * layers - 1)]
    edges += [(last, i, size_bytes) for i in range(layers + 1, 2 * layers)]
    return CutProblem((1.0,) * (2 * layers), tuple(edges))


def interleaved_towers(layers: int, towers: int = 2, size_bytes: int = 100) -> CutProblem:
    """Chains recorded layer by layer in turn and joined at the end."""
    count = layers * towers
    edges = [(i, i + towers, size_bytes) for i in range(count - towers)]
    edges += [(i, count, size_bytes) for i in range(count - towers, count)]
    return CutProblem((1.0,) * count + (0.01,), tuple(edges))


def true_bytes(problem: CutProblem, stage: tuple[int, ...]) -> int:
    """Each value once per stage, other than its own, that reads it; written anew for the test."""
    sent = {(a, stage[b], size) for a, b, size in problem.edges if stage[a] != stage[b]}
    return sum(size for _, _, size in sent)


def check(
    problem: CutProblem,
    stages: int,
    tolerance: float = 0.03,
    speeds: list[float] | None = None,
) -> CutReport:
    """Cuts, and holds every promise to the result."""
    stage, report = cut(problem, stages, tolerance=tolerance, speeds=speeds)
    loads = [0.0] * stages
    for own, weight_s in zip(stage, problem.weights_s, strict=True):
        loads[own] += weight_s
    assert min(loads) > 0
    assert all(stage[a] <= stage[b] for a, b, _ in problem.edges)
    assert report.cut_bytes == true_bytes(problem, stage)
    speeds = speeds or [1.0] * stages
    most = max(load / speed for load, speed in zip(loads, speeds, strict=True))
    assert report.load == pytest.approx(most * sum(speeds) / sum(loads))
    assert report.load <= report.bound_load * (1 + tolerance) * (1 + 1e-9)
    assert report.cut_bytes <= report.metis_cut_bytes or report.load < report.metis_load
    return report


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    """Random graphs of up to 40 nodes, some of no weight and some of no size."""
    count = draw(st.integers(2, 40))
    weight_s = st.sampled_from([0.0, 1e-9, 0.5, 1.0, 30.0])
    weights_s = draw(st.lists(weight_s, min_size=count, max_size=count))
    sizes = draw(st.lists(st.sampled_from([0, 1, 64, 1 << 35]), min_size=count, max_size=count))
    pair = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = {(min(ends), max(ends)) for ends in draw(st.sets(pair, max_size=4 * count))}
    edges = tuple((a, b, sizes[a]) for a, b in sorted(pairs) if a < b)
    return CutProblem((1.0, *weights_s[1:]), edges)


# Multiples of the slowest, so that integers hold them; and none given.
SPEEDS = st.none() | st.lists(st.sampled_from([0.5, 1.0, 2.0, 8.0]), min_size=8, max_size=8)


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 8), SPEEDS)
def test_random_graphs_give_convex_stages_with_work(
    problem: CutProblem, stages: int, speeds: list[float] | None
) -> None:
    stages = min(stages, sum(weight_s > 0 for weight_s in problem.weights_s))
    check(problem, stages, speeds=speeds and speeds[:stages])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 2.0]), min_size=4, max_size=9),
    st.integers(2, 4),
    SPEEDS,
)
def test_bound_is_the_least_largest_load_of_intervals(
    weights: list[float], stages: int, speeds: list[float] | None
) -> None:
    weights[:4] = [1.0] * 4
    count, own = len(weights), (speeds or [1.0] * 8)[:stages]
    bounds = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
    least = min(
        max(sum(weights[a:b]) / speed for (a, b), speed in zip(pairwise(ends), own, strict=True))
        for ends in bounds
        if all(any(weights[a:b]) for a, b in pairwise(ends))
    )
    report = cut(chain(weights), stages, speeds=speeds and own)[1]
    assert report.bound_load == pytest.approx(least * sum(own) / sum(weights))


@pytest.mark.parametrize("speed", [1.0, 3.7])
def test_equal_speeds_change_nothing(speed: float) -> None:
    for problem in (interleaved_towers(16, 3), encoder_decoder(12)):
        for stages in (1, 3, 5):
            assert cut(problem, stages, speeds=[speed] * stages) == cut(problem, stages)


def test_a_stage_is_as_long_as_its_device_is_fast() -> None:
    stage, report = cut(chain([1.0] * 12), 3, speeds=[2.0, 1.0, 3.0])
    assert stage == (0,) * 4 + (1,) * 2 + (2,) * 6
    assert (report.load, report.bound_load) == (1.0, 1.0)


def test_chain_is_cut_evenly_and_by_the_dynamic_program() -> None:
    stage, report = cut(chain([1.0] * 12), 4)
    assert stage == (0,) * 3 + (1,) * 3 + (2,) * 3 + (3,) * 3
    assert (report.winner, report.cut_bytes) == ("dp", 300)
    assert report.load == pytest.approx(1.0)


def test_tolerance_buys_a_small_tensor_for_little_balance() -> None:
    logits = chain([1.0] * 49 + [0.5] + [1.0] * 51, [10] * 49 + [10_000] * 2 + [10] * 50)
    assert cut(logits, 2, tolerance=0.0)[1].cut_bytes == 10_000
    assert cut(logits, 2, tolerance=0.03)[1].cut_bytes == 10


def test_encoder_output_is_paid_once_per_decoder_stage() -> None:
    # One cut in each half, and one between them: the decoder's stages read the encoder's output.
    assert check(encoder_decoder(12), 4).cut_bytes == 100 + 100 + 2 * 100


@pytest.mark.parametrize(("towers", "stages"), [(2, 2), (2, 3), (2, 4), (2, 8), (3, 3), (3, 6)])
def test_metis_order_beats_program_order_on_interleaved_towers(towers: int, stages: int) -> None:
    problem = interleaved_towers(16, towers)
    report = check(problem, stages)
    assert report.winner == "metis"
    # Each tower is followed to its end: one value a cut, not one a tower.
    assert report.cut_bytes == 100 * max(stages - 1, towers - 1)


def test_refinement_moves_a_node_that_program_order_misplaces() -> None:
    # Node 1 shrinks a large value that is recorded early and read in the last stage only.
    weights_s = (1.0, 0.0, *([1.0] * 7))
    edges = ((0, 2, 500), (0, 8, 500), (1, 8, 900), *((i, i + 1, 10) for i in range(2, 8)))
    stage, report = cut(CutProblem(weights_s, edges), 2)
    assert stage[1] == stage[8] == 1
    assert report.cut_bytes == true_bytes(CutProblem(weights_s, edges), stage) <= 510


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(2, 5), st.data())
def test_refinement_ends_where_no_legal_move_saves_bytes(
    problem: CutProblem, stages: int, data: st.DataObject
) -> None:
    dag, _ = _contract(problem)
    count = len(dag.weights)
    picks = st.lists(st.integers(0, stages - 1), min_size=count, max_size=count)
    start = sorted(data.draw(picks))
    load = int(largest_load(dag, start, stages) * data.draw(st.sampled_from([1.0, 1.2])))
    edges = {(v.producer, reader) for v in dag.values for reader in v.readers}
    working = {start[node] for node in range(count) if dag.weights[node]}

    def legal(stage: list[int]) -> bool:
        forward = all(stage[a] <= stage[b] for a, b in edges)
        kept = {stage[node] for node in range(count) if dag.weights[node]} >= working
        return forward and kept and largest_load(dag, stage, stages) <= load

    refined = _refine(dag, start, [load] * stages)
    least = cut_bytes(dag, refined)
    assert legal(refined)
    assert least <= cut_bytes(dag, start)
    for node in range(count):
        for to in range(stages):
            moved = [*refined[:node], to, *refined[node + 1 :]]
            assert not legal(moved) or cut_bytes(dag, moved) >= least


def test_moves_count_nodes_in_a_stage_of_another_part() -> None:
    assert cut(interleaved_towers(16), 2)[1].metis_moves == 0
    assert _moves([0, 0, 1, 1, 1], [0, 0, 0, 1, 1]) == 1
    assert _moves([0, 0, 0, 0, 1], [0, 0, 1, 1, 2]) == 0


def test_grain_keeps_neighbours_together() -> None:
    free = chain([1.0] * 8, [100, 100, 100, 1, 100, 100, 100, 100])
    grain = (0, 0, 1, 1, 1, 1, 2, 2)
    stage, report = cut(CutProblem(free.weights_s, free.edges, grain), 2)
    assert stage in [(0,) * 2 + (1,) * 6, (0,) * 6 + (1,) * 2]
    assert report.cut_bytes == 100
    with pytest.raises(CutError, match="3 of its grains"):
        cut(CutProblem(free.weights_s, free.edges, grain), 4)


def test_too_many_stages_name_how_many_the_graph_can_give() -> None:
    problem = chain([1.0, 0.0, 2.0, 0.0, 3.0])
    assert sorted(set(cut(problem, 3)[0])) == [0, 1, 2]
    assert cut(chain([1.0, 1e-30, 1.0]), 3)[0] == (0, 1, 2)
    with pytest.raises(CutError, match=r"into 4 pipeline stages.*at most 3"):
        cut(problem, 4)
    with pytest.raises(CutError, match="into 0 pipeline stages"):
        cut(problem, 0)


def test_one_stage_takes_all_even_of_no_time() -> None:
    assert cut(chain([0.0, 0.0]), 1)[0] == (0, 0)
    assert cut(interleaved_towers(4), 1)[1].cut_bytes == 0


def test_equal_problems_are_cut_equally() -> None:
    assert cut(interleaved_towers(20, 3), 5, seed=7) == cut(interleaved_towers(20, 3), 5, seed=7)


def test_thousands_of_nodes_with_a_dominating_head() -> None:
    layers = [1e-4, 0.0, 0.0, 1e-6, 2e-4, 0.0] * 800
    report = check(chain([*layers, sum(layers) / 4], [100, 900, 900, 50, 900, 70] * 801), 32)
    assert report.bound_load == pytest.approx(0.2 * 32)
    assert report.cut_bytes == 31 * 50


def test_a_loss_of_nothing_is_refused() -> None:
    with pytest.raises(CutError, match="the loss follows from no operation on parameters"):
        cut(chain([]), 1)
