"""One call of the model: what it was given, and its outputs by another forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import ConfigError
from merakc.lowering.forwards import autocast_of
from merakc.runtime.executor import StepResult
from merakc.runtime.part import plain
from merakc.runtime.state import crc_of
from merakc.train.calls import model_call
from merakc.train.compiled_step import CompiledStep, Form
from merakc.train.outputs import told_name
from merakc.train.outside.results import share_results
from merakc.train.settings import marks
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]
_turns = count()


@dataclass(eq=False)
class Called:
    """A call of the model with a batch, of which this rank has `args` and `kwargs`, and the caller
    has `given` the whole.

    `step` gives its outputs, and draws by `number`. It `trains` where a step is taken for it, and
    has `kept` where that step keeps all outputs.
    """

    steps: Steps
    step: CompiledStep
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Any
    number: int
    trains: bool
    kept: bool = False
    again: tuple[CompiledStep, StepResult] | None = None  # the forward, where it was run by itself
    written: Tensors = field(default_factory=dict)  # what that has written, as it was before
    left: Tensors = field(default_factory=dict)  # and as it was then
    turn: int = field(default_factory=lambda: next(_turns))  # among all calls

    def __post_init__(self) -> None:
        """Looks at what another forward goes by."""
        forms = self.step.whole_output_forms if self.steps.whole else self.step.output_forms
        self.forms, self.names = forms, list(forms)
        self.grad, self.whole = torch.is_grad_enabled(), self.steps.whole
        self.autocast = autocast_of(self.steps.device)
        self.before = self.around(self.steps.settings.seen)

    def around(self, seen: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """What another forward goes by: marks of its batch and of the model's tensors, and of an
        evaluation, whose outputs may be read after `p.data.copy_(average)`, these themselves; and
        settings, where they are not `seen` yet.
        """
        steps = self.steps
        held = [t for name, t in steps.state.items() if name not in self.step.written]
        given = pytree.tree_leaves((self.args, self.kwargs))
        versions = [marks(x) for x in given if isinstance(x, torch.Tensor)]
        unread = [] if self.kept else held
        weights = _marks_of(held) if self.trains else [crc_of(plain(t)) for t in unread]
        return (weights, versions), *(steps.settings.now() if seen is None else seen)

    def is_like(self, other: Called) -> bool:
        """Whether the model's modes and settings were those of another call."""
        return self.before[1:] == other.before[1:]

    def told(self, name: str) -> str:
        """The name of an output as users are told it."""
        return told_name(self.step.recording, name)

    def within(self, name: str) -> AbstractContextManager[None]:
        """What surrounds what is done for the call: its batch is told where ranks differ."""
        training = any(self.before[1])
        return model_call(self.steps, name, self.args, self.kwargs, training=training)

    def output(self, name: str, *, gone: bool) -> torch.Tensor:
        """The value of an output that the step has not kept, by another forward: not where what
        the step has computed is `gone`. Collective.
        """
        with self._as_then(), self.within("an output of the model is read"), torch.no_grad():
            if self.again is None:
                if gone or self.around() != self.before:
                    raise ConfigError(_not_kept(self.told(name)))
                self.run_again()
            assert self.again is not None
            return share_results(self.steps, *self.again, {name})[name]

    def run_again(self) -> None:
        """Runs the forward by itself. Collective."""
        steps, step = self.steps, self.step
        if step.has_loss:
            form = Form(train=False, results=True, mark="again", module=steps.forward)
            with torch.set_grad_enabled(self.grad):  # which the forward may ask for
                step = steps.compile(self.args, self.kwargs, form)
        self.written = {name: steps.state[name].clone() for name in step.written}
        self.again = step, steps.run(step, self.args, self.kwargs, self.number)
        self.left = {name: steps.state[name].clone() for name in step.written}

    def follows(self, earlier: Called) -> bool:
        """Whether the buffers that outputs are made with were as another call has left them."""
        names = self.step.leans & self.written.keys() & earlier.left.keys()
        return all(torch.equal(self.written[name], earlier.left[name]) for name in names)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """In the modes, and under the autocast, of the call."""
        steps, (dtype, enabled) = self.steps, self.autocast
        now = steps.settings.modes()
        steps.settings.set_modes(self.before[1])
        try:
            with torch.autocast(steps.device.type, dtype, enabled):
                yield
        finally:
            steps.settings.set_modes(now)


def _not_kept(name: str) -> str:
    return (
        f"output '{name}' is read, and this step has not kept it: after loss.backward(), with "
        "other weights, where the forward writes buffers, or draws for a step of several calls, "
        "another forward would not give what the step's has given; call "
        f"model.keep_outputs({name!r}) before the first step, and steps keep it"
    )


def _marks_of(held: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """How often each was written to, and where it lies."""
    with torch._C.DisableTorchFunctionSubclass():
        return [(t._version, t.data_ptr()) for t in held]
