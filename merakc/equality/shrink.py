"""A model of the same structure that is small enough to train: a configuration lowered by trial.

Nothing is known of any model or field. The integers of a configuration of transformers', those of
the configurations inside it included, and the length of its texts are lowered one at a time, and a
change is kept where the model is still made, its forward still recorded, and every kind of module
still calls what it called.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merakc.batches.split import call_arguments
from merakc.equality.casts import without_dropout
from merakc.errors import MerakWarning
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.planner.sources.source import Source, source_of
from merakc.report.units import name_pattern

# Integers below this stay: dims of one or two elements leave norms nothing to tell apart.
FLOOR = 16
# Numbers that parameters and values of two samples hold together: 8 MiB in float64.
MOST_NUMBERS = 1 << 20
# By which an integer is divided, the largest tried first.
FACTORS = (16, 4, 2)
# What a stage is left with, so that cuts fall between layers and inside of them.
LAYERS_PER_STAGE = 2
SAMPLES = 2

Place = tuple[str | int, ...]  # keys and indices of an integer in a configuration; () is the text's
Fields = dict[str, Any]
SEQUENCE: Place = ()


@dataclass(frozen=True)
class Small:
    """A model that was found: the source, its integers, and the numbers it holds."""

    source: Source
    integers: Mapping[Place, int]
    numbers: int
    modules: int


def shrink(
    source: Source, stages: int, progress: Callable[[str], None] = lambda _: None
) -> list[Small]:
    """Ever smaller models of the structure of `source`, itself first, with layers for `stages`.

    `source` must have a configuration. `progress` is told how far it has come.
    """
    return _Search(source, progress).run(LAYERS_PER_STAGE * stages)


def structure(graph: Graph) -> frozenset[tuple[str, frozenset[str]]]:
    """What each kind of module calls; layers of one pattern that call the same are one kind."""
    calls: dict[str, set[str]] = {}
    for node in graph.nodes:
        calls.setdefault(node.module, set()).add(node.op)
    return frozenset((name_pattern(name), frozenset(ops)) for name, ops in calls.items())


def integers(fields: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, int]]:
    """The integers of a configuration, of lists in it, and of configurations inside it."""
    for key, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from integers(value, (*place, key))
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, int) and not isinstance(item, bool):
                yield (*place, key) if index is None else (*place, key, index), item


def changed(fields: Fields, place: Place, value: int, *, cut: bool) -> Fields:
    """The configuration with another integer.

    With `cut`, lists beside it that are as long as it was large, an item a layer, are cut to it.
    """
    found = copy.deepcopy(fields)
    owner: Any = found
    for key in place[:-1]:
        owner = owner[key]
    before, owner[place[-1]] = owner[place[-1]], value
    if cut and isinstance(owner, dict):
        for key, item in owner.items():
            if isinstance(item, list) and len(item) == before:
                owner[key] = item[:value]
    return found


class _Search:
    """The models found so far, and how the next one is tried."""

    def __init__(self, source: Source, progress: Callable[[str], None]) -> None:
        self.name, self.kind, self.progress = source.name, type(source.config), progress
        self.fields: Fields = source.config.to_dict()
        graph = _recorded(source)
        self.structure = structure(graph)
        self.found = [_small(source, self.fields, graph)]

    @property
    def best(self) -> Small:
        return self.found[-1]

    def run(self, layers: int) -> list[Small]:
        """Layers first: all that follows is then quick."""
        depths = {len(m) for m in self.best.source.model.modules() if isinstance(m, nn.ModuleList)}
        for place, value in integers(self.fields):
            if value in depths and value > layers:
                self._lower_depth(place, value, layers)
        while self._lower_widths():
            pass
        return self.found

    def _lower_depth(self, place: Place, value: int, layers: int) -> None:
        """Lowers an integer to `layers`, or twice that, ..., if it says how many modules there are.

        With fewer of them the model has fewer kinds of layers, where these alternate.
        """
        while layers < value:
            small = self._tried([place], layers)
            if small is not None and small.modules >= self.best.modules:
                return  # a width that happens to be as large
            if small is not None:
                self._keep(small)
                return
            layers *= 2

    def _lower_widths(self) -> bool:
        """Lowers the largest integer until the model is small or none can be; whether any was.

        Texts first: what follows is then quicker, and a config may have positions for no more.
        """
        stuck: set[Place] = set()
        before = len(self.found)
        while self.best.numbers > MOST_NUMBERS:
            open_ = {p: v for p, v in self.best.integers.items() if v > FLOOR and p not in stuck}
            if not open_:
                break
            place = SEQUENCE if SEQUENCE in open_ else max(open_, key=lambda p: open_[p])
            small = self._lowered(place, open_[place])
            if small is None:
                stuck.add(place)
            else:
                self._keep(small)
        return len(self.found) > before and self.best.numbers > MOST_NUMBERS

    def _lowered(self, place: Place, value: int) -> Small | None:
        """The model with a smaller integer, alone or together with those of the same value."""
        alike = [p for p, v in self.best.integers.items() if v == value]
        for places in ([place], alike) if len(alike) > 1 else ([place],):
            for factor in FACTORS:
                if value // factor >= FLOOR:
                    small = self._tried(places, value // factor)
                    if small is not None:
                        return small
        return None

    def _tried(self, places: list[Place], value: int) -> Small | None:
        """The model with other integers, if there is one and it has the structure."""
        sequence = value if SEQUENCE in places else self.best.source.sequence
        before = self.best.source.config.to_dict()
        for cut in (False, True):
            fields = before
            for place in places:
                if place != SEQUENCE:
                    fields = changed(fields, place, value, cut=cut)
            try:
                config = self.kind.from_dict(copy.deepcopy(fields))
                with warnings.catch_warnings():  # of texts that the config has no positions for
                    warnings.filterwarnings("error", ".* longer than the config's", MerakWarning)
                    source = source_of(self.name, config, sequence)
                graph = _recorded(source)
            except Exception:  # whatever the code of a model raises where its sizes do not fit
                continue
            if structure(graph) == self.structure:
                return _small(source, config.to_dict(), graph)
        return None

    def _keep(self, small: Small) -> None:
        self.found.append(small)
        self.progress(f"shrinking {self.name} to {small.numbers / 1e6:.1f} million numbers")


def _recorded(source: Source) -> Graph:
    """The forward of a few samples; once: the ranks that train it compare a second one."""
    args, kwargs = call_arguments(source.batch(SAMPLES))
    with without_dropout():
        return record(source.model, args, kwargs, repeated=False).graph


def _small(source: Source, fields: Fields, graph: Graph) -> Small:
    numbers = sum(p.numel() for p in source.model.parameters())
    numbers += sum(o.numel for node in graph.nodes for o in node.outputs if o is not None)
    found = {SEQUENCE: source.sequence, **dict(integers(fields))}
    return Small(source, found, numbers, sum(1 for _ in source.model.modules()))


def changes(before: Small, after: Small) -> dict[str, tuple[int, int]]:
    """The integers that were lowered: their names, and what they were and are."""
    found = {}
    for place, value in before.integers.items():
        now = after.integers.get(place, value)
        if now != value:
            found[".".join(map(str, place)) or "tokens of a text"] = value, now
    return found


def parameter_count(model: nn.Module) -> int:
    """Elements of all parameters, a shared one once."""
    return sum(p.numel() for p in model.parameters() if isinstance(p, torch.Tensor))
