"""Corrections of the cost model by what was measured.

A measured step tells of the pieces that it was made of. What a piece shares with others are its
labels, from the general to the particular: that it is a block at tp = 2, that it is a block of this
width, that it has this many tokens. Each label has a factor; the labels of a piece multiply. Few
steps are measured and labels are many, so factors are held close to 1 (ridge regression on
logarithms; Hoerl and Kennard, Technometrics 12(1), 1970): a label that was never measured has
factor 1, and one measured step moves its general labels a little and its particular ones more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# How far a factor may well be from 1, as the standard deviation of its logarithm: formulas of
# kernels and launches are good to 10 or 20 %, and what is general is right on average.
SPREAD = 0.15
GENERAL = 0.5
# How well the corrected model may fit a measured step; a step that is further off counts less.
NOISE = 0.02
# The rounds of linearising: a step is nearly linear in its pieces.
ROUNDS = 5
# The change of a factor's logarithm by which a step's dependence on it is measured.
NUDGE = 0.05


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


def learn(
    labels: Sequence[Sequence[Sequence[str]]],
    measured_s: Sequence[float],
    predict: Callable[[int, Corrections], float],
) -> Corrections:
    """The corrections that measured steps speak for.

    `labels[k]` are those of each kind of piece of step k, `predict(k, corrections)` its
    modelled seconds.
    """
    names = sorted({label for step in labels for own in step for label in own})
    particular = {own[-1] for step in labels for own in step if own}
    spread = np.array([SPREAD * (1.0 if name in particular else GENERAL) for name in names])
    place = {name: k for k, name in enumerate(names)}
    logs = np.zeros(len(names))
    for _ in range(ROUNDS):
        now = Corrections(dict(zip(names, map(float, logs), strict=True)))
        slopes = np.zeros((len(measured_s), len(names)))
        rest = np.zeros(len(measured_s))
        for k, seconds in enumerate(measured_s):
            base = math.log(predict(k, now))
            rest[k] = math.log(seconds) - base
            for label in {label for own in labels[k] for label in own}:
                more = Corrections({**now.logs, label: now.logs[label] + NUDGE})
                slopes[k, place[label]] = (math.log(predict(k, more)) - base) / NUDGE
        off = np.abs(rest) / NOISE
        weight = 1.0 / (NOISE * np.sqrt(np.maximum(off, 1.0)))  # Huber's: far ones count less
        left = np.vstack([slopes * weight[:, None], np.diag(1.0 / spread)])
        right = np.concatenate([(rest + slopes @ logs) * weight, np.zeros(len(names))])
        logs = np.linalg.lstsq(left, right, rcond=None)[0]
    return Corrections(dict(zip(names, map(float, logs), strict=True)))
