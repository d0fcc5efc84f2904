"""What every test runs under: one thread of torch, the same hypothesis examples every time, and
every pass verified, no GPU; and what modules and a first model cost paid once, not by each process.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# No deadline: a shared machine may stall for any time, and a slow example is no wrong one.
hypothesis.settings.register_profile("merakc", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("merakc")
torch.set_num_threads(1)
# Tests fork ranks after backwards, which torch allows where its first backward sees no GPU: neither
# a real one, nor the one that fake tensors pretend in a build for CUDA. Those that need a GPU run
# with CUDA_VISIBLE_DEVICES=0.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
os.environ["MERAKC_CHECK"] = "1"  # read when merakc.passes.running is imported, here and by ranks
# Containers often forbid bytecode: each process that a test starts would compile torch and
# merakc anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True, scope="session")
def a_first_model() -> None:
    """Trains a model of transformers' here, where tests have imported it.

    Imports, caches of torch's and what merakc knows of the code of libraries are then there in
    all forked ranks: more than half of a rank's CPU time, else. What is there now is no garbage.
    """
    if "transformers" in sys.modules:
        _train()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_to_look_through() -> Iterator[None]:
    """What a module's tests leave in caches is no garbage either: a million objects after half the
    tests, and each start of ranks looks for garbage among them first, for most of a second.
    """
    yield
    gc.collect()
    gc.freeze()


def _train() -> None:
    import merakc
    from benchmarks.models import MODELS

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        batch = MODELS["gpt2"].batch(4)
        model = merakc.auto_parallel(MODELS["gpt2"].model(), batch)
        model(**batch)["loss"].backward()
        model.full_gradients()
