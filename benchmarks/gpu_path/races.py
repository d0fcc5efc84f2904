"""Real training on many layouts with its races looked for, and with what is put in to be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

import merakc
from benchmarks.gpu_path.recording import Issued, Recorder
from benchmarks.ranks import run_ranks
from merakc.analysis.calls import Call, step_calls
from merakc.kernels.collectives import Pending
from merakc.kernels.host import Moving
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU
from merakc.runtime.messages import Messages, _PolledSends
from merakc.runtime.shards import Bucket
from merakc.runtime.streams import Running
from merakc.train.model import ParallelModel

WORDS, HIDDEN, LENGTH, SAMPLES, STEPS = 48, 16, 4, 16, 2


class Block(nn.Module):
    """Two products with a norm before and the input added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Words, four blocks, the first one's result added to the last one's, and tied words again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of ids `[samples, length]`."""
        x = first = self.blocks[0](self.words(ids))
        for block in self.blocks[1:]:
            x = block(x)
        logits = F.linear(x + first, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Layout:
    """Degrees and options of `auto_parallel`."""

    dp: int
    tp: int
    pp: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Their number."""
        return self.dp * self.tp * self.pp

    @property
    def is_sharded(self) -> bool:
        """Whether dp ranks hold parts of any state."""
        return self.dp > 1 and self.options.get("state_shards", "zero-0") != "zero-0"

    def __str__(self) -> str:
        untold = "micro_batches", "cluster"
        told = ", ".join(f"{k} {v}" for k, v in self.options.items() if k not in untold)
        return f"dp{self.dp} tp{self.tp} pp{self.pp}{': ' * bool(told)}{told}"


def _layouts() -> Iterator[Layout]:
    some = {"micro_batches": 4}
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2", "merak"):
        yield Layout(1, 1, 2, some | {"schedule": schedule})
    for schedule in ("interleaved-1f1b", "zb-v", "v-half", "v-min"):
        yield Layout(1, 1, 2, some | {"schedule": schedule})
    for precision in (None, "bf16-mixed"):
        own = some if precision is None else some | {"precision": precision}
        for shards in ("zero-0", "zero-1", "zero-2", "zero-3"):
            yield Layout(2, 1, 1, own | {"state_shards": shards})
            yield Layout(2, 1, 2, own | {"state_shards": shards, "schedule": "1f1b"})
    for shards in ((1, 2, 2), (2, 2, 4), (1, 1, 2), (2, 2, 2), (2, 4, 4)):
        yield Layout(4, 1, 1, some | {"state_shards": shards})
    for overlap in (0, 1, 2):
        for sequence in (False, True):
            more = {"micro_batches": 2, "overlap": overlap, "sequence_parallel": sequence}
            yield Layout(1, 2, 1, more)
    yield Layout(1, 2, 2, some | {"schedule": "1f1b", "overlap": 1})
    yield Layout(2, 2, 1, some | {"state_shards": "zero-2", "overlap": 1})
    yield Layout(2, 2, 1, some | {"state_shards": "zero-3", "sequence_parallel": True})
    yield Layout(2, 1, 2, some | {"state_shards": "zero-3", "schedule": "zb-h1"})
    yield Layout(2, 1, 2, some | {"state_shards": "zero-2", "schedule": "interleaved-1f1b"})
    yield Layout(1, 1, 2, some | {"schedule": "1f1b", "precision": "bf16-mixed"})
    yield Layout(1, 2, 1, {"micro_batches": 2, "precision": "bf16-mixed"})
    # Ordered by the figures of a GPU, whose copies take a while.
    moved = {"offload": "activations", "recompute": "none", "cluster": NOMINAL_GPU}
    yield Layout(1, 1, 1, {"micro_batches": 2, **moved})
    yield Layout(1, 1, 2, some | moved | {"schedule": "zb-h1", "offload": "activations, 8 KiB"})
    yield Layout(1, 2, 1, {"micro_batches": 1, "overlap": 2, **moved})
    yield Layout(2, 1, 1, {"micro_batches": 2, "state_shards": "zero-2", **moved})
    fetched = {"offload": "parameters", "cluster": NOMINAL_GPU}
    yield Layout(1, 1, 2, some | fetched | {"schedule": "1f1b"})
    whole = fetched | {"state_shards": "zero-0"}
    yield Layout(2, 1, 1, {"micro_batches": 2, "precision": "bf16-mixed", **whole})
    yield Layout(2, 1, 1, {"micro_batches": 2, "state_shards": "zero-3", **fetched})


LAYOUTS = tuple(_layouts())

# ---------------------------------------------------------------------- sabotages


@dataclass(frozen=True)
class Sabotage:
    """Something left out of the runtime, on the layouts that it concerns."""

    concerns: Callable[[Layout], bool]
    put_in: Callable[[Recorder], AbstractContextManager[Any]]


def _deaf(owner: Any, name: str, when: Callable[[Any], bool] = lambda _: True) -> Any:
    """Waits inside a method count nothing, as if they were not there."""

    def put_in(recorder: Recorder) -> AbstractContextManager[Any]:
        real = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            if not when(self):
                return real(self, *args)
            with recorder.unheard():
                return real(self, *args)

        return patch.object(owner, name, call)

    return put_in


def _apart(recorder: Recorder) -> AbstractContextManager[Any]:
    """What runs aside does not wait for the computing."""
    return patch.object(recorder, "joins_computing", False)


def _unheld(_: Recorder) -> AbstractContextManager[Any]:
    """What is sent is let go of at once."""

    def add(self: Any, work: Any, value: torch.Tensor, _action: Any) -> None:
        self.left.append((work, torch.empty(0)))

    return patch.object(_PolledSends, "add", add)


def _written(_: Recorder) -> AbstractContextManager[Any]:
    """What is sent is written."""
    real = Messages.send

    def send(self: Messages, position: int, action: Any, value: torch.Tensor) -> None:
        real(self, position, action, value)
        value.add_(0)

    return patch.object(Messages, "send", send)


def _unlent(_: Recorder) -> AbstractContextManager[Any]:
    """What a reduction reads is let go of at once."""
    return patch.object(Running, "lend", lambda self, tensor: tensor)


def _added(_: Recorder) -> AbstractContextManager[Any]:
    """The next micro-batch's gradients are added to what is being reduced."""
    real = Bucket._take_sum

    def take(self: Bucket) -> torch.Tensor:
        self.sum = kept = real(self)
        return kept

    return patch.object(Bucket, "_take_sum", take)


def _has_dp(layout: Layout) -> bool:
    return layout.dp > 1


def _has_pp(layout: Layout) -> bool:
    return layout.pp > 1


def _has_tp(layout: Layout) -> bool:
    return layout.tp > 1


def _gathers(running: Running) -> bool:
    return running.streams is None


def _reduces(running: Running) -> bool:
    return running.streams is not None


def _scatters(layout: Layout) -> bool:
    shards = layout.options.get("state_shards", "")
    return shards in ("zero-2", "zero-3") or (not isinstance(shards, str) and shards[1] > 1)


def _moves(layout: Layout) -> bool:
    return "activations" in layout.options.get("offload", "")


def _gathered(layout: Layout) -> bool:
    """By calls that are not issued aside, with the reductions."""
    return layout.is_sharded != (layout.options.get("offload") == "parameters")


SABOTAGES: dict[str, Sabotage] = {
    "a graph does not wait for its collective": Sabotage(_has_tp, _deaf(Pending, "wait")),
    "what is received is not waited for": Sabotage(_has_pp, _deaf(Messages, "receive")),
    "what is sent is let go of": Sabotage(_has_pp, _unheld),
    "what is sent is written": Sabotage(_has_pp, _written),
    "reductions do not wait for gradients": Sabotage(_has_dp, _apart),
    "steps of reductions are not waited for": Sabotage(_has_dp, _deaf(Running, "start", _reduces)),
    "reductions are not waited for": Sabotage(_has_dp, _deaf(Running, "finish", _reduces)),
    "what a reduction reads is let go of": Sabotage(lambda x: x.is_sharded, _unlent),
    "gathered parameters are not waited for": Sabotage(
        _gathered, _deaf(Running, "finish", _gathers)
    ),
    "gradients are added to what is reduced": Sabotage(_scatters, _added),
    "moves to the host and back are not waited for": Sabotage(_moves, _deaf(Moving, "wait")),
}

# ---------------------------------------------------------------------- trials


@dataclass
class Found:
    """What was found on a layout: faults of clean steps, and whether what was put in was."""

    layout: str
    faults: list[str]
    caught: dict[str, bool]


def _train(model: ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = slice(*(k * SAMPLES // model.data_parallel_size for k in
                   (model.data_parallel_rank, model.data_parallel_rank + 1)))  # fmt: skip
    loss = model(ids[rows], ids[rows])
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _expected(model: ParallelModel) -> list[Issued]:
    """The calls of a step's Program as they are proven to end, but for those over tp."""
    steps = model._own("_steps")
    step = next(iter(steps.compiled.values()))
    events = step_calls(step.executor.program, step.lowered.wiring())
    return [
        (tuple(sorted(e.communicator.ranks)), e.is_message)
        for e in events
        if isinstance(e, Call) and not e.what.endswith("over tp")
    ]


Faults = dict[str, int]


def of_rank(
    layout: Layout, kinds: Sequence[str]
) -> tuple[list[str], list[Issued], dict[str, Faults]]:
    """The faults of clean steps of this rank, its calls, and the faults under each sabotage."""
    torch.manual_seed(0)
    recorder, said = Recorder(), []
    with recorder.attached():
        degrees = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
        each = torch.zeros(SAMPLES // layout.dp, LENGTH, dtype=torch.long)
        options = {"cluster": NOMINAL_CPU, **degrees, **layout.options}
        model = merakc.auto_parallel(Net(), (each, each), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with recorder.recording():
            losses += [_train(model, optimizer) for _ in range(STEPS)]
        issued = [*recorder.issued]
        said += [f"{text} ({n} times)" for text, n in recorder.clocks.faults.items()]
        if recorder.syncs:
            said.append(f"the host waits {recorder.syncs} times in Programs")
        first = model.rank - model.rank % layout.tp
        over_tp = tuple(range(first, first + layout.tp)), False
        made = [call for call in recorder.of_program if call != over_tp]
        if made != (wanted := _expected(model)):
            said.append(f"calls {made} where {wanted} are proven to end")
        if not losses[-1] < losses[0]:
            said.append(f"losses {losses}")
        caught = {}
        for kind in kinds:
            recorder.clocks.faults.clear()
            with SABOTAGES[kind].put_in(recorder), recorder.recording():
                for _ in range(STEPS):
                    _train(model, optimizer)
            caught[kind] = dict(recorder.clocks.faults)
            with recorder.recording():  # nothing of it is left
                _train(model, optimizer)
    return said, issued, caught


def trial(layout: Layout) -> Found:
    """Trains on a layout, and again with everything put in that concerns it."""
    kinds = [k for k, s in SABOTAGES.items() if s.concerns(layout)]
    ranks = run_ranks(layout.ranks, of_rank, layout, kinds)
    faults = [f"rank {r}: {text}" for r, (said, *_) in enumerate(ranks) for text in said]
    for (r, one), (s, other) in combinations(enumerate(own[1] for own in ranks), 2):
        mine = [ranks for ranks, is_message in one if {r, s} <= {*ranks} and not is_message]
        theirs = [ranks for ranks, is_message in other if {r, s} <= {*ranks} and not is_message]
        if mine != theirs:
            faults.append(f"ranks {r} and {s} call in different orders: {mine}, {theirs}")
    caught = {kind: any(own[2][kind] for own in ranks) for kind in kinds}
    return Found(str(layout), faults, caught)
