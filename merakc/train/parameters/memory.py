"""The memory that steps read parameters from, when users have given parameters other memory.

`p.data = values` puts a tensor in the place of a parameter's memory. Where a step reads the
parameter itself that is all there is to it. Where parameters stand in buckets, the values are
brought there before the next step, and the old memory is left to whoever holds it, as swaps of
averaged weights do. Tensors of the user's that have the new memory are given the steps' in its
place, so that they see what the optimizer writes, as in one process. Other tensors, dtypes and
devices than those that steps were compiled for are refused. So is memory that parameters of two
models have together, once one is written to: the other would stay as it was. So is memory of which
something has another part, or that Python does not see.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, starmap
from operator import attrgetter, call, eq, is_

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from merakc.errors import ConfigError
from merakc.frontend.python.attributes import Attributes
from merakc.frontend.python.watch import dict_version
from merakc.runtime.part import plain
from merakc.runtime.sharded_state import ShardedState
from merakc.runtime.shards import Bucket

Tensors = dict[str, torch.Tensor]
_FORM = attrgetter("dtype", "device", "shape")
COMPILED = "whose steps are compiled from the model that it was given; change the model before"
_alive: weakref.WeakSet[Memory] = weakref.WeakSet()
# Of parameters of which a rank has a part, the whole tensors that they were given last.
_wholes = WeakTensorKeyDictionary()


def note_whole(
    attribute: str, parameter: torch.Tensor, value: torch.Tensor, *, is_whole: bool
) -> None:
    """Notes what a parameter is given by `.data =`: in one process both would be one from now on.
    Of a whole tensor this rank takes its part.
    """
    if attribute != "data":
        return
    _wholes.pop(parameter, None)  # type: ignore[no-untyped-call]
    if is_whole:
        _wholes[parameter] = weakref.ref(value), None


class Memory:
    """The tensors that a model's modules are to have, by name: those of `state`, that steps read,
    or what is `told` of buffers among them, in the same memory. `module_at` gives a module by its
    path. And the modules that they are to have.
    """

    def __init__(
        self,
        module_at: Callable[[str], nn.Module],
        state: Tensors,
        told: Mapping[str, torch.Tensor],
        sharded: ShardedState | None,
    ) -> None:
        tensors = {**state, **told}
        self.told = [(told[name], state[name]) for name in told.keys() & state.keys()]
        self.owners: list[tuple[str, dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            module = module_at(path)
            held = module._parameters if leaf in module._parameters else module._buffers
            self.owners.append((name, held, leaf, tensor))  # type: ignore[arg-type]
        self.trees = [(m, [*m._modules.items()]) for m in module_at("").modules()]
        self.modules = [module for module, _ in self.trees]
        self.hung = self._hang()
        self.holders = list({id(held): held for _, held, _, _ in self.owners}.values())
        self.versions = self._versions()
        self.attributes = Attributes(chain.from_iterable(_pairs(m) for m, _ in self.trees))
        self.forms = {n: (t.dtype, t.device, plain(t).shape) for n, t in tensors.items()}
        self.tensors = list(tensors.values())
        self.buffers = [t for t in self.tensors if not isinstance(t, nn.Parameter)]
        self.found = [(held.get, leaf) for _, held, leaf, _ in self.owners]
        self.sharded = sharded
        self.buckets = list(sharded.buckets) if sharded is not None else []
        with torch._C.DisableTorchFunctionSubclass():  # of what this rank has, as in `settle`
            self.places = {b: _pointers(b.owned) for b in self.buckets}
        # Parameters that were given the memory of another, by name, and where that lies.
        self.shared: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.given = Tensors()  # memory that parameters were given, while others hold it, by name
        _alive.add(self)

    def check_seen(self) -> None:
        """Raises `ConfigError` where an update in the backward waits for the optimizer's step."""
        if self.sharded is not None and self.sharded.updates is not None:
            self.sharded.updates.check(of_weights=True)

    def settle(self) -> None:
        """Brings values that were given other memory to where steps read them.

        Raises `ConfigError` for tensors, dtypes, devices and shapes that steps were not compiled
        for, where only some parameters of a bucket were given other memory while something else
        holds the old: what is written there later would be lost, and where a parameter that was
        given another's memory no longer has its values. And as `check_seen` does.
        """
        self.check_seen()
        if len(_wholes):
            self._check_wholes()
        with torch._C.DisableTorchFunctionSubclass():
            if not self._unchanged():
                self._check()
            for shown, own in self.told:
                if shown.data_ptr() != own.data_ptr():
                    own.data = plain(shown)
            for bucket in self.buckets:
                places = _pointers(bucket.owned)
                moved = {n for n, at in places.items() if at != self.places[bucket][n]}
                for name in self.shared.keys() & places.keys():
                    self._check_shared(bucket.owned[name], name, moved)
                for name in self.given.keys() & places.keys():
                    self._check_given(bucket.owned[name], name, moved)
                if moved:
                    self._adopt(bucket, moved)
                    self.places[bucket] = _pointers(bucket.owned)
        self.attributes.pass_on()

    def _hang(self) -> tuple[list[str], list[int], list[nn.Module]]:
        """Which modules are in which, by name."""
        inner = list(map(attrgetter("_modules"), self.modules))
        names, inside = chain.from_iterable(inner), chain.from_iterable(map(dict.values, inner))
        return list(names), list(map(len, inner)), list(inside)

    def _versions(self) -> list[int]:
        """How often the dicts of modules and of tensors were changed."""
        inner = map(attrgetter("_modules"), self.modules)
        return list(map(dict_version, chain(inner, self.holders)))

    def _unchanged(self) -> bool:
        """Whether modules hold the modules and tensors that they held, of the same forms: in loops
        in C.
        """
        versions = self._versions()
        if versions != self.versions:
            there = all(map(is_, starmap(call, self.found), self.tensors))
            if not there or self._hang() != self.hung:
                return False
            self.versions = versions
        return all(map(eq, map(_FORM, self.tensors), self.forms.values())) and not any(
            map(attrgetter("requires_grad"), self.buffers)
        )

    def _check(self) -> None:
        for module, before in self.trees:
            now = [*module._modules.items()]
            if now != before:
                pairs = set(now) ^ set(before) or set(now)
                raise ConfigError(
                    f"module '{min(name for name, _ in pairs)}' was added to the model, taken out "
                    f"of it, or moved in it, after auto_parallel, {COMPILED}"
                )
        for name, held, leaf, tensor in self.owners:
            if held.get(leaf) is not tensor:
                is_parameter = isinstance(tensor, nn.Parameter)
                own = f"get_parameter({name!r}).data" if is_parameter else f"get_buffer({name!r})"
                raise ConfigError(
                    f"'{name}' is another tensor than the one that auto_parallel made, which steps "
                    f"read; copy values into it: model.{own}.copy_(values)"
                )
            if (tensor.dtype, tensor.device, tensor.shape) != self.forms[name]:
                dtype, device, shape = self.forms[name]
                raise ConfigError(
                    f"'{name}' is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} now, and "
                    f"steps are compiled for {dtype} {tuple(shape)} on {device}; change the model "
                    "before auto_parallel, whose precision= and device= say what steps compute in"
                )
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                raise ConfigError(
                    f"buffer '{name}' requires a gradient after auto_parallel, {COMPILED}"
                )

    def _check_shared(self, own: torch.Tensor, name: str, moved: set[str]) -> None:
        """What is shared stays noted while both have the memory; written to, they differ."""
        of, at = self.shared[name]
        other = of()
        if name in moved or other is None or other.data_ptr() != at:
            del self.shared[name]
        elif not torch.equal(own, other):
            raise ConfigError(
                f"'{name}' was given the memory of another parameter by .data =, and one of them "
                "was written to since: steps bring values to memory of their own, where the other "
                "does not see them; copy values instead, after every update: p.data.copy_(values)"
            )

    def _check_wholes(self) -> None:
        """While somebody holds a whole tensor its part is what it was, or it would be another; of
        one whose part is on other ranks, while nothing here has been updated.
        """
        sources = {id(t.source.owners) for t in self.tensors if hasattr(t, "source")}
        for own, (held, before) in [*_wholes.items()]:  # type: ignore[no-untyped-call]
            if (whole := held()) is None or id(own.source.owners) not in sources:
                continue
            if plain(own).numel():
                is_same = torch.equal(plain(own), own.source.part(plain(whole)))
            else:
                now = sum(plain(t)._version for t in self.tensors)
                _wholes[own] = held, now
                is_same = before in (None, now)
            if not is_same:
                raise ConfigError(
                    f"'{own.source.name}' was given a whole tensor by .data =, of which each rank "
                    "takes its part, and one of both was written to since; in one process the "
                    "other would be, too, and something still holds it: let go of it (del), or "
                    "give a copy: p.data = values.clone()"
                )

    def _check_given(self, own: torch.Tensor, name: str, moved: set[str]) -> None:
        """Memory stays noted while others hold it, too; a parameter that is written to differs."""
        if name in moved or not _held_by_others(self.given)[name]:
            del self.given[name]
        elif not torch.equal(own, self.given[name]):
            raise ConfigError(
                f"'{name}' was given memory by .data = that something else still holds, as a part "
                "of a larger tensor, and was written to since, which is not seen there; give a "
                "copy instead: p.data = values.clone()"
            )

    def _adopt(self, bucket: Bucket, moved: set[str]) -> None:
        values = {n: bucket.owned[n].data for n in moved}
        own = {id(bucket.owned[n]) for n in moved}
        others = {t.data_ptr(): t for m in _alive for t in m.tensors if id(t) not in own}
        for name, value in values.items():
            if (other := others.get(value.data_ptr())) is not None and value.numel():
                self.shared[name] = weakref.ref(other), value.data_ptr()
        if not bucket.is_alone:
            left = sorted(n for n, p in bucket.owned.items() if p.numel() and n not in moved)
            if left:
                raise ConfigError(
                    f"'{min(moved)}' was given other memory by .data =, '{left[0]}' was not, and "
                    "something holds the old memory of both: whether what is written there counts "
                    "cannot be known; copy values instead: p.data.copy_(values)"
                )
            bucket.move()
        bucket.restore()
        for name, value in values.items():
            bucket.owned[name].data.copy_(value)
        given = {n: v for n, v in values.items() if v.numel() and n not in self.shared}
        if any(_held_by_others(given).values()):
            _follow({n: (v, bucket.owned[n].data) for n, v in given.items()})
            self.given |= {n: given[n] for n, held in _held_by_others(given).items() if held}


def _held_by_others(tensors: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Whether something else than these tensors holds the memory of each."""
    own = Counter(t.untyped_storage()._cdata for t in tensors.values())
    return {
        n: torch._C._storage_Use_Count(s._cdata) > own[s._cdata] + 1  # the last is `s`
        for n, s in ((n, t.untyped_storage()) for n, t in tensors.items())
    }


def _follow(moved: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Gives all other tensors of Python's that are one with the first of each two the memory of the
    second.
    """
    places = {(_memory(old), _lies(old)): new for old, new in moved.values()}
    memories, own = {memory for memory, _ in places}, {id(t) for two in moved.values() for t in two}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and torch._C._has_storage(thing):
            memory = _memory(thing)
            if memory in memories and id(thing) not in own and (memory, _lies(thing)) in places:
                thing.data = places[memory, _lies(thing)]


def _memory(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Of its memory, which part a tensor has, and how."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _pairs(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A module's tensors, and those of the user's module that they stand for."""
    source = vars(module).get("_source", module)
    theirs = {**source._parameters, **source._buffers}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and theirs.get(name) is not None:
            yield tensor, theirs[name]


def _pointers(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Where the elements of each lie."""
    return {n: p.data_ptr() for n, p in parameters.items() if p.numel()}
