"""Weights that transformers renames or packs as it loads them: experts of a layer in one tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merakc.errors import CheckpointError
from merakc.train.checkpoints.manifest import TensorFile


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, under the file's own name for it; or one `made` of such tensors, under
    the model's name.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: Made | None = None

    @property
    def order(self) -> tuple[Path, str, str]:
        """Entries in this order are read file by file, and those that are made together at once."""
        return self.file, self.made.sources[0][1].key if self.made else self.key, self.key


@dataclass(frozen=True, eq=False)
class Made:
    """Tensors that a converter of transformers makes of others.

    `sources` are these, each with the converter's pattern for it; `first` is the model's name of
    the first that is made.
    """

    converter: Any
    first: str
    sources: Sequence[tuple[str, Entry]]
    model: nn.Module

    def tensors(self, *, read: bool) -> dict[str, torch.Tensor]:
        """What is made, by the model's names: read and converted as a whole, or its shapes alone,
        on the meta device. Raises `CheckpointError`.
        """
        work = deepcopy(self.converter)
        for pattern, entry in self.sources:
            if read:
                file = TensorFile(entry.file)
                rows = file.rows(
                    entry.key, [0] * len(entry.shape), entry.shape, entry.dtype.itemsize
                )
                tensor = torch.cat([r.clone() for r in rows]) if entry.shape else next(rows).clone()
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            work.add_tensor(self.first, entry.key, pattern, lambda tensor=tensor: tensor)
            del tensor
        try:
            found = work.convert(self.first, model=self.model, config=self.model.config)
        except Exception as error:  # whatever the shapes of a damaged file lead to
            raise CheckpointError(
                f"{self.sources[0][1].file}: '{self.first}' of the model cannot be made of "
                f"'{self.sources[0][1].key}' and {len(self.sources) - 1} more as transformers "
                f"makes it: {error}"
            ) from None
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    def entries(self) -> list[Entry]:
        """What is made, as entries."""
        file = self.sources[0][1].file
        return [
            Entry(file, name, tuple(t.shape), t.dtype, self)
            for name, t in self.tensors(read=False).items()
        ]


class MadeFile(TensorFile):
    """Stands for a file that holds what is made of others: in memory, once some of it is read."""

    def __init__(self, made: Made) -> None:
        super().__init__(made.sources[0][1].file)
        self._made = made

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return self._made.tensors(read=True)

    def _box(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        where = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
        return self._tensors[name][where]


def converted(entries: Iterable[Entry], model: nn.Module) -> list[tuple[str, Entry]]:
    """Entries under the names for which `from_pretrained` would take them, in transformers' own
    words: renamed, or made of several. Of other models: under their keys.
    """
    entries = list(entries)
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return [(e.key, e) for e in entries]
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise CheckpointError(
            f"transformers {library.__version__} does not say how it converts checkpoints "
            f"({error}), so that these weights could be read otherwise than by from_pretrained: "
            "use 5.23, or load them with from_pretrained once and write them with merakc.export"
        ) from None
    every = get_model_conversion_mapping(model)
    converters = [t for t in every if isinstance(t, WeightConverter)]
    renamings: list[Any] = [t for t in every if not isinstance(t, WeightConverter)]
    own, base = dict(model.state_dict(keep_vars=True)), model.base_model_prefix
    owner = {pattern: c for c in converters for pattern in c.source_patterns}
    found: list[tuple[str, Entry]] = []
    groups: dict[str, list[tuple[str, Entry]]] = {}
    for entry in sorted(entries, key=lambda e: dot_natural_key(e.key)):
        name, pattern = rename_source_key(entry.key, renamings, converters, base, own)
        if name not in own and entry.key in own:
            name, pattern = entry.key, None
        if pattern is not None and name in own:
            groups.setdefault(name, []).append((pattern, entry))
        else:
            found.append((name if name in own else entry.key, entry))
    for first, sources in groups.items():
        made = Made(owner[sources[0][0]], first, sources, model)
        found += [(e.key, e) for e in made.entries()]
    return found
