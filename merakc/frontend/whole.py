"""Modules that a recorder keeps whole: each of their calls is one node."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.frontend.builder import GraphBuilder
from merakc.frontend.calls.draws import Draws
from merakc.frontend.opaque import CannotBeNodeError, UntraceableError, module_call, try_out
from merakc.frontend.values.symbols import is_symbolic
from merakc.ir.graph import Ref
from merakc.kernels.opaque import OPAQUE, Call, enter


class WholeModules(GraphBuilder):
    """A graph that is written as calls pass, with a node for each call of some modules.

    While it is `paused`, nothing is written.
    """

    paused: bool
    opaques: int  # such nodes so far
    draws: Draws
    _scalar: Callable[[str], torch.Tensor]

    @contextlib.contextmanager
    def keeping_whole(
        self, path: str, module: torch.nn.Module, cause: UntraceableError
    ) -> Iterator[None]:
        """Makes every call of a module one node while it is entered."""
        before, forward = dict(vars(module)), module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._at_once(path, module, forward, cause, args, kwargs)

        module.forward = call
        try:
            yield
        finally:
            del module.forward
            if "forward" in before:
                module.forward = forward

    @contextlib.contextmanager
    def keeping_loose(
        self, path: str, kind: type[torch.nn.Module], cause: UntraceableError
    ) -> Iterator[None]:
        """Makes every call of a module of the forward's own one node while it is entered."""
        own = vars(kind).get("forward")
        forward = kind.forward

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(forward, module)
            if self.modules[-1] != path:
                return bound(*args, **kwargs)
            return self._at_once(path, module, bound, cause, args, kwargs)

        kind.forward = call
        try:
            yield
        finally:
            if own is None:
                del kind.forward  # it is inherited
            else:
                kind.forward = own

    def _at_once(
        self,
        path: str,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        cause: UntraceableError,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A module's call as one node, or as a part of one."""
        if self.paused:
            return forward(*args, **kwargs)
        self.paused = True
        try:
            return self._whole(path, module, forward, cause, args, kwargs)
        except CannotBeNodeError as error:
            raise UntraceableError(
                str(cause), self.modules[:-1], cause.source, str(error), refused=path
            ) from error
        finally:
            self.paused = False

    def _whole(
        self,
        path: str,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        cause: UntraceableError,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Tries a module's call out, and writes its node."""
        call, given = module_call(module, forward, args, kwargs)
        if is_symbolic((given, call.leaves)):
            raise CannotBeNodeError(
                "it is given tensors or numbers that depend on the data in shape"
            )
        real = {id(slot.fake): slot.real for slot, _ in self.states}
        held = given[len(given) - len(call.parameters) - len(call.buffers) :]
        state = [(real[id(t)] if id(t) in real else t.to("meta"), t.dtype) for t in held]
        specs = [(tuple(t.shape), t.dtype) for t in given[: len(given) - len(held)]]
        result, flops = try_out(call, specs, state)
        self.opaques += 1
        outputs = result.form[0]
        facts = path, cause.source, cause.reason, flops, self.opaques
        entry = Call(call, outputs, *facts, holding=call.holding)
        key = enter(entry)
        self.functions[key] = entry  # held as long as the graph is
        outs = [torch.empty(shape, dtype=dtype) for shape, dtype in outputs]
        self.draws.prepare(self._scalar)
        seeds = self._args(self.draws.scalars)
        ref = self._emit(OPAQUE, (self._args(given), seeds, key), {}, outs)
        for index, out in enumerate(outs):
            self.aliases.add(out, Ref(ref.node, index))
        after = outs[len(outs) - len(call.buffers) :]
        for (name, *_), out in zip(call.buffers, after, strict=True):
            value = self._emit("aten.detach.default", (self._ref(out),), {}, (out,))
            self.aliases.write(self._alias(module.get_buffer(name)), value, self.grads)
        tensors = iter(outs)
        leaves = [next(tensors) if x is torch.Tensor else x for x in result.leaves]
        return pytree.tree_unflatten(leaves, result.structure)
