"""What of the GPU path can be proven without a GPU: see docs/gpu.md.

    python -m benchmarks.gpu_path

Steps of every kind are run under NCCL's rules, and small models trained on CPU ranks as GPUs would
run them, with every access to memory ordered by streams, and on CUDA tensors that hold nothing. It
exits with 1 where a step comes to no end, races, or joins tensors of several devices, or where
something that is put in is not noticed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu_path.fakes import LAYOUTS as FAKED
from benchmarks.gpu_path.fakes import STEPS, Faked, faked
from benchmarks.gpu_path.kernels import Compiled, compiled, interpreted
from benchmarks.gpu_path.orders import Orders, cases, check, sabotage
from benchmarks.gpu_path.races import LAYOUTS, Found, trial
from benchmarks.harness import JsonPath, finish, known, rich_table, tracked

console = Console(highlight=False, markup=False, soft_wrap=True)
app = typer.Typer(add_completion=False)
PARTS = ("orders", "races", "fakes", "kernels")


def orders(every: int, seeds: int) -> Orders:
    """Steps under NCCL's rules."""
    found = Orders()
    for case in tracked([*cases()][::every], lambda c: f"{c.name}, pp={c.pp}", console):
        check(case, found)
    sabotage(found, seeds)
    console.print(f"{found.plans:,} plans, connected eagerly and lazily: ", end="")
    console.print(f"{len(found.complaints)} come to no end or have orders that differ")
    _tell(found.complaints, found.caught)
    return found


def races(every: int) -> list[Found]:
    """Training, with its races looked for."""
    found = [trial(layout) for layout in tracked(LAYOUTS[::every], str, console)]
    clean = sum(not f.faults for f in found)
    console.print(f"{clean} of {len(found)} layouts train without a race and call as is proven")
    put_in = Counter(kind for f in found for kind in f.caught)
    noticed = Counter(kind for f in found for kind, is_caught in f.caught.items() if is_caught)
    faults = (f"{f.layout}: {text}" for f in found for text in f.faults)
    _tell(faults, {kind: (noticed[kind], count) for kind, count in put_in.items()})
    return found


def fakes(every: int) -> list[Faked]:
    """Steps on fake CUDA tensors."""
    found = [faked(layout) for layout in tracked(FAKED[::every], str, console)]
    good = sum(not f.faults for f in found)
    console.print(f"{good} of {len(found)} layouts take {STEPS} steps on fake CUDA tensors")
    for f in found:
        for text in f.faults:
            console.print(f"  {f.layout}: {text}")
    rows = [["a step of the rank that has most", "calls", "aside", "waits", "blocking copies"]]
    rows += [[f.layout, *map(str, (f.calls, f.aside, f.waits, f.blocking))] for f in found]
    console.print(rich_table(rows))
    return found


def kernels() -> tuple[dict[str, float], list[Compiled]]:
    """Triton's kernels, interpreted and compiled."""
    errors, made = interpreted(), compiled()
    worst = max(errors, key=lambda case: errors[case])
    console.print(
        f"{len(errors)} cases in Triton's interpreter: at most {errors[worst]:.2f} of ", end=""
    )
    console.print(f"the error that is allowed ({worst})")
    rows = [["kernel", "capability", "registers", "stack bytes", "shared bytes"]]
    rows += [
        [m.kernel, *map(str, (m.capability, m.registers, m.stack_bytes, m.shared_bytes))]
        for m in made
    ]
    console.print(rich_table(rows))
    return errors, made


def _tell(faults: Iterable[str], caught: dict[str, tuple[int, int]]) -> None:
    for text in faults:
        console.print(f"  {text}")
    rows = [["put in", "noticed", "of"]]
    rows += [[kind, str(n), str(of)] for kind, (n, of) in caught.items()]
    rows.append(["", *(str(sum(column)) for column in zip(*caught.values(), strict=True))])
    console.print(rich_table(rows))


@app.command()
def main(
    parts: Annotated[str, typer.Option(help="Of orders, races, fakes, kernels, with commas.")] = "",
    every: Annotated[int, typer.Option(help="One of so many plans and layouts.", min=1)] = 1,
    seeds: Annotated[int, typer.Option(help="Sabotages of each kind of order.", min=1)] = 20,
    json_path: JsonPath = None,
) -> None:
    """Orders of calls on communicators, races of streams, devices of tensors, and kernels."""
    start_s = time.perf_counter()
    chosen = known(parts, PARTS, "--parts")
    ordered = orders(every, seeds) if "orders" in chosen else None
    raced = races(every) if "races" in chosen else []
    run_on_fakes = fakes(every) if "fakes" in chosen else []
    errors, made = kernels() if "kernels" in chosen else ({}, [])
    passed = ordered is None or ordered.passed
    passed &= all(error <= 1.0 for error in errors.values()) and not any(m.spills for m in made)
    passed &= all(not f.faults and all(f.caught.values()) for f in raced)
    passed &= not any(f.faults for f in run_on_fakes)
    figures = {"orders": ordered, "races": raced, "fakes": run_on_fakes,
               "interpreted": errors, "compiled": made}  # fmt: skip
    text = f"{time.perf_counter() - start_s:.0f} s"
    finish(console, passed, text, json_path=json_path, figures=figures)


if __name__ == "__main__":
    app()
