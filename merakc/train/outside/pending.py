"""The outputs of calls of the model: read when somebody wants them, and what is made of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise, product
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.batches.split import named_tensors, sample_rows
from merakc.errors import (
    ConfigError,
    ForwardError,
    OtherSizeError,
    PlanError,
    RecordError,
    failure,
)
from merakc.ir.batches import Rows
from merakc.train.besides import Nothing
from merakc.train.compiled_step import CompiledStep, Form
from merakc.train.outputs import is_little, outputs_of
from merakc.train.outside.deferred import Deferred, Source, deferred_in, meets_parameters
from merakc.train.outside.noted import EXTRA, PLAIN, Noted, Replay, forward
from merakc.train.outside.tape import ValuesWantedError
from merakc.train.outside.values import Outputs, Taken, Train, mark_of
from merakc.train.outside.watching import REMEDY, writes
from merakc.train.told import warn_of_more

Tensors = dict[str, torch.Tensor]
# What reads the values of a tensor, and gives something that is no tensor.
_READS = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__complex__",
    "__index__", "__repr__", "__format__", "__contains__", "__deepcopy__", "__reduce_ex__",
    "equal", "allclose", "is_nonzero",
})  # fmt: skip
_MOST_READINGS = 12  # combinations of places of samples in what a loss reads that are tried
_OTHERWISE = (
    "backward() of several losses, with create_graph or with inputs: a step gives the gradients of "
    "all parameters, of one loss; add the losses up"
)
_DREW = (
    "backward() of a loss of several calls of a model that draws random numbers, as dropout does, "
    "and that writes buffers, or of which an output was read before: the step would draw others; "
    "read outputs after loss.backward(), or make the calls one, of all their samples"
)
_CHANGED = (
    "the batch, the model's weights or modes were changed between the call of the model and "
    f"loss.backward(), with which the step is taken; {REMEDY}"
)
_WRITTEN = (
    "backward() of a loss of several calls, between which something else, such as one more call, "
    "wrote buffers that the model's outputs are made with: a step runs these calls one behind the "
    "other; make them so, or call backward() of each one's loss"
)


class Pending(Outputs):
    """The outputs of a call of the model with a batch, or of several whose losses are one.

    A step has `taken` the call; where there is none, the loss is made outside. `train` takes the
    step for it, or one more for what is made of other outputs than the loss.
    """

    def join(self, other: Source) -> bool:
        """Takes over another's calls, so that one step is taken for the losses of both; False
        where either's step is taken, or cannot be the same.
        """
        if other is self:
            return True
        if not isinstance(other, Pending) or other.steps is not self.steps or not (
            self._is_open and other._is_open and self.call.is_like(other.call)
        ):  # fmt: skip
            return False
        if other.call.turn < self.call.turn:
            return other.join(self)
        first = self.tape.join(other.tape, other.call.given, other.call.autocast)
        self.calls |= {first + place: call for place, call in other.calls.items()}
        self.known |= {first + place: value for place, value in other.known.items()}
        self.versions |= {first + place: n for place, n in other.versions.items()}
        for place, shown in other.tape.shown.items():
            shown.source, shown.place = self, first + place
            self.tape.shown[shown.place] = shown
        other.train = None
        return True

    # ------------------------------------------------------------------ calls on outputs

    def apply(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call on outputs, or on what follows from them, gives."""
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if self.train is not None and name == "backward":
            return self._backward(args, kwargs)
        if self.train is not None and func is torch.autograd.grad:
            return func(self._differentiated(args[0], kwargs), *args[1:], **kwargs)
        if self.train is not None and meets_parameters((args, kwargs)):
            self._take(deferred_in((args, kwargs))[0].place)
        if self._is_open and name not in _READS:
            try:
                return self.tape.note(func, tuple(args), dict(kwargs), self._show)
            except ValuesWantedError:  # what it gives is true, and no gradient goes through it
                pass
        elif self.train is not None and name not in _READS and self._goes_on((args, kwargs)):
            with suppress(ConfigError, ValuesWantedError):
                return self._noted_behind(func, args, kwargs)
        given, named = pytree.tree_map_only(
            Deferred, lambda x: x.source.value(x.place), (tuple(args), dict(kwargs))
        )
        before = [t._version for t in self.known.values()] if self.train is not None else []
        out = func(*given, **named)
        if any(t._version != n for n, t in zip(before, self.known.values(), strict=False)):
            if self._is_open:
                raise ConfigError(writes(func))  # which the step would not do
            self.train = None  # nor would another
        if not all(isinstance(x, PLAIN) for x in pytree.tree_leaves(out)):  # it may share memory
            self.tape.own.clear()
        return out

    def _goes_on(self, given: Any) -> bool:
        """Whether a gradient may go through these to what no step is taken for."""
        outputs = [x for x in deferred_in(given) if x.place not in self.roots]
        return torch.is_grad_enabled() and any(x.requires_grad for x in outputs)

    def _noted_behind(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a call gives behind the step, whose values are there now, and of which another step
        may be taken. Raises `ValuesWantedError` where none may.
        """
        out = self.tape.note(func, tuple(args), dict(kwargs), self._show)
        made = deferred_in(out)
        if not any(x.requires_grad for x in made):
            raise ValuesWantedError
        if not any(self._is_gone(call) for call in self.calls.values()):
            for each in made:  # weights may be others when it is read
                self.value(each.place)
        return out

    # ------------------------------------------------------------------ a loss outside

    def _backward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`loss.backward(gradient)`, or `torch.autograd.backward(loss, gradient)`."""
        told = dict(zip(("gradient", "retain_graph", "create_graph"), args[1:], strict=False))
        told |= kwargs
        if told.get("inputs") is not None:
            raise ConfigError(_OTHERWISE)
        loss = self._differentiated(args[0], told)
        gradients = pytree.tree_leaves([told.get("gradient"), told.get("grad_tensors")])
        given = [g for g in gradients if g is not None]
        loss.backward(*given)  # type: ignore[no-untyped-call]

    def _differentiated(self, losses: Any, told: Mapping[str, Any]) -> torch.Tensor:
        """The loss, of which the step is taken."""
        loss, *others = pytree.tree_leaves(losses)
        if others or told.get("create_graph"):
            raise ConfigError(_OTHERWISE)
        self._take(loss.place)
        return self.known[loss.place]

    def _take(self, root: int) -> None:
        """Takes the step whose loss is the value at `root`."""
        steps, form = self.steps, self.tape.forms[root]
        if root in self.roots:
            return
        if form.numel() != 1 or not form.requires_grad:
            raise ConfigError(
                f"backward() of a tensor of shape {list(form.shape)} that "
                f"{'requires' if form.requires_grad else 'does not require'} a gradient; it takes "
                "one number that the model's parameters have made"
            )
        if len(self.call.step.layout.sizes) > 1 and not steps.whole:
            raise ConfigError(
                "loss.backward() of a loss that is made outside the model, with dp="
                f"{len(self.call.step.layout.sizes)}: numbers of Python in it are those of one "
                "data-parallel rank's samples; give every rank the whole batch "
                f"(model.read_whole_batches()), or {REMEDY}"
            )
        if self.is_taken:
            self._take_more(root)
            return
        behind = {p for noted in self.tape.behind([root]) for p in noted.reads()}
        alive = [p for p in self.tape.shown if p != root and (
            (p in self.tape.makers and (p not in behind or self.tape.forms[p].numel() == 1))
            or self._is_wanted(p))]  # fmt: skip
        little = [p for p in behind if self._output_at(p) and is_little(self.tape.forms[p])]
        mark = mark_of(self.tape.behind([root]), root)
        self._take_with(root, alive, () if (mark, "alone") in steps.roots else little)
        steps.roots.add(mark)

    def _take_with(self, root: int, alive: Sequence[int], little: Sequence[int] = ()) -> None:
        """Takes it, and keeps what is still held, or else the outputs that this is made of; and
        small outputs, where it can.
        """
        if little:
            try:
                return self._take_for(root, sorted({*alive, *little}))
            except (RecordError, PlanError):
                self.steps.roots.add((mark_of(self.tape.behind([root]), root), "alone"))
        try:
            self._take_for(root, sorted(alive))
        except (RecordError, PlanError):  # they are made of the outputs, then, when they are read
            first = {p for noted in self.tape.behind(alive) for p in noted.reads()}
            self._take_for(root, sorted(p for p in {*alive, *first} if self._output_at(p)))

    def _take_more(self, root: int) -> None:
        """Takes one more step, for another loss of the same call."""
        if self._draws:
            raise ConfigError(_DREW)
        if self.call.step.writes and self.call.again is None:
            raise ConfigError(
                "a loss is made of outputs of a call of which a step is taken already, and whose "
                f"forward writes buffers, which it would do once more; {REMEDY}"
            )
        behind = {p for noted in self.tape.behind([root]) for p in noted.reads()}
        numbers = [p for p in self.tape.shown if p in behind and self.tape.forms[p].numel() == 1]
        self._take_with(root, [p for p in numbers if p in self.tape.makers])
        if not self.steps.takes_more and self.steps.groups.rank == 0:
            warn_of_more()
        self.steps.takes_more = True

    def _take_for(self, root: int, results: Sequence[int]) -> None:
        """Takes it, and keeps these results."""
        assert self.train is not None
        calls = self.tape.behind([root, *results])
        # The model's in the order in which they were made: it may write buffers.
        calls.sort(key=lambda c: self.calls[c.first].turn if c.func is forward else math.inf)
        self.tape.check_unchanged(calls)
        refused = self._refusal(calls)
        mark = mark_of(calls, root, *results)
        extras = {k: self.tape.extras[k] for c in calls for k in c.extras()}
        kwargs = {**self.call.kwargs, EXTRA: extras}
        module = Replay(self.steps.forward, calls, root, results)
        form = Form(train=True, kept=None, mark=mark, module=module)
        words = [(c.name, c.key[1:], c.first) for c in calls], root, *results
        told = f"loss.backward() (mark {zlib.crc32(repr(words).encode()):x})"
        (dtype, enabled), kind = self.call.autocast, self.steps.device.type
        told += f", which it refuses: {refused}" if refused else ""  # for ranks that do not
        with self.call.within(told), torch.enable_grad(), torch.autocast(kind, dtype, enabled):
            if refused:
                raise ConfigError(refused)
            step, kwargs = self._compiled(form, kwargs, extras)
            if not self.is_taken and all(call.again is None for call in self.calls.values()):
                taken = self.train(step, self.call.args, kwargs, self.call.number)
            else:
                taken = self._train_again(self.train, step, kwargs)
        loss, result, self.gradients = taken
        self.is_taken, self.known[root] = True, loss
        self.versions.pop(root, None)  # of what was read before
        self.roots.add(root)
        shown = outputs_of(step.recording, {}, str)
        self._has(step, result, {shown.outputs[str(p)]: p for p in results})

    def _refusal(self, noted: Sequence[Noted]) -> str:
        """Why this rank cannot take a step of these calls; empty where it can."""
        if any(call.around() != call.before for call in self.calls.values()):
            return _CHANGED
        calls = {0: self.call} | {c.first: self.calls[c.first] for c in noted if c.func is forward}
        if not all(later.follows(call) for call, later in pairwise(calls.values())):
            return _WRITTEN
        if any(self.known[place]._version != n for place, n in self.versions.items()):
            return (
                "the value of an output, or of what was made of it, was written into since it was "
                f"read, which a step does not do; use a call that returns a new tensor, or {REMEDY}"
            )
        return ""

    def _train_again(self, train: Train, step: CompiledStep, kwargs: Mapping[str, Any]) -> Taken:
        """The training step, behind its forwards: what these have changed stays as it is."""
        if self._draws:
            raise ConfigError(_DREW)
        state, written = self.steps.state, Tensors()
        for call in sorted(self.calls.values(), key=lambda c: c.turn, reverse=True):
            written |= call.written
        now = {name: state[name].clone() for name in written}
        for name, value in written.items():
            state[name].copy_(value)
        try:
            return train(step.but(besides=Nothing()), self.call.args, kwargs, self.call.number)
        finally:
            for name, value in now.items():
                state[name].copy_(value)

    def _compiled(
        self, form: Form, kwargs: Mapping[str, Any], extras: Mapping[int, torch.Tensor]
    ) -> tuple[CompiledStep, dict[str, Any]]:
        """The step, with the samples where it can be recorded: of the batch they stand where they
        do without the loss, of the tensors that the loss reads where they may. And this dp rank's
        part of the batch and of these tensors.
        """
        steps = self.steps
        plan = steps.planned.plan
        args = self.call.args
        sampled = sample_rows(args, self.call.kwargs, plan.batch_dims)
        own = {name: sampled.get(name) for name in named_tensors(args, self.call.kwargs)}
        layout = self.call.step.layout
        samples = layout.total if steps.whole else layout.own
        if steps.whole:
            named = {f"of the whole batch, {EXTRA}.{k}": t for k, t in extras.items()}
            steps.whole, steps.copied = self.call.whole | named, layout.copies > 1
        places = [
            [(f"{EXTRA}.{k}", rows) for rows in _places(t, samples)] for k, t in extras.items()
        ]
        readings = [own | dict(choice) for choice in islice(product(*places), _MOST_READINGS)]
        form_of_loss = form.mark, *(t.shape for t in extras.values())
        if form_of_loss in steps.readings:
            readings = [steps.readings[form_of_loss]]
        refused: RecordError | None = None
        for dims in readings:
            parts = {k: self._own(t, dims[f"{EXTRA}.{k}"]) for k, t in extras.items()}
            given = {**kwargs, EXTRA: parts}
            try:
                found = steps.compile(args, given, replace(form, dims=dims))
            except RecordError as error:
                refused = refused or error
                continue
            steps.readings[form_of_loss] = dims
            return found, given
        assert refused is not None
        noted = form.module.noted if isinstance(form.module, Replay) else ()
        lines = ", ".join(dict.fromkeys(each.line for each in noted[-1:]))
        if isinstance(refused, ForwardError | OtherSizeError):  # the whole batch was computed
            raise RecordError(
                f"{lines}: the loss is computed outside the model, and fails for a part of the "
                f"batch ({failure(refused.__cause__ or refused)}): where it reads samples one by "
                "one, as out[7], compute over all of them at once, or train with dp=1 and "
                "micro_batches=1"
            ) from refused
        refused.add_note(f"the loss is computed outside the model, at {lines}; {REMEDY}")
        raise refused

    def _own(self, tensor: torch.Tensor, rows: Rows | None) -> torch.Tensor:
        """This dp rank's samples of a tensor that the loss reads."""
        layout = self.call.step.layout
        if rows is None or not self.steps.whole:
            return tensor
        return rows.take(tensor, layout.first(0), layout.own)


def _places(tensor: torch.Tensor, samples: int) -> list[Rows | None]:
    """Where a tensor that a loss reads may hold the samples, likeliest first."""
    found: list[Rows | None] = [Rows(d) for d, n in enumerate(tensor.shape) if n == samples]
    for d, n in enumerate(tensor.shape):
        if n > samples > 0 and n % samples == 0:
            found += [Rows(d, 1, n // samples), Rows(d, n // samples, 1)]
    return [*found, None]
