"""Loops of one's own, Trainer, peft and accelerate on all layouts, beside one process.

    python -m benchmarks.loops

Each program trains a small model with accumulated batches, clipping, warm-up, an evaluation with
metrics and a save in its middle, from which it goes on on the next layout. Losses, norms, metrics
and weights are compared with the same program, without the lines that are marked, in one process.
It exits with 1 where anything differs or is refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.loops.cells import LAYOUTS, LOOPS, changed_lines, compared, references


def main() -> int:
    """Prints a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer, an even number")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=[*LOOPS])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    given = parser.parse_args()
    if given.steps < 2 or given.steps % 2:
        parser.error(f"--steps {given.steps}: an even number of steps has a middle")
    bad = cells = 0
    for loop in given.loops:
        lines = changed_lines(loop)
        print(f"{loop}: {len(lines)} lines changed")
        print("".join(f"    {line}\n" for line in lines), end="")
        with tempfile.TemporaryDirectory() as folder:
            plain = references(loop, given.steps, Path(folder))
        for layout in given.layouts:
            cell = compared(loop, layout, given.steps, plain)
            said = f"equal, weights within {cell.error:.0e}"
            said = f"DIFFERS {cell.problem}" if cell.problem else said
            said = f"REFUSED {cell.refused}" if cell.refused else said
            print(f"  {cell.layout:<11}then {cell.then:<11}{said}", flush=True)
            cells, bad = cells + 1, bad + (not cell.passed)
    print(f"{cells - bad} of {cells} cells equal one process")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
