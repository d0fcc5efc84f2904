"""Metrics of torchmetrics that a loop holds itself: every sample counts once.

They add up what all ranks have seen, and the ranks of one dp replica have seen the same samples;
where models read whole batches, all ranks have.
"""

from __future__ import annotations

import gc
import sys
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

from merakc.errors import ConfigError
from merakc.train.steps import living


def count_once() -> None:
    """Has metrics add up over the ranks with other samples alone, where torchmetrics is in use."""
    if (found := sys.modules.get("torchmetrics.metric")) is not None:
        _adopt(found.Metric)


@cache
def _adopt(kind: Any) -> None:
    theirs = kind.sync

    @wraps(theirs)
    def sync(
        self: Any, dist_sync_fn: Any = None, process_group: Any = None, should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:  # fmt: skip
        given = process_group or self.process_group
        if should_sync and given is None and dist.is_initialized():
            given = _replicas()
            should_sync = given is not None
        theirs(self, dist_sync_fn, given, should_sync, distributed_available)

    kind.sync = sync


def _replicas() -> dist.ProcessGroup | None:
    """The ranks that have seen all samples between them; None where each has."""
    if len(found := _ways()) > 1:
        gc.collect()  # models of before, which nobody can reach
        found = _ways()
    if len(found) > 1:
        raise ConfigError(
            "a metric of torchmetrics is to be added up over ranks, and several models deal their "
            "samples to ranks in different ways: say over which, Metric(process_group=...), or "
            "that each rank has seen all samples, Metric(sync_on_compute=False)"
        )
    return found.pop()


def _ways() -> set[dist.ProcessGroup | None]:
    """Over which ranks the samples of each model that was called are dealt."""
    called = [steps for steps in living if steps.agreement.compared]
    found = {None if steps.whole else steps.groups.axis("dp") for steps in called}
    return found or {dist.group.WORLD}
