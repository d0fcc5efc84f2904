"""merakc, as in its README, with `state_shards`."""

from __future__ import annotations

from benchmarks.peers.training import Contestant, Training, adamw, plain_step
from merakc import auto_parallel  # its code is nobody's memory


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank, for "zero-0" to "zero-3"."""
    model = auto_parallel(
        training.model(), training.batch(0, rank), dp=training.dp, state_shards=form
    )
    step = plain_step(model, adamw(model.parameters()))
    return Contestant(step, model.full_state_dict)
