"""Layers that share one set of parameters: a model of few parameters that computes as much.

Lin et al. 2021 (arXiv 2110.03888) begin to train so, and give every layer its own later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from merakc.errors import ConfigError
from merakc.train.parameters.retired import check_idle, retire
from merakc.train.weights import check_has_weights, check_is_plain

CONTAINERS = (nn.ModuleList, nn.Sequential)
KEY = "_shared_layers"  # what a model's module says of its layers
_REMEDY = (
    'give layers="blocks", the name of the nn.ModuleList or nn.Sequential whose members they are, '
    'or the names of all layers, layers=["blocks.0", "blocks.1"]'
)
Named = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Layers that share parameters: the same `names` inside each, of `numel` elements."""

    layers: tuple[str, ...]
    names: tuple[str, ...]
    numel: int

    def __str__(self) -> str:
        first, *others = self.layers
        return (
            f"{', '.join(others)} with {first}: {len(self.names)} parameters of {self.numel:,} "
            "elements"
        )


def share_layers(model: nn.Module, layers: Named = None) -> tuple[Sharing, ...]:
    """Lets layers that repeat share one set of parameters, those of the first; says which do.

    Layers repeat that are members of one `nn.ModuleList` or `nn.Sequential`, of one class, with
    parameters and buffers of the same names, shapes and dtypes; the outermost such alone. Buffers
    stay each layer's own. Call it before `auto_parallel`, and before an optimizer is made.

    Args:
        model: a plain model; it is changed in place.
        layers: the name of the module whose members share, or the names of the layers; found if
            None.

    Raises `ConfigError` where nothing repeats or what is named is not alike; nothing is changed.
    """
    check_is_plain(model)
    check_has_weights(model)
    groups = list(_found(model, "")) if layers is None else list(_named(model, layers))
    if not groups:
        raise ConfigError(
            f"no layers of {type(model).__name__} repeat, as members of one nn.ModuleList or "
            f"nn.Sequential of one class whose parameters are alike: {_REMEDY}"
        )
    made = [_sharing(model, group) for group in groups]
    left: dict[int, tuple[nn.Parameter, str]] = {}
    for one in made:
        for layer in one.layers[1:]:
            for name in one.names:
                module, leaf = owner(model, layer, name)
                own, first = (
                    parameter_at(model, layer, name),
                    parameter_at(model, one.layers[0], name),
                )
                if own is not first:  # as it is where one module has two names
                    left.setdefault(id(own), (own, told(_join(layer, name), "share_layers")))
                    module._parameters[leaf] = first
    for own, text in left.values():
        retire(own, text)
    setattr(model, KEY, (*getattr(model, KEY, ()), *made))
    return tuple(made)


def shared_layers(model: nn.Module, layers: Named = None) -> list[Sharing]:
    """What `share_layers` has let layers of a model share, or what the named ones do.

    Raises `ConfigError` where that is nothing.
    """
    found: list[Sharing] = []
    if layers is not None:
        found = [s for group in _members(model, layers) if (s := _tied(model, group)).names]
        remedy = f"the layers {layers!r} share no parameters with each other alone: {_REMEDY}"
    else:
        for path, module in model.named_modules():
            for one in vars(module).get(KEY, ()):
                found.append(replace(one, layers=tuple(_join(path, n) for n in one.layers)))
        remedy = f"share_layers was not called on this {type(model).__name__}: {_REMEDY}"
    if not found:
        raise ConfigError(remedy)
    for one in found:
        for name in one.names:
            every = {id(parameter_at(model, layer, name)) for layer in one.layers}
            if len(every) > 1:
                raise ConfigError(f"'{name}' of {', '.join(one.layers)} is no longer shared")
    return found


def owner(model: nn.Module, layer: str, name: str) -> tuple[nn.Module, str]:
    """The module that holds a layer's parameter, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(_join(layer, path)), leaf


def parameter_at(model: nn.Module, layer: str, name: str) -> nn.Parameter:
    """A layer's parameter."""
    module, leaf = owner(model, layer, name)
    found = module._parameters[leaf]
    assert found is not None
    return found


def told(name: str, by: str) -> str:
    """What use of a parameter is refused with that another has taken the place of."""
    return (
        f"'{name}' is used as it was before merakc.{by}, which put another parameter "
        "in its place: use those that the model has now; make optimizers behind share_layers, and "
        "give untie_layers those that are to go on"
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _found(model: nn.Module, path: str) -> Iterator[list[str]]:
    """The outermost layers that repeat."""
    groups = _alike(model, path) if isinstance(model, CONTAINERS) else []
    yield from groups
    if not groups:
        for name, child in model.named_children():
            yield from _found(child, _join(path, name))


def _alike(container: nn.Module, path: str) -> list[list[str]]:
    """The members of a module that are alike."""
    forms: dict[Any, list[str]] = {}
    for name, child in container.named_children():
        if any(True for _ in child.parameters()):
            forms.setdefault(_form(child), []).append(_join(path, name))
    return [group for group in forms.values() if len(group) > 1]


def _form(layer: nn.Module) -> tuple[Any, ...]:
    """What layers have in common that may share parameters: ties inside of them, too."""
    first: dict[int, int] = {}
    parameters = [
        (name, tuple(p.shape), p.dtype, p.requires_grad, type(p), first.setdefault(id(p), k))
        for k, (name, p) in enumerate(layer.named_parameters(remove_duplicate=False))
    ]
    buffers = [(n, tuple(b.shape), b.dtype) for n, b in layer.named_buffers(remove_duplicate=False)]
    return type(layer), *parameters, *buffers


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ConfigError(f"{type(model).__name__} has no module '{name}': {_REMEDY}") from None


def _members(model: nn.Module, layers: str | Sequence[str]) -> list[list[str]]:
    """The layers that are named, or those that the module has which is."""
    if isinstance(layers, str):
        return _alike(_module(model, layers), layers)
    if len({id(_module(model, name)) for name in layers}) < max(2, len(layers)):
        raise ConfigError(f"layers={list(layers)} are not two modules or more: {_REMEDY}")
    return [list(layers)]


def _named(model: nn.Module, layers: str | Sequence[str]) -> Iterator[list[str]]:
    for group in _members(model, layers):
        first, *others = (_form(model.get_submodule(name)) for name in group)
        for name, form in zip(group[1:], others, strict=True):
            if form != first:
                odd = next((x for x in first if x not in form), first[0])
                raise ConfigError(
                    f"'{name}' is not as '{group[0]}', which has {odd}: layers that share "
                    "parameters are of one class, with parameters and buffers of the same names, "
                    "shapes and dtypes"
                )
        yield group


def _uses(model: nn.Module) -> dict[int, list[str]]:
    """The names under which each parameter stands."""
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    return found


def _sharing(model: nn.Module, group: Sequence[str]) -> Sharing:
    """What layers are to share; raises `ConfigError` where that would tie more than them."""
    uses, names, elements = _uses(model), [], {}
    for name, first in model.get_submodule(group[0]).named_parameters(remove_duplicate=False):
        every = [parameter_at(model, layer, name) for layer in group]
        if all(p is first for p in every):
            continue  # as the model has it
        for layer, p in zip(group, every, strict=True):
            full = _join(layer, name)
            other = next((n for n in uses[id(p)] if not n.startswith(f"{layer}.")), None)
            if other is not None:
                raise ConfigError(
                    f"'{full}' is '{other}' too, so that layers that share it would be tied to "
                    f"that: name other layers, or untie the two before; {_REMEDY}"
                )
            check_idle(full, p, "share_layers")
        names.append(name)
        elements[id(first)] = first.numel()
    if not names:
        raise ConfigError(f"{', '.join(group)} share all of their parameters already")
    return Sharing(tuple(group), tuple(names), sum(elements.values()))


def _tied(model: nn.Module, group: Sequence[str]) -> Sharing:
    """What layers share with each other and with nothing else."""
    uses, names, elements = _uses(model), [], {}
    for name, p in model.get_submodule(group[0]).named_parameters(remove_duplicate=False):
        stands = uses[id(p)]
        is_own = all(any(n.startswith(f"{layer}.") for layer in group) for n in stands)
        if is_own and all(_join(layer, name) in stands for layer in group):
            names.append(name)
            elements[id(p)] = p.numel()
    return Sharing(tuple(group), tuple(names), sum(elements.values()))
