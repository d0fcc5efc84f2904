"""The values of a model's outputs, and of what was made of them, where somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from merakc.errors import ConfigError
from merakc.runtime.executor import StepResult
from merakc.train.compiled_step import CompiledStep
from merakc.train.outputs import outputs_of
from merakc.train.outside.called import Called
from merakc.train.outside.deferred import Deferred, Source, deferred, unreachable
from merakc.train.outside.noted import Noted
from merakc.train.outside.results import share_results
from merakc.train.outside.tape import Tape
from merakc.train.outside.watching import REMEDY

# What a training step gives: the loss, which hands gradients out, what it has left on this rank,
# and the gradients until they are handed out.
Taken = tuple[torch.Tensor, StepResult, list[torch.Tensor | None]]
Train = Callable[[CompiledStep, Sequence[Any], Mapping[str, Any], int], Taken]
UNSEEN = (
    "a gradient is wanted of something that was computed from an output of the model outside the "
    f"step, which has not seen it; {REMEDY}; of several calls that return losses, and whose other "
    "outputs count too: leave the labels out, and compute all of the loss outside; of calls of "
    "several models, or in other modes: call backward() of each one's loss"
)


class Outputs(Source):
    """The outputs of a call of the model with a batch, or of several.

    A step has `taken` the call, or `train` may take one. Places are those of the tape.
    """

    def __init__(
        self, call: Called, taken: Taken | None = None, train: Train | None = None
    ) -> None:
        self.call, self.calls, self.steps = call, {0: call}, call.steps
        self.train, self.gradients, self.is_taken = train, taken and taken[2], taken is not None
        steps, forms = call.steps, call.forms.values()
        grad = call.trains and any(p.requires_grad for p in steps.agreement.parameters())
        self.tape = Tape([x if grad else x.detach() for x in forms], steps.device)
        self.known: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}  # of values that were read
        self.roots: set[int] = set()  # the places of losses of which steps are taken
        self.there: dict[int, tuple[CompiledStep, StepResult, str]] = {}  # by place
        if taken is not None:
            self._has(call.step, taken[1], {n: p for p, n in enumerate(call.names)})
        elif call.step.has_effects:  # which come with the call
            call.run_again()

    def _has(self, step: CompiledStep, result: StepResult, places: Mapping[str, int]) -> None:
        """Notes what a step has kept, of outputs that stand at these places."""
        self.there |= {places[n]: (step, result, n) for n in step.result_specs if n in places}

    def _output_at(self, place: int) -> tuple[Called, str] | None:
        """The call that has an output at this place, and the output's name in it."""
        for first, call in self.calls.items():
            if first <= place < first + len(call.names):
                return call, call.names[place - first]
        return None

    @property
    def _is_open(self) -> bool:
        """Whether a step can be taken for it, and none is."""
        return self.train is not None and not self.is_taken

    @property
    def _draws(self) -> bool:
        """Whether a step of several calls draws: other numbers than each by itself."""
        return len(self.calls) > 1 and any(c.step.draws for c in self.calls.values())

    def answer(self, found: Mapping[str, torch.Tensor]) -> Any:
        """What the call returns: the tensors that are there, and others that are not yet."""
        places = {name: place for place, name in enumerate(self.call.names)}
        self.known |= {places[name]: value for name, value in found.items()}
        return outputs_of(self.call.step.recording, found, lambda name: self._show(places[name]))

    def _show(self, place: int) -> Deferred:
        made = deferred(self, place, self.tape.forms[place], self.steps.device, UNSEEN)
        self.tape.shown[place] = made
        return made

    def value(self, place: int) -> torch.Tensor:
        """The value at a place. Collective where it is not known."""
        if place in self.known:
            return self.known[place]
        form, value = self.tape.forms[place], self._found(place)
        if place in self.known:  # the loss
            return self.known[place]
        if value.shape != form.shape:
            raise ConfigError(
                f"an output of the model is of shape {list(value.shape)} for the whole batch, "
                f"and of {list(form.shape)} for this rank's part of it: it couples the samples of "
                "all ranks; read it by model.predict(...)"
            )
        if form.requires_grad and not value.requires_grad:
            plain = value.detach()
            value = unreachable(lambda: plain, UNSEEN)
        self.known[place], self.versions[place] = value, value._version
        return value

    def _found(self, place: int) -> torch.Tensor:
        noted = self.tape.makers.get(place)
        if place in self.there:
            step, result, name = self.there[place]
            with self.call.within("an output of the model is read"):
                return share_results(self.steps, step, result, {name})[name]
        if (output := self._output_at(place)) is not None:
            return self._output(*output)
        assert noted is not None
        behind = self.tape.behind([place])
        is_marked = mark_of(behind, place) in self.steps.roots  # a step before was taken for it
        if self._is_open and (is_marked or self._is_drawn_loss(place, behind)):
            self._take(place)
            return self.known[place]
        self.tape.check_unchanged([noted])
        extras, kind = dict(enumerate(self.tape.extras)), self.steps.device.type
        made: list[torch.Tensor] = noted.run(self.value, extras, kind)
        return made[place - noted.first]

    def _output(self, call: Called, name: str) -> torch.Tensor:
        """The value of an output of the model that the step does not have, by another forward."""
        value = call.output(name, gone=self._is_gone(call))
        if not self._is_open:
            self.steps.wanted |= {call.told(name)}
        return value

    def _is_gone(self, call: Called) -> bool:
        """Whether another forward would not give what the step has computed, which is taken."""
        handed = call.trains and not self.gradients
        return not self._is_open and (handed or call.step.has_effects or self._draws)

    def _is_wanted(self, place: int) -> bool:
        """Whether an output of the model at this place is to be kept."""
        output = self._output_at(place)
        return output is not None and output[0].told(output[1]) in self.steps.wanted

    def _is_drawn_loss(self, place: int, behind: Sequence[Noted]) -> bool:
        """Whether a value is one number to train on, of calls that draw for it together."""
        form, outputs = self.tape.forms[place], {p for noted in behind for p in noted.reads()}
        calls = {id(found[0]) for p in outputs if (found := self._output_at(p)) is not None}
        return self._draws and len(calls) > 1 and form.numel() == 1 and form.requires_grad

    def _take(self, root: int) -> None:
        """Takes the step whose loss is the value at `root`."""
        raise NotImplementedError


def mark_of(calls: Sequence[Noted], *places: int) -> Hashable:
    """The same of calls that make a loss and results in the same way."""
    return tuple((c.key, c.first) for c in calls), places
