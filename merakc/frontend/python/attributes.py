"""Attributes that users set on the parameters and buffers of a parallel model.

A forward sees those of the user's own model, from which steps are recorded: they are passed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from merakc.frontend.python.state import Held
from merakc.frontend.python.watch import Watch


class Attributes:
    """Those of pairs of tensors: one of a parallel model, and the one of the user's it stands for.

    What either has by itself when this is made stays its own.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        both = [(vars(shown), vars(source)) for shown, source in pairs]
        self._pairs = [(a, b, a.keys() - b.keys(), b.keys() - a.keys()) for a, b in both]
        self._watch = self._watched()

    def pass_on(self) -> None:
        """Has the user's tensors carry what the parallel model's do."""
        if not self._watch.moved():
            return
        for shown, source, ours, theirs in self._pairs:
            now = {key: value for key, value in shown.items() if key not in ours}
            now |= {key: source[key] for key in theirs if key in source}
            if now.keys() != source.keys() or any(now[k] is not source[k] for k in now):
                source.clear()
                source.update(now)
        self._watch = self._watched()

    def _watched(self) -> Watch:
        held: list[dict[str, Any]] = [shown for shown, *_ in self._pairs]
        return Watch(Held(one, "", dict(one), False) for one in held)
