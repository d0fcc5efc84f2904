"""The optimizer's step in the backward, of what lives on the host: each bucket is updated there as
soon as its reduced gradients have come down, by a thread, while the device computes on.

What a loop does between `backward()` and `optimizer.step()`, clipping above all, would come too
late. So it is asked for by name, and what would have changed the update is refused. Frozen
parameters, those of other optimizers and those that the device updates go the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from merakc.errors import ConfigError
from merakc.runtime.agreement import settings_of
from merakc.runtime.loss_scale import unscaled
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket
from merakc.runtime.streams import Mark, streams_of
from merakc.train.parameters.optimizers import bringing, check, copied, examples, quicken
from merakc.train.parameters.retired import Locked, Spent, Updated
from merakc.train.parameters.stepping import alike, settings_now, step_of

Tensors = dict[str, torch.Tensor]
CALL, BACKWARD, STEP, BROKEN = "a call", "loss.backward()", "optimizer.step()", "its end"
ENDING = "optimizer.step() to run to its end"
Settings = list[dict[str, Any]]


class InBackward:
    """The updates of one optimizer's parameters that live beside the device: `owned` of `sharded`.

    `now` says what a loop has to do next: call the model, `backward()` or the optimizer's `step()`;
    or that a step broke off. Gradients that are not finite update nothing unless it `ignores` that.
    """

    def __init__(self, optimizer: Optimizer, sharded: ShardedState, *, ignores: bool) -> None:
        self.optimizer, self.sharded, self.ignores = optimizer, sharded, ignores
        self.owned = sharded.owned
        self.now, self.runs, self.loads = CALL, False, False
        self.doubtful: Collection[str] = ()
        self.updated: dict[str, tuple[Spent, type[nn.Parameter]]] = {}  # in the running step
        self.settings: Settings = []
        self.late: list[Callable[[], None]] = []  # of what graphs may still read
        self.running: list[Future[None]] = []
        self.threads: ThreadPoolExecutor | None = None  # of the running step
        self.versions: dict[str, int] = {}  # of what is updated, once it is
        self.state: Any = None  # the optimizer's, while nobody is to see it
        sharded.updates = self
        before = optimizer.register_step_pre_hook(lambda _, *given: self._before_step(*given))
        optimizer.register_step_post_hook(lambda *_: self._behind_step())
        own = ref(optimizer)  # or it would live as long as the process

        def goes_last(stepping: Any, *_: Any) -> None:  # behind hooks that users add later
            hooks: Any = stepping._optimizer_step_pre_hooks  # ordered
            if own() is stepping:
                hooks.move_to_end(before.id)

        register_optimizer_step_pre_hook(goes_last)

    def check(self, *, of_weights: bool = False) -> None:
        """See `Updates`."""
        if self.now == BROKEN and of_weights and not self.loads:
            raise ConfigError(
                "the last step broke off, and merakc.step_in_backward had updated a part of what "
                "lives on the host: go on from a checkpoint (merakc.load)"
            )
        if self.now in (BACKWARD, STEP, ENDING):
            raise ConfigError(
                f"the model is called or read, and merakc.step_in_backward waits for {self.now} of "
                "the last step, which has updated what lives on the host. Call loss.backward() and "
                "optimizer.step() behind every call of the model in training mode, whatever its "
                "loss is; evaluate and save behind them, call model.keep_outputs() ahead of the "
                "loop for outputs before, and for several batches in one step give the model all "
                "their samples and raise micro_batches"
            )

    @contextmanager
    def step(self, doubtful: Collection[str]) -> Iterator[None]:
        """The run of a training step: see `Updates`."""
        self.check(of_weights=True)
        self.now, self.runs, self.doubtful = BROKEN, True, doubtful
        self.settings = settings_now(self.optimizer)
        self.updated.clear()
        try:  # a thread of this step's alone has the caller's way with the smallest numbers
            with ThreadPoolExecutor(1, "merakc-update") as self.threads:
                yield
        except BaseException:
            self._hide()
            raise
        finally:
            self.runs, self.late, self.running = False, [], []
            if not self.updated:
                self.now = CALL

    def _hide(self) -> None:
        """What is updated is not to be seen before the optimizer's step."""
        for name in self.updated:
            self.owned[name].__class__ = Updated
        self.versions = {name: self.owned[name]._version for name in self.updated}
        if self.updated:
            self.state, self.optimizer.state = self.optimizer.state, Locked()  # type: ignore[assignment]

    def _show(self) -> None:
        for name, (_, kind) in self.updated.items():
            self.owned[name].__class__ = kind
        if self.state is not None:
            self.optimizer.state, self.state = self.state, None

    def ended(self, gradients: Tensors) -> Callable[[float], None]:
        """The step has ended: see `Updates`."""
        self.now = BACKWARD if self.updated else CALL
        for name in self.updated:
            del gradients[name]
        self._hide()
        return self._handed_out

    def arrives(self, bucket: Bucket, mark: Mark) -> None:
        """The gradients of a bucket come down: see `Updates`."""
        if not self.runs:  # to look for what is not finite
            return
        update = self._update_of(bucket, mark)
        # What is fetched from there may be read once more: that is to be of the old values.
        if bucket.fetched and not bucket.has_master:
            self.late.append(update)
        else:
            assert self.threads is not None, "a step runs"
            self.running.append(self.threads.submit(update))

    def finish(self) -> None:
        """Waits for all updates of a step."""
        for update in self.late:
            assert self.threads is not None, "a step runs"
            self.running.append(self.threads.submit(update))
        for each in self.running:
            each.result()

    @contextmanager
    def loading(self, optimizers: Collection[Any]) -> Iterator[None]:
        """While weights are loaded, and the state of these optimizers: of a step that broke off
        nothing is left where this one's is among them.
        """
        self.now = CALL if self.now == CALL else BROKEN
        self._show()
        with torch._C.DisableTorchFunctionSubclass():
            for name in self.updated:
                self.owned[name].grad = None
        self.updated.clear()
        self.loads = True
        try:
            yield
        finally:
            self.loads = False
        if any(self.optimizer is getattr(o, "optimizer", o) for o in optimizers):
            self.now = CALL

    def _update_of(self, bucket: Bucket, mark: Mark) -> Callable[[], None]:
        of = {p for group in self.optimizer.param_groups for p in group["params"]}
        own: Tensors = {}
        for name, gradient in bucket.parts_of_gradient().items():
            parameter = self.owned[name]
            usual = name in self.doubtful or _hooks(parameter) > _own_hooks(parameter)
            is_trained = name in self.sharded.trained and parameter.requires_grad
            if parameter in of and is_trained and not usual:
                own[name], self.updated[name] = gradient, (Spent(gradient), type(parameter))
        return partial(self._update, bucket, mark, own, torch.get_num_threads())

    def _update(self, bucket: Bucket, mark: Mark, gradients: Tensors, threads: int) -> None:
        """In the thread: the optimizer's step of these parameters."""
        torch.set_num_threads(threads)  # each thread has its own
        streams = streams_of(bucket.device)
        if streams is not None:
            streams.wait(mark)
        if not self.ignores and bool(unscaled(gradients.values(), 1.0)):
            return  # the step's end tells of it
        with torch._C.DisableTorchFunctionSubclass():
            last = {name: self.owned[name].grad for name in gradients}  # not taken away yet
            for name, gradient in gradients.items():
                self.owned[name].grad = gradient
            try:
                step_of(self.optimizer, {self.owned[name] for name in gradients})
            finally:
                for name, before in last.items():
                    self.owned[name].grad = before

    def _handed_out(self, scale: float) -> None:
        """The backward of the loss, whose gradient is `scale`."""
        if self.now != BACKWARD:
            return
        if scale != 1.0:
            raise ConfigError(
                f"the gradient of the loss is {scale:g}, and merakc.step_in_backward has updated "
                "what lives on the host by gradients of the loss itself: scale the loss inside "
                "the model, or the learning rate"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for name, (spent, _) in self.updated.items():
                found = self.owned[name].grad
                if found is not None and not getattr(found, "cleared", False):
                    raise ConfigError(
                        f"'{name}' has a gradient before backward(), to which this one would be "
                        "added, and merakc.step_in_backward has updated by this one alone: call "
                        "optimizer.zero_grad() in every step, and go back through one loss"
                    )
                if _hooks(self.owned[name]) > _own_hooks(self.owned[name]):
                    raise ConfigError(
                        f"a hook was registered on '{name}' behind the model's call, in which "
                        "merakc.step_in_backward has updated it: register hooks before"
                    )
                self.owned[name].grad = spent
        self.now = STEP

    def _before_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before the optimizer's step of the rest, which is given the optimizer and these."""
        if self.now == CALL or self.now == ENDING:
            return
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "optimizer.step() is given a closure or other arguments, and "
                "merakc.step_in_backward has updated what lives on the host without: leave them, "
                "or it, out"
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ConfigError(
                "optimizer.step() under autocast, and merakc.step_in_backward has updated what "
                "lives on the host without: step outside of it"
            )
        if self.now != STEP:
            raise ConfigError(
                f"optimizer.step(), and merakc.step_in_backward waits for {self.now}: what lives "
                "on the host is updated already"
            )
        if not alike(settings_now(self.optimizer), self.settings):
            raise ConfigError(
                f"the optimizer is {settings_of(self.optimizer)} in its step, and had other "
                "settings in the backward, where merakc.step_in_backward has updated what lives on "
                "the host: change learning rates and groups behind optimizer.step(), or before the "
                "model is called"
            )
        if not isinstance(self.optimizer.state, Locked):
            raise ConfigError(
                "the optimizer has another state in its step than in the backward, where "
                "merakc.step_in_backward has updated what lives on the host: load it before the "
                "model is called, or behind optimizer.step()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for name, (spent, _) in self.updated.items():
                if self.owned[name]._version != self.versions[name]:
                    raise ConfigError(
                        f"'{name}' was written to before optimizer.step(), through a tensor that "
                        "shares its memory, and merakc.step_in_backward had updated it already"
                    )
                if self.owned[name].grad is not spent or spent.cleared:
                    raise ConfigError(
                        f"the gradient of '{name}' was taken away or replaced before "
                        "optimizer.step(), and merakc.step_in_backward has used it already"
                    )
            for name in self.updated:
                self.owned[name].grad = None
        self._show()
        self.now = ENDING

    def _behind_step(self) -> None:
        """Behind it gradients are there that zero_grad() is to take away."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, (spent, _) in self.updated.items():
                self.owned[name].grad = spent
        self.updated.clear()
        if self.now == ENDING:
            self.now = CALL
        state, groups = self.optimizer.state, self.optimizer.param_groups
        order = [p for group in groups for p in group["params"] if p in state]
        if any(p is not q for p, q in zip(order, state, strict=False)):  # as one step fills it
            state.update({p: state.pop(p) for p in order})


def _hooks(parameter: torch.Tensor) -> int:
    """The hooks on a parameter."""
    own: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return max(len(each or ()) for each in own)


def _own_hooks(parameter: torch.Tensor) -> int:
    """Those of ours, on what says whose part it is."""
    return int("source" in vars(parameter))


def steps_by_parts(optimizer: Optimizer) -> bool:
    """Whether steps of some parameters after the other, and then of the rest, give what one step of
    all does, and leave the settings as they are: tried on copies, with small parameters.
    """
    return all(_steps_alike(optimizer, left) for left in (0, 1))


def _steps_alike(optimizer: Optimizer, left: int) -> bool:
    """The same, where so many parameters of each group are left to the step."""
    groups = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.enable_grad():
        values, gradients = examples(groups, torch.float64)
        whole = [[nn.Parameter(v.clone()) for v in group] for group in values]
        parts = [[nn.Parameter(v.clone()) for v in group] for group in values]
        one, other = copied(optimizer, whole), copied(optimizer, parts)
        for each in (one, other):
            quicken(each)
        for step in gradients:
            _with_gradients(whole, step)
            one.step()
            for group, own in reversed([*zip(parts, step, strict=True)]):
                for parameter, gradient in reversed([*zip(group[left:], own[left:], strict=True)]):
                    parameter.grad = gradient.clone()
                    step_of(other, {parameter})
                    parameter.grad = None
            _with_gradients([group[:left] for group in parts], [own[:left] for own in step])
            other.step()
            for parameter in chain(*parts):
                parameter.grad = None
        pairs = zip(chain(*whole), chain(*parts), strict=True)
        same = all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs)
        groups_of = [len(each.param_groups) + 1 for each in (one, other)]
        told = [settings_now(each)[:n] for each, n in zip((one, other), groups_of, strict=True)]
        return same and alike(*told)
    return False


def _with_gradients(
    parameters: Sequence[Sequence[nn.Parameter]], gradients: Sequence[Sequence[torch.Tensor]]
) -> None:
    for group, own in zip(parameters, gradients, strict=True):
        for parameter, gradient in zip(group, own, strict=True):
            parameter.grad = gradient.clone()


def step_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """Has an optimizer update what lives on the host (`offload=`) in the backward: each bucket as
    soon as its gradients have come down, by a thread, while the device computes on. Call it once,
    before the loop, which stays as it is; `optimizer.step()` updates the rest.

    Gradients that an update has used are not there any more: what reads them, as clipping does, is
    refused. A model of which nothing lives on the host trains as ever.

    Raises `ConfigError` for a model that `auto_parallel` did not return, for an optimizer that does
    not update every parameter by its own gradient and state alone, and where steps are to be left
    out that are not finite (`fp16-mixed`, `on_nonfinite="skip"`): no update can be taken back.
    """
    own: Any = getattr(model, "_own", None)
    if own is None:
        raise ConfigError(
            f"step_in_backward: this {type(model).__name__} is not what auto_parallel returned"
        )
    steps = own("_steps")
    sharded, scale = steps.sharded, steps.loss_scale
    if sharded is None or not any(b.on_host and b.is_trained for b in sharded.buckets):
        return
    if scale.dynamic or scale.on_nonfinite == "skip":
        raise ConfigError(
            "step_in_backward: steps that are not finite are to be left out (precision="
            "'fp16-mixed', or on_nonfinite='skip'), and an update in the backward cannot be taken "
            "back; use 'bf16-mixed' and on_nonfinite='raise'"
        )
    if sharded.updates is not None:
        raise ConfigError(
            "step_in_backward: this model has an optimizer that steps there already; one does, and "
            "for another the model is made anew"
        )
    check(optimizer)
    if optimizer in bringing or not steps_by_parts(optimizer):
        raise ConfigError(
            f"step_in_backward: steps of a {type(optimizer).__name__} for some parameters after "
            "the other are not found to be what one step for all is; leave step_in_backward out, "
            "use an optimizer such as AdamW, or, where this one wraps one (accelerate's prepare), "
            "give it before it is wrapped"
        )
    InBackward(optimizer, sharded, ignores=scale.on_nonfinite == "ignore")
