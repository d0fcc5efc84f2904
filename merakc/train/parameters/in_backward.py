"""The optimizer's step in the backward, of what lives on the host: each bucket is updated there as
soon as its reduced gradients have come down, by a thread, while the device computes on.

What a loop does between `backward()` and `optimizer.step()`, clipping above all, would come too
late. So it is asked for by name, and what would have changed the update is refused. Frozen
parameters, those of other optimizers and those that the device updates go the usual way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Never

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from merakc.errors import ConfigError
from merakc.runtime.agreement import settings_of
from merakc.runtime.loss_scale import unscaled
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket
from merakc.runtime.streams import Mark, streams_of
from merakc.train.parameters.optimizers import bringing, check, is_by_parameter
from merakc.train.parameters.stepping import stepping

Tensors = dict[str, torch.Tensor]


class Spent(torch.Tensor):
    """Stands for a gradient that an update has used: whatever reads it is refused."""

    @staticmethod
    def __new__(cls: type[Spent], gradient: torch.Tensor) -> Spent:
        """Of its shape, without memory."""
        made: Spent = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses all but to be told apart."""
        if func is torch.Tensor.__hash__:
            return id(args[0])
        _refuse()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        """Refuses what torch calls below."""
        _refuse()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Spent()"


def _refuse() -> Never:
    raise ConfigError(
        "a gradient is read that merakc.step_in_backward has used already: gradients cannot be "
        "clipped, scaled or looked at then; leave step_in_backward out, or what reads them "
        "(clip_grad_norm_; of Trainers max_grad_norm=0, of Lightning gradient_clip_val=None)"
    )


class InBackward:
    """The updates of one optimizer's parameters that live beside the device: `owned` of `sharded`.

    `now` says what a loop has to do next: call the model, `backward()` or the optimizer's `step()`;
    or that a step broke off. Gradients that are not finite update nothing unless it `ignores` that.
    """

    def __init__(self, optimizer: Optimizer, sharded: ShardedState, *, ignores: bool) -> None:
        self.optimizer, self.owned, self.ignores = optimizer, sharded.owned, ignores
        self.now, self.runs = "a call", False
        self.doubtful: Collection[str] = ()
        self.updated: dict[str, Spent] = {}  # in the running step
        self.settings = ""
        self.late: list[Callable[[], None]] = []  # of what graphs may still read
        self.running: list[Future[None]] = []
        self.threads = ThreadPoolExecutor(1, "merakc-update")
        sharded.updates = self
        optimizer.register_step_pre_hook(lambda *_: self._ends())

    @contextmanager
    def step(self, doubtful: Collection[str]) -> Iterator[None]:
        """The run of a training step: see `Updates`."""
        if self.now != "a call":
            raise ConfigError(
                f"the model is called for another step, and merakc.step_in_backward waits for "
                f"{self.now}: the last one has updated what lives on the host. Call "
                "loss.backward() and optimizer.step() behind every call of the model in training "
                "mode; for several batches in one step give it all their samples and raise "
                "micro_batches"
            )
        self.now, self.runs, self.doubtful = "the end of the last", True, doubtful
        self.settings = settings_of(self.optimizer)
        try:
            yield
        finally:
            self.runs = False

    def ended(self, gradients: Tensors) -> Callable[[float], None]:
        """The step has ended: see `Updates`."""
        self.now = "loss.backward()" if self.updated else "a call"
        for name in self.updated:
            del gradients[name]
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
            self.running.append(self.threads.submit(update))

    def finish(self) -> None:
        """Waits for all updates of a step."""
        running = self.running + [self.threads.submit(update) for update in self.late]
        self.late, self.running = [], []
        for each in running:
            each.result()

    def _update_of(self, bucket: Bucket, mark: Mark) -> Callable[[], None]:
        of = {p for group in self.optimizer.param_groups for p in group["params"]}
        own: Tensors = {}
        for name, gradient in bucket.parts_of_gradient().items():
            parameter = self.owned[name]
            if parameter in of and parameter.requires_grad and name not in self.doubtful:
                if parameter.grad is not None:
                    raise ConfigError(
                        f"'{name}' has a gradient before a step that updates it in the backward: "
                        "call optimizer.zero_grad(), and call the model once for each step"
                    )
                own[name], self.updated[name] = gradient, Spent(gradient)
        return partial(self._update, bucket, mark, own, torch.get_num_threads())

    def _update(self, bucket: Bucket, mark: Mark, gradients: Tensors, threads: int) -> None:
        """In the thread: the optimizer's step of these parameters."""
        torch.set_num_threads(threads)  # each thread has its own
        streams = streams_of(bucket.device)
        if streams is not None:
            streams.wait(mark)
        if not self.ignores and bool(unscaled(gradients.values(), 1.0)):
            return  # the step's end tells of it
        for name, gradient in gradients.items():
            self.owned[name].grad = gradient
        try:
            step_of(self.optimizer, {self.owned[name] for name in gradients})
        finally:
            for name in gradients:
                self.owned[name].grad = None

    def _handed_out(self, scale: float) -> None:
        """The backward of the loss, whose gradient is `scale`."""
        if self.now != "loss.backward()":
            return
        if scale != 1.0:
            raise ConfigError(
                f"the gradient of the loss is {scale:g}, and merakc.step_in_backward has updated "
                "what lives on the host by gradients of the loss itself: scale the loss inside "
                "the model, or the learning rate"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for name, spent in self.updated.items():
                self.owned[name].grad = spent
        self.now = "optimizer.step()"

    def _ends(self) -> None:
        """Before the optimizer's step of the rest."""
        if self.now == "a call":
            return
        if self.now != "optimizer.step()":
            raise ConfigError(
                f"optimizer.step(), and merakc.step_in_backward waits for {self.now}: what lives "
                "on the host is updated already"
            )
        if settings_of(self.optimizer) != self.settings:
            raise ConfigError(
                f"the optimizer is {settings_of(self.optimizer)} in its step and was "
                f"{self.settings} in the backward, where merakc.step_in_backward has updated what "
                "lives on the host: change learning rates and other settings behind "
                "optimizer.step(), or before the model is called"
            )
        for name, spent in self.updated.items():
            with torch._C.DisableTorchFunctionSubclass():
                found = self.owned[name].grad
            if found is not spent:
                raise ConfigError(
                    f"the gradient of '{name}' was taken away or replaced before optimizer.step(), "
                    "and merakc.step_in_backward has updated it already"
                )
            self.owned[name].grad = None
        self.updated.clear()
        self.now = "a call"


def step_of(optimizer: Optimizer, wanted: Set[torch.Tensor]) -> None:
    """The step of an optimizer for some of its parameters, without anybody's hooks. Raises
    `ConfigError` for one that counts its steps, or adapts, in its parameter groups.
    """
    part = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # which schedulers put there
            vars(part)[name] = OrderedDict() if name.endswith("_hooks") else value
    part.param_groups = [
        group | {"params": [p for p in group["params"] if p in wanted]}
        for group in optimizer.param_groups
    ]
    with stepping():
        type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]
    for group, own in zip(optimizer.param_groups, part.param_groups, strict=True):
        if settings_of(part) != settings_of(optimizer) or group.keys() != own.keys():
            raise ConfigError(
                f"{type(optimizer).__name__} changes its parameter groups in a step, which "
                "merakc.step_in_backward takes bucket by bucket: leave it out"
            )


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
        raise ConfigError("step_in_backward: this model has an optimizer that steps there already")
    check(optimizer)
    if optimizer in bringing or not is_by_parameter(optimizer):
        raise ConfigError(
            f"step_in_backward: {type(optimizer).__name__} is not found to update every parameter "
            "that a rank holds by its own gradient and state alone, so that its step cannot be "
            "taken bucket by bucket; leave it out, or use an optimizer such as AdamW"
        )
    InBackward(optimizer, sharded, ignores=scale.on_nonfinite == "ignore")
