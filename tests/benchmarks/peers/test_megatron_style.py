from __future__ import annotations

from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import error_of


def _errors() -> float:
    sizes = {"ranks": 4, "samples": 4, "layers": 4}
    return max(
        error_of("megatron_style", "none", **sizes, tp=2, pp=2, micro_batches=4),
        error_of("megatron_style", "full", **sizes, pp=4, micro_batches=2),
        error_of("megatron_style", "selective", **sizes, pp=2, micro_batches=2),
    )


def test_trains_as_one_process() -> None:
    assert run_ranks(4, _errors)[0] < 1e-3
