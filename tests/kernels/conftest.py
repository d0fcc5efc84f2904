"""No axis stays bound behind a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from merakc.kernels.collectives import unbind_axes


@pytest.fixture(autouse=True)
def _unbound() -> Iterator[None]:
    yield
    unbind_axes()
