"""Tables that can be read where there is little room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Letters of a word of text that is folded where others need the room.
LONG_WORD = 20


@dataclass(frozen=True)
class Fitted:
    """A table for `rich`: columns with whether they are numbers, and the cells' text.

    Where it is too wide, the headers of numbers are stacked, then text is wrapped, then the space
    between columns goes, and then words are folded; numbers are never broken. Where headers would
    be, rows become columns, as many beside each other as have room.
    """

    columns: Mapping[str, bool]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table for a console."""
        found = self.table(options.max_width)
        if found is not None:
            yield found
        else:
            yield from self.turned(options.max_width)

    def turned(self, width: int) -> Iterator[Table]:
        """Tables of which each has a line for every column, and a column for some of the rows."""
        heads, left = list(self.columns), list(self.rows)
        room = width - 2 - max(map(_widest, heads))
        while left:
            widths = [2 + max(map(_widest, row)) for row in left]
            count = max(1, sum(end <= room for end in accumulate(widths)))
            found = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_header=False)
            for _ in range(1 + count):
                found.add_column(overflow="fold")
            for head, *cells in zip(heads, *left[:count], strict=True):
                found.add_row(Text(head), *map(Text, cells))
            yield found
            del left[:count]

    def table(self, width: int) -> Table | None:
        """The table, at most so many letters wide as far as its numbers allow; None where words of
        its headers would be broken.
        """
        heads, numbers = list(self.columns), list(self.columns.values())
        cells = [max((_widest(row[k]) for row in self.rows), default=0) for k in range(len(heads))]
        widths = [max(pair) for pair in zip(map(_widest, heads), cells, strict=True)]
        room = width - 3 * len(heads) - 1
        padding = 1
        if sum(widths) > room:
            heads = [h.replace(" ", "\n") if n else h for h, n in zip(heads, numbers, strict=True)]
            widths = [max(pair) for pair in zip(map(_widest, heads), cells, strict=True)]
            words = [
                max(_word(t) for t in (head, *(r[k] for r in self.rows)))
                for k, head in enumerate(heads)
            ]
            least = [
                w if n else min(own, LONG_WORD)
                for w, n, own in zip(widths, numbers, words, strict=True)
            ]
            if sum(least) > room:
                room, padding = room + 2 * len(heads), 0
            widths = _shrunk(widths, least, room)
            least = [c if n else 1 for c, n in zip(cells, numbers, strict=True)]
            widths = _shrunk(widths, least, room)
            if any(own < _word(head) for own, head in zip(widths, heads, strict=True)):
                return None
        found = Table(box=box.SIMPLE_HEAD, padding=(0, padding))
        for head, is_number, own in zip(heads, numbers, widths, strict=True):
            justify = "right" if is_number else "left"
            found.add_column(Text(head), justify=justify, overflow="fold", width=own)  # type: ignore[arg-type]
        for row in self.rows:
            found.add_row(*(Text(cell) for cell in row))  # not str: `[0]` would be taken for markup
        return found


def _widest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths, the largest made smaller first, until they have room or are the least."""
    found = [max(min(w, room), own) for w, own in zip(widths, least, strict=True)]
    while sum(found) > room:
        open_ones = [k for k in range(len(found)) if found[k] > least[k]]
        if not open_ones:
            break
        found[max(open_ones, key=lambda k: found[k])] -= 1
    return found
