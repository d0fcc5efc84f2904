"""Kernels of Triton in its interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import pytest

from benchmarks.gpu_path.kernels import CAPABILITIES, compiled, interpreted, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="make install brings Triton")


def test_interpreted_kernels_are_their_formulas() -> None:
    found = interpreted()
    assert len(found) == 18
    assert max(found.values()) <= 1.0, found


def test_kernels_compile_for_gpus_without_spills() -> None:
    found = compiled()
    assert [(f.kernel, f.capability) for f in found] == [
        (name, capability) for capability in CAPABILITIES for name in ("summed", "gradients")
    ]
    assert not any(f.spills for f in found), found
    assert all(0 < f.registers <= 255 for f in found)
