"""Caches of keys and values, which a forward is given and adds to, as texts are generated.

A cache is an object of a library's, of `layers` that each `update` themselves with new keys and
values, or it holds several such, as that of an encoder-decoder does. A compiled step is given its
tensors, and gives what the layers of a copy are updated with, and what else the forward changes of
that; then the cache itself is updated with it, by its own code, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import cache, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.values.absent import Absent
from merakc.frontend.values.outside import WithLoss
from merakc.frontend.values.results import PLAIN

CACHE, TENSORS = "past_key_values", "cached"
# Tokens by which caches grow that `generate` makes: a step is compiled for each size.
ROOM = 64
# The ways to generate that never go back by some tokens.
FORWARD = ("greedy_search", "sample", "beam_search", "beam_sample")
Tensors = dict[str, torch.Tensor]
Run = Callable[[dict[str, Any], nn.Module, Hashable], Any]
"""Gives all that a module returns, of a batch; the last tells such modules apart."""


def cache_in(kwargs: Mapping[str, Any]) -> Any | None:
    """The cache that a call is given, if there is one of a kind that can be followed."""
    cache = kwargs.get(CACHE)
    parts = [part for _, part in _parts(cache)]
    layers = [layer for part in parts for layer in part.layers]
    known = all(callable(getattr(layer, "update", None)) for layer in layers)
    is_whole = bool(parts) and all(part.layers for part in parts)
    return cache if known and is_whole and not _has_more(cache, layers) else None


def _parts(cache: Any) -> list[tuple[str, Any]]:
    """What has layers of a cache: itself, or what it holds under these names."""
    held = {"": cache, **getattr(cache, "__dict__", {})}
    return [(name, x) for name, x in held.items() if isinstance(getattr(x, "layers", None), list)]


def _layers(cache: Any) -> Iterator[tuple[str, Any]]:
    """The layers of a cache, by where they stand in it."""
    for name, part in _parts(cache):
        yield from ((f"{name}{'.' * bool(name)}{k}", x) for k, x in enumerate(part.layers))


def _beside(cache: Any) -> Iterator[tuple[str, str, Any]]:
    """What a cache holds beside layers: the name of the part that has it, its own, and itself."""
    parts = dict(_parts(cache))
    for name, part in {"": cache, **parts}.items():
        for own, value in vars(part).items():
            if own != "layers" and (name or own not in parts):
                yield name, own, value


def _has_more(cache: Any, layers: Sequence[Any]) -> bool:
    """Whether some layers keep other states too, that other methods write, or what is around them
    keeps tensors.
    """
    more = pytree.tree_leaves([value for _, _, value in _beside(cache)])
    tensors = any(isinstance(x, torch.Tensor) for x in more)
    return tensors or any(map(_has_other_updates, set(map(type, layers))))


@cache
def _has_other_updates(kind: type) -> bool:
    return any(name.startswith("update_") for name in dir(kind))


class WithCache(WithLoss):
    """A model that is given the tensors of a cache in its place, and gives what it adds to it."""

    cache: Any

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__(model, None)
        # Without the tensors: a step keeps what it was compiled from.
        bare = {place: _with(layer, {}) for place, layer in _layers(cache)}
        vars(self).update(cache=_with_layers(cache, bare))

    @property
    def mark(self) -> Hashable:
        """All that its cache holds beside tensors."""
        held = [(at, type(x), sorted(vars(x).items(), key=str)) for at, x in _layers(self.cache)]
        kinds = [(name, type(part)) for name, part in _parts(self.cache)]
        return type(self.cache), repr(kinds), repr(sorted(_beside(self.cache), key=str)), repr(held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; by the place of the layer, the keys and values that are new; what
        else the forward has changed of its cache.
        """
        given: dict[str, Tensors] = {}
        for name, tensor in kwargs.pop(TENSORS).items():
            place, _, own = name.rpartition(".")
            given.setdefault(place, {})[own] = tensor.clone()  # which it may write to
        layers = {at: _with(x, given.get(at, {})) for at, x in _layers(self.cache)}
        cache, new = _with_layers(self.cache, layers), dict[str, tuple[Any, ...]]()
        for place, layer in layers.items():
            vars(layer)["update"] = partial(_noted, new, place, layer.update)
        outputs = super().forward(*args, **{CACHE: cache}, **kwargs)
        if [place for place, _ in _layers(cache)] != [*layers]:
            raise ConfigError(
                f"the forward adds layers to the {type(cache).__name__} that it is given; make "
                "the cache for the model's config, or generate with use_cache=False"
            )
        return outputs, new, _changed(self.cache, cache)


def _changed(before: Any, after: Any) -> dict[str, dict[str, Any]]:
    """What a cache holds otherwise than before, beside its layers: by part and name."""
    known = {(part, name): value for part, name, value in _beside(before)}
    found: dict[str, dict[str, Any]] = {}
    for part, name, value in _beside(after):
        if (part, name) in known and known[part, name] is value:
            continue
        if not all(x is None or isinstance(x, PLAIN) for x in pytree.tree_leaves(value)):
            raise ConfigError(
                f"the forward sets '{name}' of the {type(after).__name__} that it is given to a "
                f"{type(value).__name__}, which is no plain value; generate with use_cache=False"
            )
        if (part, name) not in known or known[part, name] != value:
            found.setdefault(part, {})[name] = value
    return found


def with_cache(model: nn.Module, cache: Any, kwargs: Mapping[str, Any], run: Run) -> Any:
    """What a call gives that is given a cache, to which that call's keys and values are added."""
    module = WithCache(model, cache)
    layers, parts = dict(_layers(cache)), {"": cache, **dict(_parts(cache))}
    tensors = {
        f"{place}.{name}": value
        for place, layer in layers.items()
        for name, value in vars(layer).items() if isinstance(value, torch.Tensor)
    }  # fmt: skip
    rest = {name: value for name, value in kwargs.items() if name != CACHE}
    outputs, new, changed = run({**rest, TENSORS: tensors}, module, module.mark)
    for place, states in new.items():
        layers[place].update(*states)
    for name, values in changed.items():
        vars(parts[name]).update(deepcopy(values))  # the step keeps its own
    if isinstance(outputs, dict) and isinstance(outputs.get(CACHE), Absent):
        outputs[CACHE] = cache
    return outputs


def asked_for(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the cache that its forward would make, where it is to use one."""
    is_asked = kwargs.get("use_cache") is True and kwargs.get(CACHE) is None
    makes = getattr(model, "_supports_default_dynamic_cache", None)
    if not (is_asked and makes is not None and makes()):
        return dict(kwargs)
    from transformers.cache_utils import DynamicCache

    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    given = {**kwargs, CACHE: _of_both(model, own)}
    return dict(kwargs) if cache_in(given) is None else given


def _of_both(model: Any, own: Any) -> Any:
    """A decoder's cache; of an encoder-decoder, with one of what the encoder says beside it."""
    if not model.config.is_encoder_decoder:
        return own
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(own, DynamicCache(config=config))


def give_room(model: Any, config: Any, kwargs: dict[str, Any], mode: str, longest: int) -> None:
    """Gives what generates by `config` a cache of one size, where it would make one that grows with
    each token: a step is compiled for each size.
    """
    grows = config.use_cache is not False and config.cache_implementation is None
    # An assistant's is given to it again, with more tokens to come, and cut.
    goes_back = mode not in FORWARD or getattr(config, "is_assistant", False)
    if not grows or goes_back or kwargs.get(CACHE) is not None:
        return
    if not model._supports_default_dynamic_cache():
        return
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    rounded = -(-longest // ROOM) * ROOM
    made = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=rounded)
    # Those of a window count in Python how far it has slid: masks alone will say it.
    if all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in made.layers):
        made.layers = [StaticLayer(rounded) for _ in made.layers]
        # Torch would compile what is compiled.
        kwargs[CACHE], config.disable_compile = _of_both(model, made), True


def _noted(
    new: dict[str, tuple[Any, ...]], place: str, update: Callable[..., Any],
    keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Updates a layer, and notes with what."""
    if place in new or args or any(x is not None for x in kwargs.values()):
        raise ConfigError(
            "the forward updates a layer of its cache twice, or with more than keys and values; "
            "generate with use_cache=False"
        )
    new[place] = keys, values
    return update(keys, values)


def _with(layer: Any, tensors: Tensors) -> Any:
    """A copy of a layer with these tensors in place of its own."""
    made = copy(layer)
    held = {n: x for n, x in vars(layer).items() if not isinstance(x, torch.Tensor)}
    vars(made).clear()
    vars(made).update(held | tensors)
    return made


def _with_layers(cache: Any, layers: Mapping[str, Any]) -> Any:
    """A copy of a cache with other layers."""
    made = copy(cache)
    parts = {name: copy(part) if name else made for name, part in _parts(cache)}
    vars(made).update({name: part for name, part in parts.items() if name})
    for name, own, value in _beside(cache):
        if isinstance(value, (dict, list, set)):  # which the forward may write to
            vars(parts[name] if name else made)[own] = deepcopy(value)
    for name, part in parts.items():
        part.layers = [x for place, x in layers.items() if place.rpartition(".")[0] == name]
    return made
