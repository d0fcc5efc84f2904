"""Whether Python does the same in a turn of a loop, and behind it, whichever turns came before.

A recording goes through all places of a mask; a step may pass over any of them. What Python counts,
collects or compares in a turn is in no graph. So the forward is recorded again with no turn, with
those of even places alone, and with those of odd ones: each has to be the first recording without
the turns that are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from merakc.errors import MerakError
from merakc.frontend.opaque import UntraceableError
from merakc.frontend.python.content import content_hash
from merakc.frontend.values.reads import Sources, ValuesNeededError, read_refs
from merakc.ir.graph import InputKind, Node, Ref, map_refs

if TYPE_CHECKING:
    from merakc.frontend.hits.visits import Visiting

LEFT_OUT: tuple[Callable[[int], bool], ...] = (
    lambda place: True,
    lambda place: place % 2 == 1,
    lambda place: place % 2 == 0,
)
_SYMBOL = re.compile(r"\b(?:u|zuf|read)\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


V = TypeVar("V", bound="Visiting")


def check_turns(
    whole: V, new: Callable[[], V], run: Callable[[V], Any], check_left: Callable[[], None]
) -> None:
    """Has the forward that `whole` has recorded run with `new` recorders that leave turns out.

    Raises `UntraceableError` where one of them fails, leaves other things behind, or records
    something else.
    """
    for left_out in LEFT_OUT if whole.hit_loops else ():
        other = new()
        other.go_on_from(whole, left_out)
        try:
            run(other)
            check_left()
        except MerakError as error:
            if isinstance(error, (UntraceableError, ValuesNeededError)):
                raise
            why = f"without some of its turns the forward is another: {error}"
            raise whole.hit_loops[0].error("", why) from error
        _check_alike(whole, other)


def _check_alike(whole: Visiting, part: Visiting) -> None:
    """Raises where a recording that leaves turns out is another one than `whole` without them."""
    skips = [skip for skip in whole.skips() if part.left_out(skip.place)]
    gone = {name for skip in skips for name in skip.whole}
    same = {ref: to for skip in skips for ref, to in skip.same.items()}
    kept = [node for node in whole.nodes if node.name not in gone]
    before, now = _told(whole, kept, same), _told(part, part.nodes, {})
    for (old, _), (new, source) in zip(before, now, strict=False):
        if old != new:
            raise _error(whole, source)
    if len(before) != len(now):
        longer = max(before, now, key=len)
        raise _error(whole, longer[min(len(before), len(now))][1])


def _error(whole: Visiting, source: str) -> Exception:
    why = "what is computed here depends on which turns Python went through before"
    return whole.hit_loops[0].error(source, why)


def _told(
    of: Visiting, nodes: Sequence[Node], same: dict[Ref, Ref]
) -> list[tuple[tuple[Any, ...], str]]:
    """The calls that outputs need, each with its line, and the outputs, whatever their names."""
    names: dict[Ref, Any] = {
        Ref(i.name): (i.kind, i.target) for i in of.inputs if i.kind is not InputKind.CONSTANT
    }
    names |= {Ref(n): ("constant", content_hash(c)) for n, c in of.constants.items()}

    def at(ref: Ref) -> Ref:
        while ref in same:
            ref = same[ref]
        return ref

    ends = [at(ref) for ref in (*(o.ref for o in of.outputs), *(r for r, *_ in of.checked))]
    live = _needed(nodes, ends, of.sources, at)
    symbols: dict[str, str] = {}

    def text(value: Any) -> str:
        plain = _ADDRESS.sub("", repr(value))
        return _SYMBOL.sub(lambda m: symbols.setdefault(m[0], f"s{len(symbols)}"), plain)

    found: list[tuple[tuple[Any, ...], str]] = []

    def named(ref: Ref) -> Any:
        return names[at(ref)]

    for node in live:
        args = map_refs((node.args, node.kwargs), named)
        call = (node.op, text(args), text(node.outputs), node.grad)
        names.update({ref: ("call", len(found), ref.index) for ref in node.outs})
        found.append((call, node.source))
    ended = [(o.kind, o.name) for o in of.outputs] + [(w, s) for _, w, s in of.checked]
    return [*found, *(((*e, names[r]), "") for e, r in zip(ended, ends, strict=True))]


def _needed(
    nodes: Sequence[Node], ends: Sequence[Ref], sources: Sources, at: Callable[[Ref], Ref]
) -> list[Node]:
    wanted, live = {ref.node for ref in ends}, list[Node]()
    for node in reversed(nodes):
        if node.name in wanted:
            live.append(node)
            wanted.update(at(ref).node for ref in read_refs(node, sources))
    return live[::-1]
