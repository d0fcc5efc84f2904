"""Loss formulas as people write them, by family, and some that are made to mislead."""

from __future__ import annotations

from benchmarks.loss_formulas import (
    chosen,
    contrastive,
    derived,
    disguised,
    misleading,
    of_the_batch,
    of_torch,
    scaled,
    statistics,
)
from benchmarks.loss_formulas.formula import Formula

FORMULAS: dict[str, Formula] = {
    formula.name: formula
    for module in (
        of_torch,
        scaled,
        of_the_batch,
        chosen,
        contrastive,
        statistics,
        derived,
        misleading,
        disguised,
    )
    for formula in module.FORMULAS
}
