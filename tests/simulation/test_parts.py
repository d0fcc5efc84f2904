"""The parts of an action."""

from __future__ import annotations

from merakc.costs.streams import Streams
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Action, ActionKind, Collective, CollectiveKind
from merakc.simulation.parts import Compute, Wait, parts_of


def test_it_computes_up_to_a_collective_and_waits_for_it() -> None:
    gather, wait = CollectiveKind.GATHER, CollectiveKind.WAIT
    own = Collective(gather, "a", share=0.25), Collective(wait, "a", share=0.5)
    costs = CostTable((StageCost(8.0, 0.0),), 0.0, 1.0, collective_s={("a", gather): 3.0})
    action = Action(ActionKind.FORWARD, 0, collectives=own)
    found = list(parts_of(action, 8.0, costs, Streams()))
    assert found == [Compute(2.0), Compute(2.0), Wait(3.0), Compute(4.0)]
