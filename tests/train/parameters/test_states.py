"""State dicts of optimizers say which parts they hold, or refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import merakc
from benchmarks.ranks import RankError, run_ranks
from tests.battery.small_models import Words, parallel, words


def factored() -> None:
    model = parallel(partial(Words), words(0), tp=2)
    merakc.declare_elementwise(torch.optim.Adafactor)  # which is not so
    optimizer = torch.optim.Adafactor(model.parameters())
    model(**words(0))["loss"].backward()
    optimizer.step()
    optimizer.state_dict()


def test_state_of_no_elements_is_refused() -> None:
    with pytest.raises(RankError, match=r"'row_var' of '.*' is .*, not as the parameter's part"):
        run_ranks(2, factored)
