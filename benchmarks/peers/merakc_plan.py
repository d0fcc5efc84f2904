"""merakc, as in its README, with the degrees given."""

from __future__ import annotations

import torch

from benchmarks.peers.training import Contestant, Training, adamw, plain_step
from merakc import auto_parallel  # its code is nobody's memory


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank, for "auto", which leaves open what can be, "overlap-2", or
    "torchs-products", whose products are those of the other contestants.
    """
    dp, tp, pp, parts = training.dp, training.tp, training.pp, training.micro_batches
    model, example = training.model(), training.batch(0, training.dp_rank(rank))
    if form == "torchs-products":
        torch.backends.mkldnn.set_flags(_enabled=False)
    overlap = int(form.removeprefix("overlap-")) if form.startswith("overlap-") else None
    model = auto_parallel(model, example, dp=dp, tp=tp, pp=pp, micro_batches=parts, overlap=overlap)
    optimizer = adamw(model.parameters())

    return Contestant(
        plain_step(model, optimizer), model.full_state_dict, model.plan.mesh.coordinates(rank)[0]
    )
