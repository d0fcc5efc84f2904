"""Forked ranks: results in order, the first failure, the timeout, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

from merakc.equality.ranks import (
    RankError,
    RankTimeoutError,
    check_forks,
    in_child,
    run_ranks,
)
from merakc.errors import ConfigError


def _sum_of_ranks(scale: float) -> tuple[int, str, int, torch.Tensor]:
    total = torch.full((3,), dist.get_rank() * scale)
    dist.all_reduce(total)
    return dist.get_rank(), os.environ["RANK"], torch.get_num_threads(), total


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank")
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_on_two() -> None:
    if dist.get_rank() == 2:
        time.sleep(60)


def test_results_come_in_the_order_of_ranks() -> None:
    results = run_ranks(3, _sum_of_ranks, 2.0)
    assert [r[:3] for r in results] == [(0, "0", 1), (1, "1", 1), (2, "2", 1)]
    for result in results:
        assert torch.equal(result[3], torch.full((3,), 6.0))


def test_a_child_is_no_rank_and_its_errors_are_its_callers() -> None:
    """But for its result, nothing of what it does is left."""

    def child() -> tuple[bool, str, int]:
        os.environ["MERAKC_TEST_CHILD"] = "1"
        return dist.is_initialized(), os.environ.get("RANK", "none"), os.getpid()

    initialized, rank, process = in_child(child)
    assert (initialized, rank) == (False, os.environ.get("RANK", "none"))
    assert process != os.getpid()
    assert "MERAKC_TEST_CHILD" not in os.environ

    def refuses(error: Exception) -> None:
        raise error

    with pytest.raises(ConfigError, match="as it is"):
        in_child(refuses, ConfigError("as it is"))
    with pytest.raises(RankError, match="other"):
        in_child(refuses, ValueError("other"))


def test_a_process_whose_forks_run_no_backward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check_forks()

    def in_a_fork(*_: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading")

    monkeypatch.setattr(torch.Tensor, "backward", in_a_fork)
    with pytest.raises(ConfigError, match=r"merakc verify.*autograd's threading"):
        check_forks()


FRESH = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from merakc.equality.ranks import check_forks, in_child

def backward():
    with FakeTensorMode():  # in a build for CUDA it pretends a GPU
        torch.ones((), requires_grad=True).backward()

in_child(backward)
check_forks()
"""


def test_what_a_child_computes_does_not_keep_others_from_it() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=120)


def test_a_parent_that_has_computed_can_fork() -> None:
    """Autograd's and OpenMP's state of the parent must not hang the children."""
    weight = torch.randn(300, 300, requires_grad=True)

    def step() -> float:
        return float(torch.autograd.grad((weight @ weight).sum(), weight)[0].sum())

    expected = step()
    assert run_ranks(2, step) == pytest.approx([expected, expected], rel=1e-5)


def test_results_larger_than_a_pipe() -> None:
    for result in run_ranks(2, lambda: torch.arange(1_000_000)):
        assert torch.equal(result, torch.arange(1_000_000))


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankError, match="the second rank") as caught:
        run_ranks(3, _fail_on_one)
    assert caught.value.rank == 1
    assert "_fail_on_one" in caught.value.details
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _die_on_one)
    assert caught.value.rank == 1


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, lambda: lambda: None)


class _TwoArgumentsError(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def _fail_with_two_arguments() -> None:
    raise _TwoArgumentsError("torn", "the seam")


def test_an_error_that_cannot_be_pickled_still_has_its_traceback() -> None:
    with pytest.raises(RankError, match="torn at the seam") as caught:
        run_ranks(1, _fail_with_two_arguments)
    assert caught.value.__cause__ is None


def test_a_timeout_names_the_missing_ranks_and_kills_all() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        run_ranks(3, _sleep_on_two, timeout_s=2.0)
    assert caught.value.ranks == (2,)
    assert time.monotonic() - start_s < 20
    assert not multiprocessing.active_children()


def doubled(number: int) -> int:
    return int(AsyncCompile.pool().submit(lambda: 2 * number).result(20))


def test_threads_of_torchs_code_generator_are_a_ranks_own() -> None:
    # Not pytest's monkeypatch: it deletes what it set in torch's settings, for every later test.
    with config.patch(compile_threads=2):
        assert doubled(2) == 4  # the threads of this process, which no rank has
        assert run_ranks(1, partial(doubled, 3)) == [6]
