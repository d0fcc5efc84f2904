"""What the comparison says: its table, what is wrong, and its page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.harness import markdown, rich_table
from benchmarks.peers.plans import MERAKC, TORCHS
from benchmarks.peers.rounds import CHECKED_STEPS, Row, ratios
from benchmarks.peers.training import Training

# In float32 the order of a sum moves gradients by 1e-6 to 1e-4 of their length.
MAX_ERROR = 1e-3
# A median over five rounds of a quiet machine moves by that much from run to run.
TOLERANCE = 0.02
HEAD = ("contestant", "step", "tokens/s", "to merakc", "memory", "lines", "gradients", "weights")
PATH = re.compile(r"(?:/[\w.@+-]+)+/")
# An error that says something: what wraps another may hold its arguments only, a line each.
NAMED = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception): *\S")
RANK = re.compile(r"^\[rank\d+\]:")
SHOWN = 200  # characters of a reason


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of one layout on one network; `lines` of each row, that a user writes."""

    plan: str
    network: str
    training: Training
    rows: tuple[Row, ...]
    lines: tuple[int, ...]

    @property
    def title(self) -> str:
        """What tables and panels are called."""
        return f"{self.plan}, {self.network}"


def is_right(row: Row) -> bool:
    """Whether it was measured, and trains as one process does."""
    return bool(row.steps_s) and row.error <= MAX_ERROR and row.gradient_error <= MAX_ERROR


def is_peer(row: Row) -> bool:
    """Whether merakc is compared with it: others that train on all ranks."""
    return not (row.entry.alone or row.entry.label.startswith(MERAKC))


def best(rows: Sequence[Row], *, peers: bool) -> Row | None:
    """The fastest of those that are right: of the peers, or of merakc's rows."""
    found = [row for row in rows if is_right(row) and not row.entry.alone and is_peer(row) == peers]
    return min(found, key=lambda row: row.step_s, default=None)


def reason(failure: str) -> str:
    """The error that a failure ends with, without this machine's folders."""
    lines = [line.strip() for line in failure.splitlines() if RANK.sub("", line).strip()]
    named = [line for line in lines if NAMED.match(line)]
    text = PATH.sub("", (named or lines or [""])[-1])
    text = re.sub(r"^([\w]+\.)*(?=\w+(Error|Exception))", "", RANK.sub("", text).strip())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def cells(row: Row, lines: int, result: Result) -> list[str]:
    """A row of the table, with rich's markup."""
    label, own = row.entry.label, result.rows[0]
    if not row.steps_s:
        return [label, "[yellow]missing[/]", *[""] * (len(HEAD) - 2)]
    ratio = ""
    if own.steps_s and row is not own:
        middle, least, most = ratios(row, own)
        colour = "red" if is_peer(row) and is_right(row) and middle < 1 - TOLERANCE else "green"
        ratio = f"[{colour}]{middle:.2f}[/] ({least:.2f} to {most:.2f})"
    errors = [
        f"[{'green' if error <= MAX_ERROR else 'red'}]"
        f"{'' if error <= MAX_ERROR else 'wrong, '}{error:.0e}[/]"
        for error in (row.gradient_error, row.error)
    ]
    return [
        label,
        f"{row.step_s * 1e3:.0f} ms",
        f"{result.training.tokens / row.step_s:,.0f}",
        ratio,
        f"{row.peak_bytes / 2**20:.0f} MiB",
        str(lines),
        *errors,
    ]


def table_of(result: Result) -> Table:
    """One layout on one network."""
    body = (cells(*pair, result) for pair in zip(result.rows, result.lines, strict=True))
    others = max((row.others for row in result.rows), default=0.0)
    caption = f"above 1 merakc is faster; others took up to {others:.0%} of the CPU"
    return rich_table([HEAD, *body], title=result.title, caption=caption)


def verdict(result: Result) -> str:
    """How merakc's best stands to the best peer that is right, round by round."""
    own, peer = best(result.rows, peers=False), best(result.rows, peers=True)
    if own is None:
        return "merakc is not right"
    if peer is None:
        return "no peer is right"
    middle, least, most = ratios(peer, own)
    alike = [row for row in result.rows if row.entry.label == TORCHS and row.steps_s]
    beside = "".join(f"; {ratios(peer, row)[0]:.2f} of the time of {TORCHS}" for row in alike)
    return (
        f"{peer.entry.label} takes {middle:.2f} ({least:.2f} to {most:.2f}) of the time of "
        f"{own.entry.label}, and {peer.peak_bytes / own.peak_bytes:.2f} of its memory{beside}"
    )


def complaints(results: Sequence[Result]) -> list[str]:
    """What is not as it should be: merakc's weights and failures, and peers that are faster."""
    found = []
    for result in results:
        for row in result.rows:
            name = f"{result.title}: {row.entry.label}"
            if is_peer(row):
                continue
            if row.failure:
                found.append(f"{name}: {reason(row.failure)}")
            elif not is_right(row):
                found.append(f"{name}: gradients or weights are not those of one process")
        own, peer = best(result.rows, peers=False), best(result.rows, peers=True)
        if own is not None and peer is not None and ratios(peer, own)[0] < 1 - TOLERANCE:
            found.append(f"{result.title}: {verdict(result)}")
    return found


def failures(results: Sequence[Result]) -> list[str]:
    """Why a contestant is missing, each reason once."""
    return list(
        dict.fromkeys(
            f"{result.plan}, {row.entry.label}: {reason(row.failure)}"
            for result in results
            for row in result.rows
            if row.failure
        )
    )


def document(results: Sequence[Result], notes: Sequence[str], about: str, picture: str = "") -> str:
    """The tables as a page of the documentation, with the name of a `plot` beside it."""
    shown = f"![Milliseconds of a step of every contestant]({picture})\n\n" if picture else ""
    parts = []
    for result in results:
        body = (cells(*pair, result) for pair in zip(result.rows, result.lines, strict=True))
        table = markdown([HEAD, *body], left=1)
        t = result.training
        about_it = f"dp = {t.dp}, tp = {t.tp}, pp = {t.pp}; {t.micro_batches} micro-batches"
        parts.append(f"## {result.title}\n\n{about_it}. {verdict(result)}.\n\n{table}\n")
    noted = "".join(f"- {note}\n" for note in notes) or "Nothing is missing.\n"
    wrong = "".join(f"- {line}\n" for line in complaints(results)) or "None.\n"
    tables = "\n".join(parts)
    return f"""# Beside other systems

{about}

All train the same model with the same weights, data, optimizer and numbers of ranks, each as its
own documentation writes it. A step is the median over rounds in which all take turns, of the
slowest rank; `to merakc` is the median (least to largest) of its ratio to merakc's first row, round
by round: above 1 merakc is faster. `memory` is the peak of a rank's resident memory in the steps of
a round, the median over rounds, less what it was before the model was built. `lines` are those that
a user adds to a plain loop or changes in it, counted in the adapters of `benchmarks/peers` as they
are formatted there.
`gradients` is how far those of the first step are from one process's, relative to their length, for
the worst parameter, as they follow from the weights that AdamW made of them; `weights` is the same
of the way that the weights went in {CHECKED_STEPS} steps. The Megatron-style baseline is
written anew from the papers, with collectives that block; it is not Megatron-LM. merakc keeps the
memory that a step frees, as glibc would do for others with `MALLOC_TRIM_THRESHOLD_` and
`MALLOC_MMAP_THRESHOLD_` set; nothing is set here. It multiplies float32 matrices by oneDNN where
that is faster than what torch calls, which most of a step is spent on; `{TORCHS}`
multiplies as the others do, so that it shows what layouts, schedules and graphs alone are worth.
oneDNN takes 10 MiB of a rank, half of them pages of torch's library that ranks share, and up to
16 MiB of a weight's gradient, which it makes before it is added.

{shown}{tables}
## Where merakc is behind

{wrong}
## What is missing, and why

{noted}"""


def summary(results: Sequence[Result]) -> dict[str, float]:
    """The median ratio of the best peer's step to merakc's, by layout and network."""
    found = {}
    for result in results:
        own, peer = best(result.rows, peers=False), best(result.rows, peers=True)
        if own is not None and peer is not None:
            found[result.title] = statistics.median(
                a / b for a, b in zip(peer.steps_s, own.steps_s, strict=True)
            )
    return found


def plot(path: Path, results: Sequence[Result]) -> None:
    """Steps of all contestants, a row a layout and a column a network; whiskers from least to
    largest.
    """
    import matplotlib.pyplot as plt  # takes a second

    plans = {r.plan: len(r.rows) + 2 for r in results}
    networks = list(dict.fromkeys(r.network for r in results))
    figure, axes = plt.subplots(
        len(plans), len(networks), figsize=(7.5 * len(networks), 0.27 * sum(plans.values())),
        squeeze=False, height_ratios=list(plans.values()), layout="constrained",
    )  # fmt: skip
    for axis in axes.flat:
        axis.axis("off")
    for result in results:
        axis = axes[list(plans).index(result.plan), networks.index(result.network)]
        axis.axis("on")
        rows = [row for row in result.rows if row.steps_s]
        middle = [row.step_s * 1e3 for row in rows]
        spread = [
            [m - min(row.steps_s) * 1e3 for m, row in zip(middle, rows, strict=True)],
            [max(row.steps_s) * 1e3 - m for m, row in zip(middle, rows, strict=True)],
        ]
        colours = ["tab:orange" if not is_peer(row) and not row.entry.alone else
                   "tab:blue" if is_right(row) else "tab:red" for row in rows]  # fmt: skip
        labels = [row.entry.label + ("" if is_right(row) else " (wrong)") for row in rows]
        axis.barh(labels, middle, xerr=spread, color=colours)
        axis.invert_yaxis()
        axis.set(title=result.title, xlabel="ms a step")
    figure.savefig(path, dpi=80)
    plt.close(figure)
