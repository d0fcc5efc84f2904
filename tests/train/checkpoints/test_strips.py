"""What lies apart on ranks is written in one piece by one of them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.train.checkpoints import strips
from merakc.train.checkpoints.strips import Box, Held, Strip, bring_together, runs_of, strips_of
from tests.battery.small_models import warm_up

DTYPES = torch.float64, torch.bfloat16, torch.bool, torch.complex64
SHAPES = (1,), (7, 5), (3, 5), (4, 3, 5), (2, 3, 4, 5)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def cut(shape: tuple[int, ...], generator: torch.Generator) -> list[Box]:
    cuts = [sorted({0, n, int(torch.randint(n + 1, (), generator=generator))}) for n in shape]
    found = [tuple(zip(*bounds, strict=True)) for bounds in product(*map(pairwise, cuts))]
    return [(a, tuple(e - s for s, e in zip(a, b, strict=True))) for a, b in found]


def taken(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].contiguous()


def shared_out(ranks: int) -> tuple[Tensors, dict[str, Held]]:
    """Tensors, and who holds which boxes of them, as every rank draws them."""
    generator = torch.Generator().manual_seed(ranks)
    tensors, held = {}, {}
    for dtype, shape in product(DTYPES, SHAPES):
        name = f"{dtype} {shape}"
        tensors[name] = (torch.randn(shape, generator=generator) * 9).to(dtype)
        boxes = cut(shape, generator)
        owners = torch.randint(ranks, (len(boxes),), generator=generator).tolist()
        pairs = [*zip(owners, boxes, strict=True)]
        held[name] = Held(shape, tensors[name].itemsize, pairs)
    return tensors, held


def brought(folder: Path, fails: str = "") -> str:
    """Writes a file for each tensor; on rank 1 a box or a write may fail."""
    strips.STRIP_BYTES = 64
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors, held = shared_out(ranks)
    given: Counter[tuple[str, Box]] = Counter()

    def box_of(name: str, box: Box) -> torch.Tensor:
        given[name, box] += 1
        if fails == "box" and rank == 1:
            raise ValueError(name)
        return taken(tensors[name], box)

    def write(strip: Strip, data: torch.Tensor) -> None:
        if fails == "write" and rank == 1:
            raise OSError(strip.name)
        with (folder / strip.name).open("r+b") as file:
            file.seek(strip.at_byte)
            file.write(data.numpy().tobytes())

    own = [s for s in strips_of(held) if rank in s.ranks()]
    try:
        bring_together(own, box_of, dist.group.WORLD, write)
    except (ValueError, OSError) as error:
        return type(error).__name__
    assert set(given.values()) == {1}
    return "written"


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_write_whole_tensors(ranks: int, tmp_path: Path) -> None:
    tensors, held = shared_out(ranks)
    for name, tensor in tensors.items():
        (tmp_path / name).write_bytes(bytes(tensor.nbytes))
    assert run_ranks(ranks, partial(brought, tmp_path)) == ["written"] * ranks
    for name, whole in tensors.items():
        data = bytearray((tmp_path / name).read_bytes())
        found = torch.frombuffer(data, dtype=whole.dtype).reshape(whole.shape)
        assert torch.equal(found, whole), name
    owners = Counter(s.owner for s in strips_of(held))
    assert len(owners) == ranks


def failing(folder: Path) -> list[str]:
    return [brought(folder, fails) for fails in ("box", "write")]


def test_other_ranks_do_not_wait_for_one_that_fails(tmp_path: Path) -> None:
    tensors, _ = shared_out(2)
    for name, tensor in tensors.items():
        (tmp_path / name).write_bytes(bytes(tensor.nbytes))
    found = run_ranks(2, partial(failing, tmp_path))
    assert found == [["written", "written"], ["ValueError", "OSError"]]


def test_runs_are_where_they_belong() -> None:
    tensors, held = shared_out(1)
    for name, whole in tensors.items():
        data = bytearray(whole.nbytes)
        for _, box in held[name].boxes:
            for at, run in runs_of(taken(whole, box), box, whole.shape):
                data[at : at + run.numel()] = run.numpy().tobytes()
        assert torch.equal(torch.frombuffer(data, dtype=whole.dtype).reshape(whole.shape), whole)


def test_short_runs_alone_are_brought_together() -> None:
    rows = Held((4096, 1024), 4, [(0, ((0, 0), (2048, 1024))), (1, ((2048, 0), (2048, 1024)))])
    columns = Held((4096, 1024), 4, [(0, ((0, 0), (4096, 512))), (1, ((0, 512), (4096, 512)))])
    experts = Held((8, 2048, 1024), 4, [(0, ((0, 0, 0), (8, 1024, 1024)))])
    assert [held.is_apart() for held in (rows, columns, experts)] == [False, True, False]
    shares = Counter(s.owner for s in strips_of({"columns": columns}))
    assert shares == {0: 2, 1: 2}
