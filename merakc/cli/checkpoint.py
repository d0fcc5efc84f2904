"""`merakc checkpoint`: what a checkpoint holds, whether it is whole, and its other forms."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from merakc.cli.console import NO, AsJson, progress_console, told, working
from merakc.errors import CheckpointError, ConfigError
from merakc.files.printable import count_of
from merakc.report.terminal import Terminal
from merakc.report.units import format_bytes
from merakc.train.checkpoints.convert import (
    TORCH,
    Contents,
    read_contents,
    with_dtype,
    with_experts,
    write_folder,
    write_torch,
)
from merakc.train.checkpoints.manifest import (
    OPTIMIZER,
    WEIGHTS,
    Manifest,
    check_files,
    read_manifest,
    stored_name,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False,
    help="Show, verify, convert and compare checkpoints.",
)  # fmt: skip
Folder = Annotated[Path, typer.Argument(help="A checkpoint's folder.")]
Either = Annotated[
    Path, typer.Argument(help="A checkpoint, a folder of safetensors, or a .pt file.")
]


class Experts(StrEnum):
    """How experts are kept."""

    PACKED = "packed"
    SPLIT = "split"


@app.command()
def show(
    folder: Folder,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: model, step, plan, optimizers, files with their checksums."""
    with told(progress_console()):
        manifest = read_manifest(folder)
    console = Terminal(highlight=False)
    if as_json:
        console.print_json(manifest.model_dump_json())
        return
    console.print(_facts(manifest))
    console.print(_files(manifest))
    if tensors:
        console.print(_tensors(manifest))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for k, name in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 else "right", overflow="fold")
    return table


def _facts(manifest: Manifest) -> Table:
    run, table = manifest.run, Table(box=None, show_header=False)
    parallel, plan = run.get("parallel", {}), run.get("plan")
    weights = [t for n, t in manifest.tensors.items() if n.startswith(WEIGHTS)]
    numel = sum(torch.Size(t.shape).numel() for t in weights)
    dtypes = ", ".join(sorted({t.dtype for t in weights}))
    rows = {
        "model": run.get("model", "not known"),
        "weights": f"{count_of(len(weights), 'tensor')}, {numel:,} elements, {dtypes}",
        "step": parallel.get("step", "not known"),
        "written by": f"merakc {manifest.merakc}, {run.get('world_size', 1)} ranks",
        "written at": run.get("saved_at", "not known"),
        "plan": f"{plan['hash'][:12]} {plan['precision']}" if plan else "none",
    }
    for record in run.get("optimizers", []):
        groups = [
            ", ".join(f"{k}={v}" for k, v in g["options"].items() if isinstance(v, (int, float)))
            for g in record["groups"]
        ]
        rows["optimizer"] = f"{record['kind']}: {groups[0] if groups else ''}"
    extra = run.get("extras", [{}])[0].get("extra")
    rows["extra"] = ", ".join(extra) if isinstance(extra, dict) else "none" if not extra else "yes"
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    return table


def _files(manifest: Manifest) -> Table:
    table = _table("file", "size", "tensors", "CRC-32")
    for name, file in sorted(manifest.files.items()):
        count = sum(t.file == name for t in manifest.tensors.values())
        table.add_row(name, format_bytes(file.size_bytes), str(count or ""), f"{file.crc32:08x}")
    return table


def _tensors(manifest: Manifest) -> Table:
    table = _table("tensor", "file", "shape", "dtype", "CRC-32 of each box")
    for name, stored in manifest.tensors.items():
        crcs = " ".join(f"{c.crc32:08x}" for c in stored.chunks)
        shape = " x ".join(map(str, stored.shape))
        table.add_row(stored_name(name), stored.file, shape, stored.dtype, crcs)
    return table


@app.command()
def verify(folder: Folder) -> None:
    """Check every byte of a checkpoint. Exits with 1 where one was changed."""
    problem = progress_console()
    with told(problem), working(problem, f"checking {folder}"):
        if not folder.is_dir():
            read_manifest(folder)  # says what is wrong: no byte was changed
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except CheckpointError as error:
            problem.print(f"{error}", style="red", soft_wrap=True)
            raise typer.Exit(NO) from error
    size = format_bytes(sum(f.size_bytes for f in manifest.files.values()))
    Terminal(highlight=False).print(
        f"whole: {count_of(len(manifest.files), 'file')}, "
        f"{count_of(len(manifest.tensors), 'tensor')}, {size}"
    )


@app.command()
def convert(
    source: Either,
    target: Annotated[Path, typer.Argument(help="A new folder, or a .pt file.")],
    dtype: Annotated[
        str | None, typer.Option(help="The weights' dtype: bfloat16, float32, …")
    ] = None,
    experts: Annotated[
        Experts | None, typer.Option(help="One tensor a layer (packed), or one an expert (split).")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights-only", help="Leave optimizer and run behind.")
    ] = False,
) -> None:
    """Convert a checkpoint from or to Hugging Face's files and one file of torch's.

    A folder that is written is a checkpoint, and what `from_pretrained` reads.
    """
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        if target.exists():
            raise ConfigError(f"{target} exists; give another name")
        is_file = bool(target.suffix) and not target.suffix[1].isdigit()  # as of Llama-3.1-8B
        if is_file and target.suffix not in TORCH:
            raise ConfigError(
                f"{target}: a file's name ends with {' or '.join(TORCH)}; a folder's has no dot "
                "but those of numbers"
            )
        contents = read_contents(source, weights_alone=weights)
        contents = with_experts(contents, packed=experts == "packed") if experts else contents
        contents = with_dtype(contents, _dtype(dtype)) if dtype else contents
        tell(f"writing {target}")
        (write_torch if is_file else write_folder)(contents, target.absolute())
    progress.print(f"written to {target}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"--dtype {name}: give bfloat16, float16, float32 or float64")
    return found


@app.command()
def diff(first: Either, second: Either, as_json: AsJson = False) -> None:
    """Compare two checkpoints, tensor by tensor. Exits with 1 where they differ."""
    progress = progress_console()
    with told(progress), working(progress, f"reading {first} and {second}"):
        old, new = read_contents(first), read_contents(second)
        rows = list(_differences(old, new))
    console = Terminal(highlight=False)
    if as_json:
        console.print_json(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
    elif rows:
        table = _table(*COLUMNS)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    common = old.tensors.keys() & new.tensors.keys()
    both, alone = len(common), len(old.tensors.keys() ^ new.tensors.keys())
    if rows:
        missing = f", and {alone} are in one of them alone" if alone else ""
        progress.print(f"{len(rows) - alone} tensors differ, of {both} that both have{missing}")
        raise typer.Exit(NO)
    if not as_json:
        console.print(f"the same: {count_of(both, 'tensor')}")


COLUMNS = ("tensor", "first", "second", "largest difference", "elements that differ")


def _differences(old: Contents, new: Contents) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in dict.fromkeys([*old.tensors, *new.tensors]):
        shown = stored_name(name) if name.startswith((WEIGHTS, OPTIMIZER)) else name
        a, b = old.tensors.get(name), new.tensors.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            found.append((shown, _form(a), _form(b), "", ""))
        elif unlike := _unlike(a, b):
            wide = [t if t.dtype.is_complex else t.double() for t in (a, b)]
            largest = (wide[0] - wide[1]).abs().max().item()
            found.append((shown, _form(a), _form(b), f"{largest:.3g}", f"{unlike} of {a.numel()}"))
    return found


def _unlike(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements differ; two that are no numbers do not."""
    a, b = (t.double() if t.is_floating_point() else t for t in (one, other))
    return int(((a != b) & ~((a != a) & (b != b))).sum())


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
