"""Factors from ledgers whose errors are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.costs.fitted import fit_factors
from merakc.errors import CalibrationError
from merakc.ir.ledger import Ledger, Modelled, Spent, StepLine
from merakc.machines.cluster import Factors
from tests.ir.test_ledger import HEADER

MODELLED = (Modelled(0, 0.01, 0.02, 0.001), Modelled(1, 0.02, 0.03, 0.0))


def ledger(
    forward: float, backward: float, wire: float, optimizer: float, split: bool = False,
    stretch: float = 1.0, name: str = "a",
) -> Ledger:  # fmt: skip
    """Steps of four micro-batches on two stages that take so many times what formulas say."""
    spent = []
    for own in MODELLED:
        waited_s = 4 * wire * own.wire_s
        forward_s = 4 * forward * own.forward_s * stretch
        backward_s = 4 * backward * own.backward_s * stretch
        spent.append(Spent(own.stage, "F", 4, forward_s + waited_s / 2, 9.0, waited_s / 2))
        if split:
            spent.append(
                Spent(own.stage, "I", 4, 0.75 * backward_s + waited_s / 2, 9.0, waited_s / 2)
            )
            spent.append(Spent(own.stage, "W", 4, 0.25 * backward_s, 9.0, 0.0))
        else:
            spent.append(Spent(own.stage, "B", 4, backward_s + waited_s / 2, 9.0, waited_s / 2))
        spent.append(Spent(own.stage, "recv", 4, 5.0, 5.0, 5.0))
    header = replace(HEADER, modelled=MODELLED, optimizer_s=0.01, stretch=stretch)
    steps = tuple(StepLine(k, 1.0, 0.01 * optimizer or None, tuple(spent)) for k in range(3))
    return Ledger(name, header, steps)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stretch", [1.0, 1.7])
def test_factors_are_what_steps_took_against_formulas(split: bool, stretch: float) -> None:
    own = ledger(1.5, 0.8, 3.0, 2.0, split, stretch)
    factors, fits = fit_factors([own], [own.steps])
    found = factors.forward, factors.backward, factors.collectives, factors.optimizer
    assert found == pytest.approx((1.5, 0.8, 3.0, 2.0))
    assert [fit.kind for fit in fits] == ["forward", "backward", "collectives", "optimizer"]
    assert fits[0].modelled_s == pytest.approx(4 * 0.03)
    assert "3 measured steps of 1 run:" in factors.source


def test_factors_correct_those_that_there_were() -> None:
    own = ledger(1.5, 1.0, 1.0, 1.0)
    hardware = replace(HEADER.hardware, factors=Factors(forward=2.0))
    own = replace(own, header=replace(own.header, hardware=hardware))
    assert fit_factors([own], [own.steps])[0].forward == pytest.approx(3.0)


def test_what_nothing_was_measured_of_stays() -> None:
    own = ledger(1.5, 0.8, 0.0, 0.0)
    factors, fits = fit_factors([own], [own.steps])
    assert (factors.collectives, factors.optimizer) == (1.0, 1.0)
    assert fits[2].measured_s == fits[3].measured_s == 0.0


def test_several_ledgers_have_the_same_weight() -> None:
    one, two = ledger(1.0, 1.0, 1.0, 0.0), ledger(4.0, 1.0, 1.0, 3.0)
    factors, _ = fit_factors([one, two], [one.steps, two.steps[:1]])
    assert factors.forward == pytest.approx(2.0)
    assert factors.optimizer == pytest.approx(3.0)


def test_ledgers_of_different_hardware_are_refused() -> None:
    one, two = ledger(1, 1, 1, 1), ledger(1, 1, 1, 1, name="b")
    two = replace(two, header=replace(two.header, hardware=replace(HEADER.hardware, name="z")))
    with pytest.raises(CalibrationError, match="b: was run on, or predicted for, other hardware"):
        fit_factors([one, two], [one.steps, two.steps])
    empty = replace(one, steps=(StepLine(0, 1.0, None, ()),))
    with pytest.raises(CalibrationError, match="tell of no compute"):
        fit_factors([empty], [empty.steps])
