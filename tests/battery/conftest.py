from __future__ import annotations

import pytest

from tests.battery.small_models import warm_up


@pytest.fixture(scope="package", autouse=True)
def warm() -> None:
    warm_up()
