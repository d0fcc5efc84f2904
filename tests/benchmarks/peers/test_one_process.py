from __future__ import annotations

import torch

from tests.benchmarks.peers.comparing import error_of


def test_parts_add_up_to_the_whole_batch() -> None:
    threads = torch.get_num_threads()
    try:
        assert error_of("one_process", "1 thread", ranks=1, samples=4, micro_batches=2) < 1e-3
    finally:
        torch.set_num_threads(threads)
