"""Corrections of the cost model by what was measured.

A measured step tells of the pieces that it was made of. What a piece shares with others are its
labels, from the general to the particular: that it is a block at tp = 2, that it is a block of this
width, that it has this many tokens. Each label has a factor; the labels of a piece multiply. A
label that was never measured has factor 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Corrections:
    """Logarithms of factors by label."""

    logs: Mapping[str, float] = field(default_factory=dict)

    def factor(self, labels: Sequence[str]) -> float:
        """What the modelled seconds of a piece with these labels are multiplied by."""
        return math.exp(sum(self.logs.get(label, 0.0) for label in labels))

    def is_measured(self, labels: Sequence[str]) -> bool:
        """Whether a measurement has told of a piece with these labels."""
        return any(label in self.logs for label in labels)


NONE = Corrections()
