"""What a forward does to its batch, and what it checks: no part of the loss, and it still holds.

Values of the batch alone, a check's truth or what a tensor of the batch is written to, become
outputs beside those of the forward (`ASIDE`). A check of other values can say nothing before the
step: it is named, and does not run.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from merakc.errors import RecordError
from merakc.frontend.aliases import spec_of
from merakc.frontend.asking import Asking
from merakc.frontend.calls.places import is_certain
from merakc.frontend.checks import harmless_answer
from merakc.frontend.python.content import MISSING, PLAIN, Attribute, content_of, put_back, same
from merakc.frontend.python.files import no_files
from merakc.frontend.replaced import replaced
from merakc.frontend.source import near_line, user_line
from merakc.frontend.values.symbols import is_symbolic
from merakc.ir.graph import InputKind, Output, OutputKind, Ref

Path = tuple[Any, ...]
UNCHECKED = "a check of values that follow from parameters or draws does not run,"
UNPRINTED = "what the forward prints or logs is printed while it is recorded alone,"


@dataclass(frozen=True, slots=True)
class Check:
    """A truth that the batch alone tells: the name of its output, and what it has to be."""

    name: str
    wanted: bool
    source: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a forward makes of its batch alone, by the name of its output."""

    name: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that stood in the batch before the forward, at the place `path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class Edit:
    """What a forward leaves in a dict or list of its batch: plain values, `Made` or `Kept` ones."""

    path: Path
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Aside:
    """All of it. `writes` has the tensors of the batch that are written to, with the names of the
    outputs; `unheard` says what steps do not do: run other checks, print.
    """

    checks: tuple[Check, ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    edits: tuple[Edit, ...] = ()
    unheard: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checks or self.writes or self.edits)


class AsideRecorder(Asking):  # type: ignore[no-untyped-call]
    """The part of the recorder that sees to it."""

    paused: bool

    def watch_batch(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Looks at the batch before the forward, in which its tensors are inputs already."""
        self.containers = [(path, x, content_of(x) or {}) for path, x in _inside((args, kwargs))]
        self.places = {id(x): path for path, x, _ in self.containers}
        for path, _, content in self.containers:
            leaves = [(k, v) for k, v in content.items() if isinstance(v, torch.Tensor)]
            self.places |= {id(v): (*path, k) for k, v in leaves}
        self.attributes = {name: set(vars(x)) for name, x in self.batch.items()}

    def check(self, tensor: torch.Tensor, wanted: bool) -> None:
        """Notes a check of a tensor of one truth, or of a number."""
        self.checked.append((self._ref(tensor), wanted, user_line()))

    def _check_all(self, _: type[Exception], condition: torch.Tensor, message: Any = None) -> None:
        """Stands in for torch's own, which would read whether all elements are true."""
        if isinstance(condition, FakeTensor) and not self.paused:
            self.check(condition.all(), True)

    def _asked(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor is true; None of one that is no part of the recording."""
        answer = harmless_answer()
        if not isinstance(tensor, FakeTensor):
            return answer
        if answer is None:
            return self._truth(tensor)
        self.check(tensor, answer)
        return answer

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Notes what is printed, and refuses files: a step has nothing to do with either."""
        plain_print, plain_handle = builtins.print, logging.Logger.handle

        def printing(*args: Any, **kwargs: Any) -> None:
            line = near_line(sys._getframe(1))
            if line and not self.paused:
                self.printed.append(f"{UNPRINTED} at {line}")
            plain_print(*args, **kwargs)

        def logging_(logger: logging.Logger, record: logging.LogRecord) -> None:
            line = near_line(sys._getframe(1))
            if line and not self.paused:
                self.printed.append(f"{UNPRINTED} at {line}")
            if is_symbolic(record.args):  # whose text may ask for values
                record.msg, record.args = f"{record.msg} {record.args}", ()
            plain_handle(logger, record)

        with (
            replaced(builtins, "print", printing),
            replaced(logging.Logger, "handle", logging_),
            no_files(lambda: self.paused),
        ):
            yield

    def set_aside(self) -> Aside:
        """All that the forward has done, with outputs for the values in it.

        Raises `RecordError` for what no step can do to a batch.
        """
        checks, unheard = [], list(self.printed)
        for ref, wanted, source in dict.fromkeys(self.checked):
            if self.reader.is_known(ref):
                checks.append(Check(self._aside(ref), wanted, source))
            elif wanted and is_certain(ref, self.nodes, self.inputs):
                continue
            elif not self.guards.proves(ref, self.outputs, wanted, source):
                unheard.append(f"{UNCHECKED} at {source}")
        writes = tuple(
            (name, w) for name, x in self.batch.items() if (w := self._write_to(name, x))
        )
        edits = tuple(
            e for path, x, before in self.containers if (e := self._edit(path, x, before))
        )
        return Aside(tuple(checks), writes, edits, tuple(dict.fromkeys(unheard)))

    def _aside(self, ref: Ref) -> str:
        name = f"aside.{ref}"
        if all(o.name != name for o in self.outputs):
            self.outputs.append(Output(name, OutputKind.ASIDE, ref))
        return name

    def _write_to(self, name: str, x: torch.Tensor) -> str:
        """The output that a tensor of the batch is written to; empty where it is not."""
        storage = self.aliases.known[id(x)].storage
        where = f"{storage.source}: " if storage.source else ""
        new = {n for n in vars(x).keys() - self.attributes[name] if not n.startswith("_")}
        if new:
            raise RecordError(
                f"the forward sets attributes of '{name}' of the batch ({', '.join(sorted(new))}), "
                "which a compiled step does not; put what they hold into the batch"
            )
        if spec_of(x) != next(
            i.spec for i in self.inputs if i.kind is InputKind.BATCH and i.target == name
        ):
            raise RecordError(
                f"{where}the forward changes the shape of '{name}' of the batch in place; use the "
                "call without the underscore"
            )
        if not storage.written:
            return ""
        ref = self._ref(x)
        if not self.reader.is_known(ref):
            raise RecordError(
                f"{where}the forward writes to '{name}' of the batch what follows from parameters "
                "or draws; write to a clone()"
            )
        return self._aside(ref)

    def _edit(self, path: Path, x: Any, before: Mapping[Any, Any]) -> Edit | None:
        """What a container of the batch holds now, if it is something else."""
        now = content_of(x) or {}
        alike = list(before) == list(now) and all(map(same, before.values(), now.values()))
        if alike:
            return None
        name, keys = path_of(path), {k for k in (*before, *now) if isinstance(k, Attribute)}
        kept = all(same(before.get(k, MISSING), now.get(k, MISSING)) for k in keys)
        if not isinstance(x, (dict, list)) or not kept:
            raise RecordError(
                f"the forward changes {name}, a {type(x).__name__} of the batch, which a compiled "
                "step does not; change a copy"
            )
        items = [(key, value) for key, value in now.items() if key not in keys]
        return Edit(path, tuple((key, self._left(value, name)) for key, value in items))

    def _left(self, value: Any, name: str) -> Any:
        """What stands for something that a forward leaves in its batch."""
        if id(value) in self.places:
            return Kept(self.places[id(value)])
        if isinstance(value, PLAIN):
            return value
        alias = self.aliases.find(value) if isinstance(value, torch.Tensor) else None
        if alias is not None and self.reader.is_known(self._ref(value)):
            return Made(self._aside(self._ref(value)))
        raise RecordError(
            f"the forward puts a {type(value).__name__} into {name} of the batch that does not "
            "follow from the batch alone, which a compiled step does not; change a copy of it"
        )


def path_of(path: Path) -> str:
    """A place in a batch, in words."""
    return "batch" + "".join(f"[{key!r}]" for key in path[1:])


def _inside(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The containers in a batch and where they stand, less those that a call makes itself."""
    content = {} if isinstance(tree, torch.Tensor) else content_of(tree) or {}
    if content and len(path) > 1:
        yield path, tree
    for key, value in content.items():
        if not isinstance(value, PLAIN):
            yield from _inside(value, (*path, key))


def at(batch: Any, path: Path) -> Any:
    """The value at a place in a batch."""
    for key in path:
        batch = batch[key] if isinstance(batch, (dict, list, tuple)) else getattr(batch, key)
    return batch


def edited(edits: Sequence[Edit], batch: Any, made: Mapping[str, torch.Tensor]) -> None:
    """Does to a batch what a forward did, with the tensors that it has `made`."""

    def now(left: Any) -> Any:
        if isinstance(left, Kept):
            return at(batch, left.path)
        return made[left.name] if isinstance(left, Made) else left

    found = [(at(batch, e.path), {k: now(left) for k, left in e.items}) for e in edits]
    for container, items in found:
        put_back(container, items)
