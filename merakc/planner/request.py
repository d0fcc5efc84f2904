"""What users ask for: a strategy of which anything may be left open."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from merakc.batches.split import divisors
from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.files.reading import read_text
from merakc.ir.batches import WHOLE_BATCH, BatchDims, Couplings
from merakc.ir.offload import NONE, parse_offload
from merakc.ir.plan_checks import MOST, check_recompute
from merakc.ir.precision import Precision
from merakc.ir.program import Inner, Mesh
from merakc.ir.state import AUTO, ShardsGiven, check_shards
from merakc.ir.strategy import DECISIONS, Strategy
from merakc.schedules.registry import NAMES
from merakc.schedules.text import format_schedule, parse_schedule

# Micro-batches a stage beyond which the pipeline's bubble is small: (p - 1) / (m + p - 1) < 20 %.
MICRO_BATCHES_PER_STAGE = 4
# Decisions that no request fixes by their names.
FOLLOWING = ("batch_size", "inner")
ACTION = re.compile(r"\b\d+[FBIWR]\d+\b")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user fixed of a `Strategy`, by the same names; None and "auto" are open.

    `batch_size` is one dp rank's. `order` is an order of work of the user's own, which `schedule`
    then names.
    """

    world_size: int
    batch_size: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    order: tuple[str, ...] = ()  # of work, a text for each pipeline rank
    recompute: str = "auto"
    sequence_parallel: bool | None = None
    cp: int | None = None
    expert_parallel: bool | None = None  # of cp's ranks
    expert_load: tuple[float, ...] = ()  # what share of the tokens each expert gets; all as many
    state_shards: ShardsGiven | None = None
    precision: Precision | None = None
    overlap: int | None = None  # parts of a micro-batch; 0 for collectives that block
    chunks: int | None = None  # stages a pipeline rank, of schedules that leave a choice
    couplings: Couplings = WHOLE_BATCH  # of the samples that the loss couples
    batch_dims: BatchDims = field(default_factory=dict)  # where samples stand in the batch
    inner: Inner = "pp"  # the axis of ranks that are closer, after those of tp
    offload: str = NONE  # what may live on the host (`merakc.ir.offload`)
    total_batch_size: int | None = None  # over all dp ranks; `batch_size` then follows from dp

    @property
    def fixed(self) -> dict[str, Any]:
        """The decisions that are not open, by name."""
        asked = {name: getattr(self, name) for name in DECISIONS if name not in FOLLOWING}
        if self.offload == NONE:  # it is for a plan that is given to say
            del asked["offload"]
        return {name: value for name, value in asked.items() if value not in (None, AUTO, ())}

    @property
    def makes_orders(self) -> bool:
        """Whether orders of work may be made for pipelines."""
        return self.schedule == AUTO and self.recompute in ("auto", "none")

    def decided(self, strategy: Strategy, *, state: bool = True) -> Request:
        """The request with everything fixed that a strategy decides; collectives block.

        Its recomputation stays as open as it was, and without `state` so do the shards; a schedule
        or shards that were asked for stay as they were said.
        """
        decided: dict[str, Any] = {name: getattr(strategy, name) for name in DECISIONS}
        decided["chunks"] = strategy.chunks if strategy.chunks > 1 else None
        for name in ("recompute", "order", "precision", "offload", "expert_load"):
            decided[name] = getattr(self, name)
        if self.schedule != AUTO:
            decided["schedule"] = self.schedule
        if not state or self.state_shards not in (None, AUTO):
            decided["state_shards"] = self.state_shards
        else:
            decided["state_shards"] = strategy.shards(0).counts
        return replace(self, **decided, total_batch_size=None, overlap=0)

    def with_parts(
        self, cp: int | None, ep: int | None, expert_load: Sequence[float] = ()
    ) -> Request:
        """The request for so many ranks that share sequences; `ep` of them share the experts too,
        to which tokens go in these proportions.

        Raises `ConfigError` where cp is asked for of another number than ep, sequence parallelism
        beside either, proportions that are none, or that nobody asks for.
        """
        if expert_load:
            if ep == 1 or (cp and ep is None):
                given = f"cp={cp}" if ep is None else "ep=1"
                raise ConfigError(f"expert_load and {given}: no ranks share experts; give ep")
            self = replace(self, expert_load=shares_of(expert_load))
        if cp is None and ep is None:
            return self
        axis, ranks = ("cp", cp) if ep is None else ("ep", ep)
        if ranks is None or ranks < 1:
            raise ConfigError(f"{axis} is {ranks}; a degree is at least 1")
        if cp is not None and cp != ranks:
            raise ConfigError(
                f"cp={cp} and ep={ep}: the ranks that share experts are those that share "
                "sequences; give one of them"
            )
        if ranks > 1 and self.sequence_parallel:
            raise ConfigError(
                f"{axis}={ranks} and sequence_parallel=True: sequences are split over {axis}, and "
                "not over tp as well; leave sequence_parallel out"
            )
        return replace(self, cp=ranks, expert_parallel=(axis == "ep" and ranks > 1) or None)

    def local_batch_size(self, dp: int) -> int | None:
        """Samples of each of `dp` ranks; None where their batch does not divide."""
        if self.total_batch_size is None:
            return self.batch_size
        each, left = divmod(self.total_batch_size, dp)
        return None if left else each


def shares_of(load: Sequence[float]) -> tuple[float, ...]:
    """Proportions as shares of one. Raises `ConfigError` for what is none."""
    total = sum(load)
    if not (all(0 <= n < math.inf for n in load) and total > 0):
        raise ConfigError(
            f"expert_load is {[*load]}: give how many tokens each expert gets, in any unit, of "
            "which one is more than 0"
        )
    return tuple(n / total for n in load)


def with_schedule(request: Request) -> Request:
    """The request with its schedule understood: a known name, or an order as text or in a file.

    Raises `ConfigError` for what is none of these and `ProgramError` for an order that cannot run.
    """
    text = request.schedule
    if text == "auto" or text in NAMES:
        return request
    name = "custom"
    if not ACTION.search(text):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(
                f"schedule {text!r} is not known, and no file; choose one of auto, "
                f"{', '.join(NAMES)}, or give an order of work such as '0F0 0B0; 1F0 1B0'"
            )
        try:
            text, name = read_text(path), path.stem
        except (OSError, ValueError) as error:
            raise ConfigError(f"schedule {text}: {error}; give a file of text") from error
    order = format_schedule(parse_schedule(text, name)).splitlines()
    return replace(request, schedule=name, order=tuple(order))


def meshes(request: Request) -> list[Mesh]:
    """All meshes of the world that agree with the request, without cp where it is left open. Raises
    `ConfigError` if none does.
    """
    fixed = {"dp": request.dp, "cp": request.cp, "tp": request.tp, "pp": request.pp}
    for name, value in fixed.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; a degree is at least 1")
    cp, experts = request.cp or 1, bool(request.expert_parallel)
    given_degrees = request.dp, request.tp, request.pp
    possible = [
        Mesh(dp, tp, pp, request.inner, cp, experts=experts)
        for dp, tp, pp in _factorisations(request.world_size // cp)
        if request.world_size % cp == 0
        and all(v is None or v == g for v, g in zip(given_degrees, (dp, tp, pp), strict=True))
    ]
    if not possible:
        given = " x ".join(f"{k}={v}" for k, v in fixed.items() if v is not None)
        raise ConfigError(
            f"{given} does not multiply to the {count_of(request.world_size, 'rank')} that were "
            "started; give degrees whose product is the number of ranks, or leave one of them None"
        )
    return possible


def check_request(request: Request, batch_size: int) -> None:
    """Raises `ConfigError` where what is fixed divides neither ranks nor batch, or is not known."""
    check_recompute(request.recompute)
    check_shards(request.state_shards)
    parse_offload(request.offload)
    for name, value in (("ranks", request.world_size), ("samples a step", batch_size)):
        if not 1 <= value <= MOST:
            raise ConfigError(f"{value} {name} were asked for; give 1 to {MOST}")
    dp, tp, pp, cp = request.dp, request.tp, request.pp, request.cp
    world, micro_batches = request.world_size, request.micro_batches or 1
    of_axes = ("dp", dp), ("cp", cp), ("tp", tp), ("pp", pp)
    fixed = [f"{k}={v}" for k, v in of_axes if v is not None and (k, v) != ("cp", 1)]
    rest, left = divmod(world, (tp or 1) * (pp or 1) * (cp or 1))
    if left or (dp and rest % dp) or (dp and tp and pp and dp != rest):
        raise ConfigError(
            f"{' x '.join(fixed)} does not multiply to {count_of(world, 'rank')}; give degrees "
            "whose product is the number of ranks, or divides it and leaves one open"
        )
    open_dp = [d for d in range(1, rest + 1) if rest % d == 0]
    possible = [dp] if dp else [rest] if tp and pp else open_dp
    if all(batch_size % (d * micro_batches) for d in possible):
        over = f"dp={possible[0]}" if len(possible) == 1 else "any dp"
        each = f" and into {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise ConfigError(
            f"a batch of {count_of(batch_size, 'sample')} does not divide over {over} of "
            f"{count_of(world, 'rank')}{each}; give a multiple of {possible[0] * micro_batches}, "
            "or other degrees"
        )


def micro_batches_for(request: Request, mesh: Mesh) -> int:
    """The user's number of micro-batches, or the divisor of the batch nearest 4 a stage."""
    if request.micro_batches is not None:
        if request.micro_batches < 1 or request.batch_size % request.micro_batches:
            raise ConfigError(
                f"a batch of {count_of(request.batch_size, 'sample')} does not divide into "
                f"{count_of(request.micro_batches, 'micro-batch')}: give micro_batches one of "
                f"{divisors(request.batch_size)}, or, where its samples do not stand in dim 0, "
                "batch_dims that say where"
            )
        return request.micro_batches
    if mesh.pp == 1:
        return 1
    wanted = MICRO_BATCHES_PER_STAGE * mesh.pp
    return min(divisors(request.batch_size), key=lambda d: (abs(d - wanted), -d))


def _factorisations(world: int) -> Iterator[tuple[int, int, int]]:
    for dp in range(1, world + 1):
        if world % dp == 0:
            for tp in range(1, world // dp + 1):
                if world // dp % tp == 0:
                    yield dp, tp, world // dp // tp
