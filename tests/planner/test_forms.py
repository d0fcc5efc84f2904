"""Which ways of sharing a micro-batch a search looks at."""

from __future__ import annotations

from merakc.ir.strategy import Form
from merakc.planner.forms import open_forms
from merakc.planner.request import Request

TENSORS = [Form(2), Form(2, sequence_parallel=True)]
SEQUENCES = Form(cp=2)


def test_sequences_are_shared_where_ranks_are_more_than_samples() -> None:
    assert list(open_forms(Request(2, 1), 2)) == [Form(1), SEQUENCES, *TENSORS]
    assert list(open_forms(Request(2, 0, total_batch_size=2), 2)) == [Form(1), *TENSORS]
    shared = [form for form in open_forms(Request(8, 1), 2) if form.cp > 1 and form.lanes == 8]
    assert shared == [Form(cp=8), Form(2, cp=4)]  # over nodes, with tp inside them


def test_a_degree_says_what_is_shared() -> None:
    assert list(open_forms(Request(2, 1, tp=2), 2)) == TENSORS
    assert list(open_forms(Request(2, 8).with_parts(2, None), 2)) == [SEQUENCES]
    assert list(open_forms(Request(2, 1).with_parts(1, None), 2)) == [Form(1), *TENSORS]


def test_experts_are_shared_where_there_are_any_and_nothing_says_what_is() -> None:
    experts = [Form(cp=2, expert_parallel=True)]
    experts += [Form(cp=4, expert_parallel=True)]
    found = [f for f in open_forms(Request(8, 8), 1, experts=4) if f.expert_parallel]
    assert found == experts  # over nodes, too
    assert list(open_forms(Request(2, 8, tp=2), 2, experts=4)) == TENSORS
    asked = Request(2, 8).with_parts(None, 2)
    assert list(open_forms(asked, 2, experts=4)) == [experts[0]]
    beside = Form(2, cp=2, expert_parallel=True)
    for more in (Request(4, 8), Request(4, 8).with_parts(None, 2)):  # with tp inside of nodes
        found = [f for f in open_forms(more, 2, experts=2) if f.expert_parallel]
        assert found == [experts[0], beside]
    assert beside not in list(open_forms(Request(4, 8), 1, experts=2))


def test_what_experts_get_goes_with_them() -> None:
    load = (0.5, 0.5)
    for asked in (Request(2, 8, expert_load=load), Request(2, 8).with_parts(None, 2, load)):
        loads = {f.expert_parallel: f.expert_load for f in open_forms(asked, 2, experts=2)}
        assert loads.pop(True) == load
        assert loads in ({}, {False: ()})
