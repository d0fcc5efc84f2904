"""What a parallel model gives beside training: forwards, and whole tensors of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn

from merakc.batches.split import batch_size_of, call_arguments
from merakc.frontend.calls.around import check_around
from merakc.frontend.values.outside import WithLoss
from merakc.ir.batches import Rows
from merakc.runtime.health.job import call
from merakc.runtime.part import plain
from merakc.runtime.state import gather_full
from merakc.train.calls import model_call
from merakc.train.compiled_step import CompiledStep, Form
from merakc.train.data.whole import own_part
from merakc.train.mirror import Mirror
from merakc.train.outputs import check_finite, loss_name, outputs_of
from merakc.train.outside.caches import TENSORS, asked_for, cache_in, give_room, with_cache
from merakc.train.outside.deferred import of_evaluation, values_in
from merakc.train.outside.generating import drawing_alike
from merakc.train.outside.parts import Unshared, Within
from merakc.train.outside.results import share_results

Tensors = dict[str, torch.Tensor]


class Forwards(Mirror):
    """A model of which `_steps` are compiled; `_reads_whole` says whether calls take the whole
    job's batch.
    """

    def _own(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def read_whole_batches(self, on: bool = True) -> None:
        """Lets calls take the whole job's batch, the same on every rank, as one process would:
        each dp rank trains on its own samples of it, and `predict` gives those of all.
        """
        object.__setattr__(self, "_reads_whole", on)
        self._own("_steps").whole, self._own("_steps").copied = {}, False

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """This dp rank's batch, of what a call is given."""
        whole = self._own("_reads_whole")
        return own_part(self._own("_steps"), args, kwargs) if whole else (args, kwargs)

    def warm(self, shapes: Iterable[Any]) -> None:
        """Compiles steps for batches of these shapes now, and not when the first of each comes.

        Each is a batch as `auto_parallel` takes it, of which only the shapes, dtypes and values
        that are no tensors count: tensors may be without values (`device="meta"`), unless the
        forward reads some. The steps are those that a call would take in the mode that the model is
        in now, and with gradients on or off as they are. Every rank must call it, with the shapes
        of its own batches.
        """
        check_around("model.warm")
        steps, train = self._own("_steps"), self.training and torch.is_grad_enabled()
        for batch in shapes:
            args, kwargs = call_arguments(batch)
            with model_call(
                steps, "model.warm(...)", args, kwargs, training=self.training, runs=False
            ):
                args, kwargs = self._given(args, kwargs)
                steps.compile(args, kwargs, Form(train=train, kept=steps.wanted))

    @torch.no_grad()
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything that the model's forward returns, whole, on every rank of this dp replica.

        Tensors with a batch dim are joined over the micro-batches; the loss is that of the whole
        batch. Nothing is differentiated. Values that are no tensors and no plain data are errors if
        they are used, but for a cache of keys and values that is given, or asked for by
        `use_cache=True`: it gets the new ones.
        """
        check_around("the model")
        self._own("_memory").settle()
        steps = self._own("_steps")
        args, kwargs = values_in((args, kwargs))
        args, kwargs = self._own("_lent").filled("model.predict(...)", args, kwargs)
        kwargs = asked_for(self, kwargs)
        with model_call(steps, "model.predict(...)", args, kwargs, training=self.training):
            return self._predicted(args, kwargs)

    def _predicted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Everything that the forward returns; a cache that it is given gets what is new."""
        run = partial(self._outputs, args)
        if (cache := cache_in(kwargs)) is not None:
            return with_cache(self._alone, cache, kwargs, run)
        return run(kwargs, self._alone)

    @property
    def _alone(self) -> nn.Module:
        """What is recorded, without a loss that is outside it."""
        source: nn.Module = self._own("_steps").source
        return source if self._own("_steps").loss is None else WithLoss(source, None)

    @torch.no_grad()
    def _outputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module, mark: Any = None
    ) -> Any:
        steps, dims = self._own("_steps"), None
        if TENSORS in kwargs and not self._splits(args, kwargs):
            return self._alone_results(args, kwargs, module, mark)
        args, kwargs = self._given(args, kwargs)
        if TENSORS in kwargs:  # a cache's, each of all samples
            cached = {f"{TENSORS}.{n}": Rows(0) for n, t in kwargs[TENSORS].items() if t.dim() > 1}
            dims = {**(steps.planned.plan.batch_dims or {}), **cached}
        form = Form(
            train=False, results=True, undivided=bool(mark), mark=mark, module=module, dims=dims
        )
        return self._results(steps.compile(args, kwargs, form), args, kwargs)

    def _splits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether ranks of dp share in texts: not in those that each goes on with by itself, nor
        where some would have none.
        """
        plan, whole = self._own("_steps").planned.plan, bool(self._own("_reads_whole"))
        return whole and bool(plan.dp <= batch_size_of(args, kwargs, plan.batch_dims))

    @torch.no_grad()
    def _alone_results(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module, mark: Any
    ) -> Any:
        """What a module returns of what this rank is given, which is no part of a dp batch."""
        own = Unshared(module)
        form = Form(train=False, results=True, alone=True, mark=mark, module=own, dims={})
        step = self._own("_steps").compile(args, kwargs, form)
        return self._results(step, args, kwargs)["outputs"]

    def _evaluated(self, part: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """All that a module inside the model returns, which is called by itself, of what this rank
        gives it: the ranks of dp are no parts of one batch. Nothing is differentiated.
        """

        def run(given: Mapping[str, Any], own: nn.Module, mark: Any = None) -> Any:
            return self._alone_results(args, given, own, (module.path, mark))

        check_around("the model")
        self._own("_memory").settle()
        steps = self._own("_steps")
        module = Within(steps.source, part)
        name = f"model.{module.path}(...)"
        args, kwargs = self._own("_lent").filled(name, *values_in((args, kwargs)))
        with model_call(steps, name, args, kwargs, training=part.training):
            cache = cache_in(kwargs)
            found = with_cache(module, cache, kwargs, run) if cache else run(kwargs, module)
        learns = any(p.requires_grad for p in self.parameters())
        return pytree.tree_map_only(torch.Tensor, of_evaluation, found) if learns else found

    def _prepare_cache_for_generation(
        self, config: Any, kwargs: dict[str, Any], mode: str, samples: int, longest: int
    ) -> None:
        """What transformers' `generate` asks for a cache."""
        give_room(self, config, kwargs, mode, self._longest(config, longest))
        prepare: Any = type(self._source)._prepare_cache_for_generation
        prepare(self, config, kwargs, mode, samples, longest)

    def _longest(self, config: Any, longest: int) -> int:
        """The most tokens of a text, with those that follow while ranks of dp go on with longer
        ones. Collective.
        """
        group = None if self._own("_reads_whole") else self._own("_steps").groups.axis("dp")
        if group is None:
            return longest
        own = config.max_new_tokens or longest
        most = torch.tensor(own, device=self._own("_steps").device)
        with call("the length of texts"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
        return longest + int(most) - (config.max_new_tokens or 0)

    def _generated(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the user's own `generate` gives. Ranks of dp go on until all texts have ended."""
        groups, whole = self._own("_steps").groups, self._own("_reads_whole")
        own = inspect.signature(theirs)
        given = own.bind_partial(self, *args, **kwargs).arguments
        if groups.mesh.dp > 1 and not whole and {"synced_gpus"} <= own.parameters.keys() - given:
            kwargs["synced_gpus"] = True
        with drawing_alike(groups, "world" if whole else "model"):
            return theirs(self, *args, **kwargs)

    @torch.no_grad()
    def _results(self, step: CompiledStep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        steps = self._own("_steps")
        result = steps.run(step, args, kwargs, steps.draw(step))
        found = share_results(steps, step, result)
        if step.has_loss:
            loss, _ = steps.share_loss(step, result)
            found[loss_name(step.recording)] = loss
            check_finite(step.recording, loss)
        return outputs_of(step.recording, found, str)

    def keep_outputs(self, *names: str) -> None:
        """Has training steps keep these of the model's outputs, by the names that errors tell, to
        be read after `loss.backward()` too. One that is read before is kept from then on.
        """
        steps = self._own("_steps")
        steps.wanted = steps.wanted.union(names)

    def full_state_dict(self) -> Tensors:
        """The whole model's state under its own names, on the CPU of rank 0; {} elsewhere.

        Every rank must call it.
        """
        self._own("_memory").settle()
        steps = self._own("_steps")
        with call("model.full_state_dict"):
            full = self._gathered({n: plain(t) for n, t in steps.state.items()})
        if self.rank:
            return {}
        full |= {alias: full[name] for alias, name in self._own("_aliases").items()}
        own = steps.source.state_dict()  # with what modules keep beside tensors
        return {n: full[n].detach() if n in full else value for n, value in own.items()}

    def full_gradients(self) -> Tensors:
        """All gradients under the parameters' names, on the CPU of rank 0; {} elsewhere.

        Parameters without a gradient are left out. Every rank must call it.
        """
        steps = self._own("_steps")
        local = {n: plain(t.grad) for n, t in steps.state.items() if t.grad is not None}
        with call("model.full_gradients"):
            return self._gathered(local)

    def _gathered(self, local: Tensors) -> Tensors:
        """The whole tensors on rank 0; the others hold no more than one bucket at a time."""
        steps = self._own("_steps")
        found = list(steps.sharded.wholes(local)) if steps.sharded else []
        return gather_full(local, found, steps.placements, self.plan.mesh, self.rank)
