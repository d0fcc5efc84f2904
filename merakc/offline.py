"""Plans made without ranks: for so many of them, and so many samples over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from merakc.batches import batch_size_of, call_arguments
from merakc.cluster import Cluster
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.ir.plan import Plan
from merakc.planner import Lowered
from merakc.recording import record_part
from merakc.search import Request, search
from merakc.sources import Source


def plan_offline(
    source: Source,
    request: Request,
    batch_size: int,
    cluster: Cluster,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, Lowered]:
    """The plan with the shortest step for `batch_size` samples over all ranks.

    `request.batch_size` is left to be found: each dp degree that divides the batch is tried.
    `progress` is told what is being done. Raises `ConfigError` where no degree divides the batch,
    and the first error of the search where none of them gives a plan.
    """
    degrees = [request.dp] if request.dp else range(1, request.world_size + 1)
    degrees = [dp for dp in degrees if request.world_size % dp == 0]
    fitting = [dp for dp in degrees if batch_size % dp == 0]
    if not fitting:
        raise ConfigError(
            f"a batch of {batch_size} samples does not divide over dp={request.dp} of "
            f"{request.world_size} ranks; give a batch that is a multiple of dp"
        )
    recordings: dict[int, Recording] = {}

    def recorded(local: int, parts: int) -> Recording:
        samples = local // parts
        if samples not in recordings:
            progress(f"recording {source.name} with {samples} samples")
            args, kwargs = call_arguments(source.batch(samples))
            assert batch_size_of(args, kwargs) == samples, "a source gives as many as it is asked"
            cpu = torch.device("cpu")
            recordings[samples] = record_part(source.model, args, kwargs, 1, cpu, request.precision)
        return recordings[samples]

    best: tuple[Plan, Lowered] | None = None
    first_error: MerakError | None = None
    for dp in fitting:
        local = batch_size // dp
        progress(f"searching dp={dp}")
        asked = replace(request, dp=dp, batch_size=local)
        try:
            found = search(asked, partial(recorded, local), cluster)
        except MerakError as error:
            first_error = first_error or error
            continue
        if best is None or _rank(found[0], cluster) < _rank(best[0], cluster):
            best = found
    if best is None:
        assert first_error is not None
        raise first_error
    return best


def _rank(plan: Plan, cluster: Cluster) -> tuple[bool, float]:
    """Plans that fit come first, and then the faster ones."""
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes) > cluster.memory_bytes, plan.prediction.step_s
