"""The model that `auto_parallel` returns: one rank's parameters, the whole step behind a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.calls.around import check_around
from merakc.frontend.python.plain_tensors import keep_attributes
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.ir.program import CollectiveEvent, Event
from merakc.runtime.health.job import call
from merakc.runtime.part import Place, TensorPart, place_of, plain
from merakc.simulation.simulate import Simulation
from merakc.train.calls import check_frozen, check_trained, model_call
from merakc.train.compiled_step import CompiledStep, Form
from merakc.train.data.lent import Lent
from merakc.train.expectations.bookkeeping import Bookkeeper
from merakc.train.mirror import grow, part_at
from merakc.train.nonfinite import find_nonfinite, raise_nonfinite
from merakc.train.outputs import HandOut, check_finite, loss_name, names_of
from merakc.train.outside.caches import asked_for, cache_in
from merakc.train.outside.called import Called
from merakc.train.outside.deferred import of_evaluation, values_in
from merakc.train.outside.forwards import Forwards
from merakc.train.outside.pending import Pending
from merakc.train.outside.values import Taken
from merakc.train.outside.within import Adapted
from merakc.train.parameters.allocate import copied
from merakc.train.parameters.elements import follow, told_buffers
from merakc.train.parameters.guard import guard_torch, refuse_in_methods
from merakc.train.parameters.matrices import Home
from merakc.train.parameters.memory import Memory
from merakc.train.parameters.norms import Owners, total_norm
from merakc.train.parameters.optimizers import hold
from merakc.train.parameters.places import check_given, load_all, stand_in
from merakc.train.parameters.replicas import Replicas
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]


class ParallelModel(Forwards):
    """One rank's part of a model under a plan.

    `parameters()`, `named_parameters()` and `state_dict()` are of this rank's shards, under the
    model's own names. A call in training mode runs the whole schedule, forward and backward, and
    returns the loss of the whole batch on every rank; `loss.backward()` hands out the gradients.
    """

    def __init__(
        self,
        steps: Steps,
        aliases: Mapping[str, str],
        simulation: Simulation | None,
        book: Bookkeeper | None = None,
        again: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(steps.source)
        vars(self).update(_steps=steps, _reads_whole=False, _lent=Lent(steps.groups), _again=again)
        grow(self, self._known())
        self._run_by(steps, aliases, simulation, book)

    def _run_by(
        self,
        steps: Steps,
        aliases: Mapping[str, str],
        simulation: Simulation | None,
        book: Bookkeeper | None,
    ) -> None:
        """Has these steps, and the tensors that they read, in the place of any before."""
        own = vars(self)  # nothing of ours may look like a child of the model
        own |= {"_steps": steps, "_aliases": dict(aliases), "_simulation": simulation}
        own |= {"_book": book, "_last_events": (), "_last_collectives": ()}
        for part in self.modules():
            part._let_go()  # type: ignore[operator]
        parts = any(place_of(t) is not None for t in steps.state.values())
        own["_in_parts"] = parts or steps.groups.mesh.pp > 1
        parameters = {n: p for n, p in steps.state.items() if isinstance(p, nn.Parameter)}
        own["_trained"] = trained = {n: p for n, p in parameters.items() if p.requires_grad}
        shown = {
            name: steps.state[name] if name in steps.state else stand_in(place, steps.device)
            for name, place in steps.placements.items()
            if name in steps.state or place.is_parameter
        }  # fmt: skip
        kept = {n: p for n, p in shown.items() if isinstance(p, nn.Parameter)}
        own["_frozen"] = {n: p for n, p in kept.items() if not p.requires_grad}
        told = told_buffers(steps.state, steps.placements, steps.groups)
        shown |= told
        for name, tensor in shown.items():
            self._adopt(name, tensor)
        for alias, name in aliases.items():
            if name in shown:
                self._adopt(alias, shown[name])
        steps.agreement.parameters = self.parameters
        held = steps.placements, steps.groups, steps.state, steps.sharded
        steps.agreement.weights = Replicas(*held, steps.written)
        own["_empty"] = absent = {
            n: p for n, p in shown.items() if p.requires_grad and n not in steps.state
        }
        own["_owners"] = Owners(steps.placements, steps.groups, steps.sharded, steps.device)
        every = trained | absent
        # In one order on all ranks, so that hooks that ask for norms ask for the same ones.
        own["_handed"] = [(n, every[n]) for n in self._own("_owners").place if n in every]
        hold(parameters, Home(steps.groups, steps.sharded))
        if steps.groups.axis("model") is not None or parts:
            follow(kept, self._owners)
        guard_torch()
        own["_memory"] = Memory(partial(part_at, self), steps.state, told, steps.sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        """Another model under the same plan, of a copy of the user's: it has parameters of its own,
        and compiles steps of its own when it is called. Every rank must make it.
        """
        self._own("_memory").settle()
        steps, given = copied(self._own("_steps"), memo), (self._own("_aliases"), self.simulation)
        made = memo[id(self)] = type(self)(steps, *given, again=self._own("_again"))
        made.read_whole_batches(self._own("_reads_whole"))
        pairs = [*zip(self.modules(), made.modules(), strict=True)]
        memo.update({id(ours): theirs for ours, theirs in pairs})
        for own, other in zip(self.parameters(), made.parameters(), strict=True):
            memo[id(own)] = other.requires_grad_(own.requires_grad)
        for ours, theirs in pairs:
            for name, value in vars(ours).items():
                if name.endswith("_hooks") or name not in vars(theirs):
                    vars(theirs)[name] = copy.deepcopy(value, memo)
        return made

    @property
    def plan(self) -> Plan:
        """The plan that this model runs."""
        return self._own("_steps").planned.plan  # type: ignore[no-any-return]

    @property
    def plan_file(self) -> PlanFile:
        """The plan with what a step should cost and what ranks measured; `save` writes its file."""
        return self._own("_steps").file  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        return self._own("_steps").groups.rank  # type: ignore[no-any-return]

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this rank trains on: what a sampler's `rank` should be."""
        return self._own("_steps").groups.coordinates[0]  # type: ignore[no-any-return]

    @property
    def data_parallel_size(self) -> int:
        """The parts that the data are dealt into: what a sampler's `num_replicas` should be."""
        return self.plan.dp

    @property
    def simulation(self) -> Simulation | None:
        """The Programs of a step, simulated: `plan_file.prediction` adds what is around them."""
        return self._own("_simulation")  # type: ignore[no-any-return]

    @property
    def last_events(self) -> tuple[Event, ...]:
        """The actions of this rank's last step, with their measured times."""
        return self._own("_last_events")  # type: ignore[no-any-return]

    @property
    def last_collectives(self) -> tuple[CollectiveEvent, ...]:
        """The collectives over tp and cp of this rank's last step, where `record_collectives` was
        called: when each was issued and had ended, and when the rank stood still for it.
        """
        return self._own("_last_collectives")  # type: ignore[no-any-return]

    def record_collectives(self, on: bool = True) -> None:
        """Times the collectives of the next steps, or no longer. Off, it costs nothing; on a GPU,
        `last_events` too has the times of the device, and a step ends with waiting for it.
        """
        self._own("_steps").recording = on

    def extra_repr(self) -> str:
        """The rank, the degrees and what else a module shows."""
        mesh = self.plan.mesh
        along = f"cp={mesh.cp} x " if mesh.cp > 1 else ""
        own = f"rank {self.rank} of dp={mesh.dp} x {along}tp={mesh.tp} x pp={mesh.pp}"
        said = own if mesh.world_size > 1 else ""
        return "; ".join(x for x in (said, super().extra_repr()) if x)

    def _adopt(self, name: str, tensor: torch.Tensor) -> None:
        """Registers a tensor under a dotted name, with the attributes that users gave it."""
        path, _, leaf = name.rpartition(".")
        module, source = part_at(self, path), self._own("_steps").source.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            module._parameters[leaf] = tensor
        else:
            module._buffers[leaf] = tensor
            if leaf in source._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(leaf)
        keep_attributes(tensor, {**source._parameters, **source._buffers}[leaf])

    # ------------------------------------------------------------------ calls

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its steps are compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own forward returns, of which only the loss is there: that of the whole
        batch (this is its dp rank's part), on every rank.

        In training mode with gradients on, the whole step; otherwise the forward alone. Where the
        batch gives no loss, the results, as from `predict`.
        """
        check_around("the model")
        self._own("_memory").settle()
        args, kwargs = self._own("_lent").filled("model(...)", *values_in((args, kwargs)))
        with model_call(self._own("_steps"), "model(...)", args, kwargs, training=self.training):
            return self._forward(args, kwargs)

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        steps = self._own("_steps")
        train = self.training and torch.is_grad_enabled()
        kwargs = kwargs if train else asked_for(self, kwargs)
        if not train and cache_in(kwargs) is not None:
            return self._predicted(args, kwargs)
        given, (args, kwargs) = (args, kwargs), self._given(args, kwargs)
        step = steps.compile(args, kwargs, Form(train=train, kept=steps.wanted))
        run = partial(self._run, train=True)
        if not step.has_loss:
            if not train:
                found = self._results(step, args, kwargs)
                learns = any(p.requires_grad for p in self.parameters())
                return pytree.tree_map_only(torch.Tensor, of_evaluation, found) if learns else found
            call = Called(steps, step, args, kwargs, given, steps.draw(step), trains=True)
            return Pending(call, train=run).answer({})
        taken = self._run(step, args, kwargs, number := steps.draw(step), train=train)
        kept = step.result_specs.keys() >= set(names_of(step.recording))
        call = Called(steps, step, args, kwargs, given, number, trains=bool(taken[2]), kept=kept)
        pending, loss = Pending(call, taken, run if train else None), taken[0]
        if not train and any(p.requires_grad for p in self.parameters()):
            loss = of_evaluation(loss)
        return pending.answer({loss_name(step.recording): loss})

    def _run(
        self,
        step: CompiledStep,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        number: int,
        *,
        train: bool,
    ) -> Taken:
        """One step, or its forward alone, which draws by this number."""
        steps, handed = self._own("_steps"), list[torch.Tensor | None]()
        if step.executor.state is not steps.state:
            raise ConfigError(
                "a loss is made of outputs of a call before merakc.untie_layers, which put other "
                "parameters in the place of those that they come from: call the model again"
            )
        if step.recording.asks:
            check_trained(step.recording.asks, self._own("_trained") | self._own("_empty"))
        if train:
            check_frozen(self._own("_frozen"))
        book = self._own("_book") if train else None
        updates = steps.sharded.updates if train and steps.sharded else None
        with ExitStack() as around:
            for each in (book and book.step(), updates and updates.step(step.doubtful)):
                around.enter_context(each or nullcontext())
            result = steps.run(step, args, kwargs, number)
        object.__setattr__(self, "_last_events", result.events)
        object.__setattr__(self, "_last_collectives", result.collectives)
        loss, finite = steps.share_loss(step, result)
        check_finite(step.recording, loss)
        if book is not None:
            book.write(result)
        if train:
            if not steps.loss_scale.goes_on(finite=finite):
                raise_nonfinite(steps, step, loss, args, kwargs, number)
            steps.taken += 1
            found = result.gradients if finite else {}
            loss, handed = self._with_gradients(loss, found, skipped=not finite)
        return loss, replace(result, gradients={}), handed  # which nobody else may hold

    def _with_gradients(
        self, loss: torch.Tensor, gradients: Tensors, *, skipped: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The loss, which hands the gradients out, and these until it has."""
        empty = self._own("_empty")
        left = empty if skipped else ()
        wanted = [(n, p) for n, p in self._own("_handed") if p.requires_grad and n not in left]
        sharded = self._own("_steps").sharded
        behind = sharded.updates.ended(gradients) if sharded and sharded.updates else None
        held = empty.keys() & self._own("_steps").reached  # by other stages
        found = [torch.empty_like(plain(p)) if n in held else gradients.get(n) for n, p in wanted]
        if not wanted:  # of a step that was skipped, or where all is frozen
            return loss.requires_grad_(skipped), found
        return HandOut.apply(loss, found, behind, *(p for _, p in wanted)), found  # type: ignore[no-untyped-call]

    def find_nonfinite(self, *args: Any, **kwargs: Any) -> str | None:
        """The first module of which the next step, on this batch, makes something that is not
        finite, with op and line; None where all is finite. Every rank must call it, and gets the
        same. It runs the step, looking at every value, and changes nothing.
        """
        steps = self._own("_steps")
        train = self.training and torch.is_grad_enabled()
        args, kwargs = self._given(args, kwargs)
        step = steps.compile(args, kwargs, Form(train=train))
        return find_nonfinite(steps, step, args, kwargs, steps.drawn)

    # ------------------------------------------------------------------ gradients and state

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their total norm, over all ranks, is at most `max_norm`.

        Returns the norm before that, as `torch.nn.utils.clip_grad_norm_` does for one process.
        Every element counts once, however many ranks hold it. Every rank must call it.
        Raises `ConfigError` where `norm_type` is not positive.
        """
        if not norm_type > 0:
            raise ConfigError(
                f"clip_grad_norm_: norm_type is {norm_type}; it must be positive, or infinite"
            )
        state = self._own("_steps").state
        own = {n: plain(t.grad) for n, t in state.items() if t.grad is not None}
        total = total_norm(self._own("_owners"), own, norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by before its backward; gradients are
        divided by it again. Other than 1 only in `precision="fp16-mixed"`.
        """
        return self._own("_steps").loss_scale.scale  # type: ignore[no-any-return]

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        """Sets it, the same on every rank, as to go on from a checkpoint."""
        scale = self._own("_steps").loss_scale
        if not scale.dynamic:
            raise ConfigError(
                f"loss_scale = {value}: this model's loss is not scaled; only that of "
                'precision="fp16-mixed" is'
            )
        scale.scale = float(value)

    @property
    def skipped_steps(self) -> int:
        """Steps whose loss or gradients were not finite on some rank, so that no rank got any."""
        return self._own("_steps").loss_scale.skipped  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's state under the model's own names: tensors that it holds whole, and
        `TensorPart`s of others, which torch's distributed checkpoint understands.
        """
        refuse_in_methods("state_dict()")
        self._own("_memory").check_seen()
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        steps = self._own("_steps")
        if self.data_parallel_rank:  # what dp rank 0 has written counts, and is handed on later
            for name in steps.stale & found.keys():
                own, layout = found[name], steps.placements[name].layout
                place = Place(name, layout, 1, 0, 0, own.numel())
                if isinstance(own, TensorPart):
                    place, own = own.place, own.local
                found[name] = TensorPart(own, replace(place, writes=False))
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a whole state dict, of which every rank takes its parts, or this rank's own.

        Raises `ConfigError` for other shapes and other ranks' parts, before anything is changed.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True): a parallel model's parameters lie in memory that "
                "its steps share, so values can be copied into them, not put in their place"
            )
        self._own("_memory").check_seen()
        own, whole = super().state_dict(keep_vars=True), self._own("_steps").source.state_dict()
        check_given(state_dict, own, whole)
        given = {n: v for n, v in state_dict.items() if n in own or n not in whole}
        self._own("_steps").stale.clear()
        self._own("_steps").agreement.parted = ""
        with call("model.load_state_dict"):
            return load_all(super().load_state_dict, given, strict, self._own("_steps").groups)


class AdaptedModel(Adapted, ParallelModel):
    """One of peft's, with adapters in it."""
