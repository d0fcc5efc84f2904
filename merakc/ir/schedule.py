"""The order of work of a pipeline, before messages: what every pipeline rank computes when."""

from __future__ import annotations

from dataclasses import dataclass

from merakc.ir.program import Action


@dataclass(frozen=True, slots=True)
class Schedule:
    """The compute actions of every pipeline rank, in order.

    `rank_of` gives the pipeline rank of each stage; a rank may hold several stages, as interleaved
    and V-shaped placements do. A micro-batch that a stage recomputes has a `RECOMPUTE` action, and
    its forward keeps the checkpoint alone; any other forward keeps all that the backward reads.
    Each micro-batch has one `BACKWARD` a stage, or an `INPUT_GRAD` and later a `WEIGHT_GRAD`.
    """

    name: str
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of stages, all virtual stages of all ranks."""
        return len(self.rank_of)
