"""What functions of the user's remember (`functools.lru_cache`) of a forward that is recorded.

In one process a function is called once for its arguments, at the first step, and what it gave
holds for ever. So what a recording leaves in its cache stays there; in the place of the recording's
own tensors, real ones. What has changed before a step has run is looked at anew. Where tensors
cannot be made, since they follow from other tensors, they are computed anew in the next recording,
and have to be the same then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import is_tensor
from torch._subclasses.fake_tensor import FakeTensor

from merakc.frontend.python.content import PLAIN, describe, tensors_in
from merakc.frontend.values.symbols import is_symbolic

Changes = Callable[[], list[str]]
"""The names of what has changed since this was made."""


class Remembered:
    """Functions that remember, with what is known of their caches. `look` takes note of what such a
    function reads in Python.
    """

    def __init__(self, look: Callable[[Any], Changes]) -> None:
        self._look = look
        self._known: dict[Any, Any] = {}
        self._before: dict[Any, set[Hashable]] = {}  # what they had when a recording began
        self._tensors: dict[Any, tuple[Any, dict[str, torch.Tensor]]] = {}  # by how often it missed

    def see(self, function: Any) -> None:
        """Notes a function."""
        self._known[function] = function.cache_info()

    def again(self) -> None:
        """Takes what is in the caches now for known."""
        self._known = {function: function.cache_info() for function in self._known}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors in caches now, by name."""
        for function in self._known:
            misses = function.cache_info().misses
            if self._tensors.get(function, (0,))[0] != misses:
                found = {(function.__name__, key): x for key, x in _entries(function).items()}
                self._tensors[function] = misses, dict(_named(found))
            yield from self._tensors.get(function, (0, {}))[1].items()

    def begin(self) -> None:
        """Before a recording: forgets what was there before a step has run, and is no more."""
        for function, (keys, changes) in [*_early.items()]:
            if changes():
                _take_out(function, [key for key in keys if key in _cache(function)])
                del _early[function]
        self._before = {function: set(_cache(function)) for function in self._known}
        self.again()

    def changed(self) -> Iterator[tuple[Any, str]]:
        """Functions that a recording has called for what an earlier one had called them for too,
        and what they read that is otherwise now.
        """
        for function, of_recording, _ in self._filled():
            calls, changes = _forgotten.get(function, (set(), list))
            if not calls.isdisjoint(map(hash, of_recording)) and (names := changes()):
                yield function, names[0]

    def forget(self) -> None:
        """After a recording: puts real tensors in the place of its own, or takes them out."""
        for function, of_recording, others in [*self._filled()]:
            were = {key: _form(x) for key, x in _entries(function).items() if key in of_recording}
            _take_out(function, of_recording)
            made = {key for key, form in were.items() if _makes(function, key, form)}
            if kept := others | made:
                keys, changes = _early.get(function) or (set(), self._look(function))
                _early[function] = keys | kept, changes
            if gone := were.keys() - made:
                calls, changes = _forgotten.get(function) or (set(), self._look(function))
                _forgotten[function] = calls | set(map(hash, gone)), changes
        self.again()

    def _filled(self) -> Iterator[tuple[Any, list[Hashable], set[Hashable]]]:
        """Functions that were called in a recording, and for which arguments: those for which they
        gave its tensors, and others.
        """
        for function, info in self._known.items():
            if function.cache_info() != info:
                before = self._before.get(function, set())
                new = {key: x for key, x in _entries(function).items() if key not in before}
                own = [key for key, x in new.items() if _is_recorded((key, x))]
                yield function, own, new.keys() - own


# What was remembered since a step has run, and of which arguments, by their hashes, functions had
# something taken out; each with what says which of what they read has changed since the first time.
_early = WeakKeyDictionary[Any, tuple[set[Hashable], Changes]]()
_forgotten = WeakKeyDictionary[Any, tuple[set[int], Changes]]()


def keep_remembered() -> bool:
    """A step runs: what functions have given until now holds for ever. Whether that is something
    new.
    """
    new = len(_early) > 0
    _early.clear()
    return new


def _named(values: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        yield from ((f"{name} {k}", x) for k, x in enumerate(tensors_in(value)))


def _is_recorded(value: Any) -> bool:
    return is_symbolic(value) or any(isinstance(x, FakeTensor) for x in tensors_in(value))


def _form(value: Any) -> Any:
    """What there is to see of a result beside the numbers in its tensors."""
    return describe(value, lambda x: (x.shape, x.dtype, x.requires_grad) if is_tensor(x) else None)


def _makes(function: Any, key: Hashable, form: Any) -> bool:
    """Calls a function once more for arguments that are plain; whether what it gives has the form.
    If not, it is taken out of the cache.
    """
    given = list(key) if type(key) is tuple else [key]
    marks = [k for k, x in enumerate(given) if type(x) is object]  # behind which names stand
    named = given[marks[0] + 1 :] if marks else []
    given = given[: marks[0]] if marks else given
    if function.cache_parameters()["typed"] or not all(isinstance(x, PLAIN) for x in given + named):
        return False
    try:
        with torch.random.fork_rng([]):
            made = function(*given, **dict(zip(map(str, named[::2]), named[1::2], strict=True)))
    except Exception:
        return False
    if _form(made) != form:
        _take_out(function, [key])
        return False
    return True


def _take_out(function: Any, keys: Collection[Hashable]) -> None:
    cache = _cache(function)
    if len(keys) == len(cache):
        function.cache_clear()  # of a cache of some size Python holds more than the dict
    for key in keys:
        cache.pop(key, None)


def _cache(function: Any) -> dict[Hashable, Any]:
    """The dict that a cache is; of one of some size, what Python holds results in."""
    size, own = function.cache_info().currsize, vars(function)
    held = gc.get_referents(function)
    return next(x for x in held if type(x) is dict and x is not own and len(x) == size)


def _entries(function: Any) -> dict[Hashable, Any]:
    """What a cache has for arguments that it knows."""
    cache = _cache(function)
    if function.cache_info().maxsize is None:
        return cache
    own = set(map(id, cache))
    return {k: x for k, x in pairwise(gc.get_referents(function)) if id(k) in own}
