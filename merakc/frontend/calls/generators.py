"""Random numbers that a forward draws outside torch's dispatcher, which a recording cannot see."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from merakc.errors import RecordError
from merakc.frontend.replaced import replaced
from merakc.frontend.source import near_line

LIBRARIES = ("Python's random", "numpy.random", "torch")


class DrawnError(Exception):
    """A forward has drawn numbers; which module did is for a closer look to say."""


class GeneratorWatch:
    """Compares the states of the global generators as a forward goes from module to module.

    To ask for them at every module takes a fifth of a recording's time: `check` is for a forward
    that was seen to draw.
    """

    def __init__(self) -> None:
        self.states = _states()

    def drawn(self) -> str:
        """The library from which numbers were drawn, if any were, since the watch began.

        Tensors of a recording draw none, so what changed is a number that the graph would hold on
        to. What was drawn is given back: the states are put back as they were.
        """
        now = _states()
        for library, before, after in zip(LIBRARIES, self.states, now, strict=True):
            if not _same(before, after):
                _restore(self.states)
                return library
        return ""

    def check(self, path: str, model: torch.nn.Module) -> None:
        """Raises `RecordError` if numbers were drawn, by module `path` of the model."""
        library = self.drawn()
        if library:
            raise RecordError(
                f"module '{path}' ({_place(model.get_submodule(path))}) draws random numbers from "
                f"{library} in its forward, and one recording would use the same ones in every "
                "step; switch the draw off (for masks of speech models: mask_time_prob=0), or "
                "give what it draws in the batch (mask_time_indices)"
            )


@contextlib.contextmanager
def without_entropy() -> Iterator[None]:
    """Refuses numbers that the system draws (`uuid4`, `secrets`, generators without a seed): no
    state says that any were drawn, and two draws may be equal.
    """
    urandom: Any = os.urandom

    def refuse(size: int) -> Any:
        line = near_line(sys._getframe(1))
        if line:
            raise RecordError(
                f"{line}: the forward draws random numbers from the system, and one recording "
                "would use the same ones in every step; give what it draws in the batch"
            )
        return urandom(size)

    def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            refuse(0)
        seeded(generator, a, version)

    seeded: Any = random.Random.seed
    with (
        replaced(os, "urandom", refuse),
        replaced(random, "_urandom", refuse),
        replaced(random.Random, "seed", seed),
    ):
        yield


def _states() -> tuple[Any, ...]:
    generator = torch.default_generator
    return random.getstate(), np.random.get_state(), generator.get_state()


def _restore(states: Sequence[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, np.ndarray):
        return bool(np.array_equal(before, after))
    if isinstance(before, tuple) and any(isinstance(b, np.ndarray) for b in before):
        return all(map(_same, before, after))
    return bool(before == after)


def _place(module: torch.nn.Module) -> str:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(module).__name__
