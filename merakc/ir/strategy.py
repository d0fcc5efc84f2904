"""How a job is trained in parallel: what a request may fix, a search decides and a plan carries."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from merakc.ir.precision import Precision
from merakc.ir.program import Degrees, Mesh
from merakc.ir.state import UNSHARDED, StateShards

AXES = tuple(field.name for field in fields(Degrees))
S = TypeVar("S", bound="Strategy")


class Form(NamedTuple):
    """How ranks share a micro-batch."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    expert_parallel: bool = False
    expert_load: tuple[float, ...] = ()

    def __str__(self) -> str:
        return " x ".join(f"{axis} {ranks}" for axis, ranks in self.degrees.items())

    @property
    def asked(self) -> str:
        """As arguments are written: `cp=2 tp=4`."""
        return " ".join(f"{axis}={ranks}" for axis, ranks in self.degrees.items())

    @property
    def axes(self) -> str:
        """What these are called: `cp x tp`."""
        return " x ".join(self.degrees)

    @property
    def lanes(self) -> int:
        """Their number."""
        return self.tp * self.cp

    @property
    def degrees(self) -> dict[str, int]:
        """The number of ranks by axis: of tp, and of cp, or ep where they share experts too, if
        there are several.
        """
        along = {"ep" if self.expert_parallel else "cp": self.cp} if self.cp > 1 else {}
        return along if along and self.tp == 1 else {**along, "tp": self.tp}


@dataclass(frozen=True, slots=True)
class Strategy(Degrees):
    """The ranks of each axis, and all that the planner decides before it looks at a graph.

    `batch_size` are the samples of a dp rank, in so many `micro_batches`. `schedule` names the
    order of work; `order` is that order, a text for each pipeline rank, where the name does not
    say it. `chunks` are the stages of a pipeline rank. With `sequence_parallel`, what tp leaves
    whole runs on parts of sequences. The ranks of cp split sequences, and hold the same
    parameters; with `expert_parallel` they share the experts as well, and their number is known as
    ep; `expert_load` is the share of the tokens that each expert gets, as seconds and memory are
    predicted, and without it all get as many. `recompute` says what a backward computes
    again. `state_shards` are those of parameters, gradients and optimizer state over dp, and over
    cp or ep, stage by stage; empty, none is sharded. Of experts, which dp ranks share alone, there
    are as many as these can share (`StateShards.within`). Without a `precision` the model computes
    in its own dtypes. `offload` names the kinds of tensors (`merakc.ir.offload`) of which some live
    on the host.
    """

    batch_size: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    order: tuple[str, ...] = ()
    chunks: int = 1
    sequence_parallel: bool = False
    expert_parallel: bool = False
    expert_load: tuple[float, ...] = ()
    recompute: str = "none"
    state_shards: tuple[StateShards, ...] = ()
    precision: Precision | None = None
    offload: str = "none"

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks."""
        return Mesh(self.dp, self.tp, self.pp, self.inner, self.cp, experts=self.expert_parallel)

    @property
    def state_ranks(self) -> int:
        """Over how many ranks the state of a stage may be sharded: those of dp, and of cp or ep."""
        return self.mesh.state_ranks

    @property
    def samples(self) -> int:
        """Those of a micro-batch."""
        return self.batch_size // self.micro_batches

    @property
    def stage_count(self) -> int:
        """Those of all pipeline ranks."""
        return self.pp * self.chunks

    @property
    def form(self) -> Form:
        """What the graph of a lane depends on, beside the samples."""
        share = self.cp, self.expert_parallel, self.expert_load
        return Form(self.tp, self.sequence_parallel, *share)

    @property
    def degrees(self) -> str:
        """As arguments are written: `dp=2 tp=4 pp=1`; with `cp=4` where sequences are split, and
        `ep=4` where experts are too.
        """
        return f"dp={self.dp} {self.form.asked} pp={self.pp}"

    @property
    def shown_degrees(self) -> str:
        """As a mesh: `dp 2 x tp 4 x pp 1`."""
        return f"dp {self.dp} x {self.form} x pp {self.pp}"

    @property
    def total_batch_size(self) -> int:
        """The samples of a step over all ranks."""
        return self.dp * self.batch_size

    @property
    def strategy(self) -> Strategy:
        """This alone, of a value that says more."""
        return Strategy(**{name: getattr(self, name) for name in DECISIONS})

    def shards(self, stage: int) -> StateShards:
        """How the state of a stage is sharded."""
        return self.state_shards[stage] if self.state_shards else UNSHARDED

    def on(self: S, mesh: Degrees, **decided: Any) -> S:
        """The same on other ranks, and with these decisions."""
        return replace(self, **{name: getattr(mesh, name) for name in AXES}, **decided)

    def __str__(self) -> str:
        chunks = f" of {self.chunks} stages a rank" if self.chunks > 1 else ""
        many = "micro-batch" if self.micro_batches == 1 else "micro-batches"
        parts = [self.degrees, f"{self.micro_batches:,} {many}"]
        if self.pp > 1:
            parts.append(f"{self.schedule}{chunks}")
        return ", ".join(parts)


NO_EXPERTS: dict[str, Any] = {"expert_parallel": False, "expert_load": ()}
DECISIONS = tuple(field.name for field in fields(Strategy))
