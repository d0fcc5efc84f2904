"""Caches of keys and values, which a forward is given and adds to, as texts are generated.

A cache is an object of a library's, of `layers` that each `update` themselves with new keys and
values. A compiled step is given its tensors, and gives what the layers of a copy are updated with;
then the cache itself is updated with that, by its own code, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.frontend.values.absent import Absent
from merakc.frontend.values.outside import WithLoss

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
    layers = getattr(cache, "layers", None)
    known = isinstance(layers, list) and all(callable(getattr(x, "update", None)) for x in layers)
    return cache if known and layers and not _has_more(layers) else None


def _has_more(layers: Sequence[Any]) -> bool:
    """Whether some layers keep other states too, that other methods write."""
    return any(map(_has_other_updates, set(map(type, layers))))


@cache
def _has_other_updates(kind: type) -> bool:
    return any(name.startswith("update_") for name in dir(kind))


class WithCache(WithLoss):
    """A model that is given the tensors of a cache in its place, and gives what it adds to it."""

    cache: Any

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__(model, None)
        # Without the tensors: a step keeps what it was compiled from.
        vars(self).update(cache=_with_layers(cache, [_with(x, {}) for x in cache.layers]))

    @property
    def mark(self) -> Hashable:
        """All that its cache holds beside tensors."""
        held = [(type(x), sorted(vars(x).items(), key=str)) for x in self.cache.layers]
        own = sorted((k, v) for k, v in vars(self.cache).items() if k != "layers")
        return type(self.cache), repr(own), repr(held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; by the number of the layer, the keys and values that are new."""
        given: dict[int, Tensors] = {}
        for name, tensor in kwargs.pop(TENSORS).items():
            number, _, own = name.partition(".")
            given.setdefault(int(number), {})[own] = tensor.clone()  # which it may write to
        layers = [_with(x, given.get(k, {})) for k, x in enumerate(self.cache.layers)]
        cache, new = _with_layers(self.cache, layers), dict[str, tuple[Any, ...]]()
        for number, layer in enumerate(layers):
            vars(layer)["update"] = partial(_noted, new, str(number), layer.update)
        outputs = super().forward(*args, **{CACHE: cache}, **kwargs)
        if len(cache.layers) != len(self.cache.layers):
            raise ConfigError(
                f"the forward adds layers to the {type(cache).__name__} that it is given; make "
                "the cache for the model's config, or generate with use_cache=False"
            )
        return outputs, new


def with_cache(model: nn.Module, cache: Any, kwargs: Mapping[str, Any], run: Run) -> Any:
    """What a call gives that is given a cache, to which that call's keys and values are added."""
    module = WithCache(model, cache)
    tensors = {
        f"{number}.{name}": value
        for number, layer in enumerate(cache.layers)
        for name, value in vars(layer).items() if isinstance(value, torch.Tensor)
    }  # fmt: skip
    rest = {name: value for name, value in kwargs.items() if name != CACHE}
    outputs, new = run({**rest, TENSORS: tensors}, module, module.mark)
    for number, states in new.items():
        cache.layers[int(number)].update(*states)
    if isinstance(outputs, dict) and isinstance(outputs.get(CACHE), Absent):
        outputs[CACHE] = cache
    return outputs


def asked_for(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the cache that its forward would make, where it is to use one."""
    is_asked = kwargs.get("use_cache") is True and kwargs.get(CACHE) is None
    makes = getattr(model, "_supports_default_dynamic_cache", None)
    if not (is_asked and makes is not None and makes()) or model.config.is_encoder_decoder:
        return dict(kwargs)
    from transformers.cache_utils import DynamicCache

    given = {**kwargs, CACHE: DynamicCache(config=model.config.get_text_config(decoder=True))}
    return dict(kwargs) if cache_in(given) is None else given


def give_room(model: Any, config: Any, kwargs: dict[str, Any], mode: str, longest: int) -> None:
    """Gives what generates by `config` a cache of one size, where it would make one that grows with
    each token: a step is compiled for each size.
    """
    grows = config.use_cache is not False and config.cache_implementation is None
    if not grows or kwargs.get(CACHE) is not None or mode not in FORWARD:
        return
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    rounded = -(-longest // ROOM) * ROOM
    made = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=rounded)
    # Those of a window count in Python how far it has slid: masks alone will say it.
    if all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in made.layers):
        made.layers = [StaticLayer(rounded) for _ in made.layers]
        kwargs[CACHE], config.disable_compile = made, True  # torch would compile what is compiled


def _noted(
    new: dict[str, tuple[Any, ...]], number: str, update: Callable[..., Any],
    keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Updates a layer, and notes with what."""
    if number in new or args or any(x is not None for x in kwargs.values()):
        raise ConfigError(
            "the forward updates a layer of its cache twice, or with more than keys and values; "
            "generate with use_cache=False"
        )
    new[number] = keys, values
    return update(keys, values)


def _with(layer: Any, tensors: Tensors) -> Any:
    """A copy of a layer with these tensors in place of its own."""
    made = copy(layer)
    held = {n: x for n, x in vars(layer).items() if not isinstance(x, torch.Tensor)}
    vars(made).clear()
    vars(made).update(held | tensors)
    return made


def _with_layers(cache: Any, layers: list[Any]) -> Any:
    """A copy of a cache with other layers."""
    made = copy(cache)
    made.layers = layers
    return made
