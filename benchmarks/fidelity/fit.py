"""Predicts rows with the cost model, and finds its constants from some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.fidelity.data import Row, labels
from benchmarks.fidelity.learned import learn
from benchmarks.gpt import gpt_pieces
from merakc.costs.measured import NONE, Corrections
from merakc.costs.work.pieces import Piece
from merakc.machines.cluster import Hardware
from merakc.planner.estimate import Estimate, estimate_step


@dataclass(frozen=True, slots=True)
class Constants:
    """The four constants of a kind of GPU, as in its cluster file."""

    product_share: float
    traffic_share: float
    launch_s: float
    link_share: float


# Nothing is faster than its data sheet; launching takes between a microsecond (in a CUDA graph) and
# what a slow host's Python takes.
LEAST = Constants(0.2, 0.2, 1e-6, 0.1)
MOST = Constants(1.0, 1.0, 2e-4, 1.0)
# An error beyond which a row says less of the constants: a few measured steps are far off.
FAR = 0.05
# How closely a constant is held to where the fit begins, as a standard deviation of its logarithm:
# it decides where the rows do not.
HELD = 1.0
ERROR = 0.03


def constants_of(hardware: Hardware) -> Constants:
    """What a cluster file says."""
    device = hardware.slowest
    return Constants(
        device.product_share, device.traffic_share, device.launch_s, hardware.link_share
    )


def with_constants(hardware: Hardware, constants: Constants) -> Hardware:
    """The hardware with other constants."""
    nodes = tuple(
        replace(
            n,
            device=replace(
                n.device,
                product_share=constants.product_share,
                traffic_share=constants.traffic_share,
                launch_s=constants.launch_s,
            ),
        )
        for n in hardware.nodes
    )
    return replace(hardware, nodes=nodes, link_share=constants.link_share)


def predict(row: Row, hardware: Hardware, corrections: Corrections = NONE) -> Estimate:
    """The model's estimate of a row on so many nodes of a kind."""
    pieces = gpt_pieces(
        row.shape, row.micro_batch, row.strategy.tp, sequence_parallel=row.sequence_parallel
    )
    last = pieces[-1]

    def own(piece: Piece) -> tuple[str, ...]:
        if piece.path:
            return labels(row, "block")
        return labels(row, "head") if piece is last else ()

    return estimate_step(pieces, row.strategy, hardware, row.framework, corrections, own)


def errors(rows: Sequence[Row], hardware: Hardware, corrections: Corrections = NONE) -> np.ndarray:
    """Relative errors of the predicted steps."""
    return np.array([predict(r, hardware, corrections).step_s / r.step_s - 1 for r in rows])


def fit(rows: Sequence[Row], hardware: Hardware) -> Hardware:
    """The hardware with the four constants that suit these rows best."""

    def values(constants: Constants) -> np.ndarray:
        return np.log(
            [
                constants.product_share,
                constants.traffic_share,
                constants.launch_s,
                constants.link_share,
            ]
        )

    start = values(constants_of(hardware))

    def misses(x: np.ndarray) -> np.ndarray:
        changed = with_constants(hardware, Constants(*map(float, np.exp(x))))
        steps = [math.log(predict(r, changed).step_s / r.step_s) for r in rows]
        off = np.array(steps) / FAR
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) * FAR / ERROR
        return np.concatenate([soft, (x - start) / HELD])

    low, high = values(LEAST), values(MOST)
    found = least_squares(
        misses, np.clip(start, low + 1e-6, high - 1e-6), bounds=(low, high), diff_step=0.01,
        max_nfev=30,
    )  # fmt: skip
    return with_constants(hardware, Constants(*map(float, np.exp(found.x))))


def correct(rows: Sequence[Row], hardware: Hardware) -> Corrections:
    """What these rows say of their blocks and heads beyond the constants."""
    return learn(
        [(labels(row, "block"), labels(row, "head")) for row in rows],
        [row.step_s for row in rows],
        lambda k, corrections: predict(rows[k], hardware, corrections).step_s,
    )
