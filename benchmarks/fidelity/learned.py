"""The corrections of the cost model that measured steps speak for.

Few steps are measured and labels are many, so factors are held close to 1 (ridge regression on
logarithms; Hoerl and Kennard, Technometrics 12(1), 1970): one measured step moves its general
labels a little and its particular ones more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from merakc.costs.measured import Corrections

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
