from __future__ import annotations

import pytest

from merakc.passes.overlap.list_scheduling import Task, list_schedule


def layers(part: str, count: int, compute_s: float, link_s: float) -> list[Task]:
    """A chain of computes, each followed by a collective."""
    found: list[Task] = []
    for k in range(count):
        after = (found[-1].name,) if found else ()
        found.append(Task(f"{part}{k}", after, compute_s, 0.0))
        found.append(Task(f"{part}{k} sum", (f"{part}{k}",), 0.0, link_s))
    return found


def test_one_chain_has_nothing_to_hide_under() -> None:
    end_s, order = list_schedule(layers("a", 4, 2.0, 1.0), 0)
    assert end_s == 4 * 3.0
    assert order[:3] == ("a0", "a0 sum", "a1")


@pytest.mark.parametrize(
    ("compute_s", "link_s", "wanted_s"),
    [
        (1.0, 1.0, 8 * 1.0 + 1.0),  # the last collective has nothing beside it
        (2.0, 1.0, 8 * 2.0 + 1.0),
        (1.0, 2.0, 1.0 + 8 * 2.0),  # nor has the first compute
    ],
)
def test_two_parts_hide_each_others_collectives(
    compute_s: float, link_s: float, wanted_s: float
) -> None:
    tasks = [*layers("a", 4, compute_s, link_s), *layers("b", 4, compute_s, link_s)]
    end_s, order = list_schedule(tasks, 0)
    assert end_s == pytest.approx(wanted_s)
    assert order[:6] == ("a0", "a0 sum", "b0", "b0 sum", "a1", "a1 sum")


def test_parts_reach_their_collectives_together_node_by_node() -> None:
    """A rank by the length of what follows would alternate, and idle before both collectives."""
    tasks = []
    for part in "ab":
        before: tuple[str, ...] = ()
        for k in range(3):
            tasks.append(Task(f"{part}{k}", before, 1.0, 0.0))
            before = (f"{part}{k}",)
        tasks.append(Task(f"{part} sum", before, 0.0, 3.0))
        tasks.append(Task(f"{part} end", (f"{part} sum",), 1.0, 0.0))
    end_s, order = list_schedule(tasks, 0)
    assert order[:8] == ("a0", "a1", "a2", "a sum", "b0", "b1", "b2", "b sum")
    assert end_s == 3 + 3 + 3 + 1


def backward(part: str, layers: int, link_s: float) -> list[Task]:
    """Each layer's weight gradient, which nobody waits for, input gradient, and its sum."""
    found: list[Task] = []
    for k in range(layers):
        after = (f"{part} sum{k - 1}",) if k else ()
        found.append(Task(f"{part} w{k}", after, 1.0, 0.0))
        found.append(Task(f"{part} i{k}", after, 1.0, 0.0))
        found.append(Task(f"{part} sum{k}", (f"{part} i{k}",), 0.0, link_s))
    return found


def test_weight_gradients_run_under_the_sums_of_input_gradients() -> None:
    end_s, order = list_schedule(backward("a", 4, 1.0), 0)
    assert end_s == 4 * 2.0
    assert order[:4] == ("a i0", "a sum0", "a w0", "a i1")


@pytest.mark.parametrize("lag", [0, 2])
def test_what_may_wait_does_so_for_some_depths_only(lag: int) -> None:
    _, order = list_schedule([*backward("a", 8, 0.1), *backward("b", 8, 0.1)], lag)
    place = {name: k for k, name in enumerate(order)}
    for part in "ab":
        for k in range(7 - lag):
            assert place[f"{part} i{k + lag}"] < place[f"{part} w{k}"] < place[f"b i{k + lag + 1}"]


def test_the_link_carries_one_collective_at_a_time_in_the_order_of_their_starts() -> None:
    tasks = [Task("x", (), 0.0, 2.0), Task("y", (), 0.0, 1.0), Task("z", ("y",), 1.0, 0.0)]
    end_s, order = list_schedule(tasks, 0)
    assert order == ("x", "y", "z")
    assert end_s == 2 + 1 + 1


def test_nothing_to_do() -> None:
    assert list_schedule([], 0) == (0.0, ())


def test_one_that_holds_the_link_waits_for_it_and_computes_alone() -> None:
    tasks = [
        Task("sum", (), 0.0, 5.0),
        Task("both", (), 3.0, 0.0, holds_link=True),
        Task("alone", (), 4.0, 0.0),
    ]
    end_s, order = list_schedule(tasks, 0)
    assert order == ("sum", "both", "alone")
    assert end_s == 5.0 + 3.0 + 4.0
