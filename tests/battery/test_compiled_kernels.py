"""`compile=True`: the step of one process, by kernels of torch's code generator."""

from __future__ import annotations

import importlib
import shutil
import warnings

import pytest
import torch

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from tests.battery.small_models import (
    Tensors,
    Words,
    assert_close,
    build,
    gradients,
    parallel,
    warm_up,
    words,
)

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here"
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of its own modules
        importlib.import_module("torch._inductor.compile_fx")  # seconds, once and not in every rank


def train() -> tuple[list[float], Tensors]:
    """Losses of two steps on different batches, and the gradients that the second adds up."""
    options = {"tp": 2, "pp": 2, "micro_batches": 2, "compile": True}
    model = parallel(lambda: Words(blocks=1), words(0), **options)
    losses = []
    for step in range(2):
        loss = model(**words(step))["loss"]
        loss.backward()
        losses.append(loss.item())
    return losses, model.full_gradients()


def test_it_trains_as_one_process_does() -> None:
    """With collectives and messages between the kernels."""
    plain = build(lambda: Words(blocks=1))
    wanted = []
    for step in range(2):
        loss = plain(**words(step))["loss"]
        loss.backward()
        wanted.append(loss.item())
    losses, found = run_ranks(4, train, timeout_s=280.0)[0]
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert_close(found, gradients(plain))


def test_without_a_compiler_nothing_starts() -> None:
    import torch._inductor.config as config

    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(ConfigError, match="leave compile away"):
        merakc.auto_parallel(torch.nn.Linear(2, 2), torch.ones(2, 2), compile=True)
