"""What a sharding row says of samples: claims of all rows against the calls themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from merakc.errors import RecordError
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.batches.states import Kind
from tests.passes.batches.calls import Case, Unfit, call_of, difference, found_of, numbers, tensors
from tests.passes.batches.forwards import Loss, check, in_parts
from tests.passes.rule_cases import OPS

BOUND = 1e-10
# Values that are undefined; draws, which are keyed otherwise; a convention, which nothing proves;
# products of float8, which round what each part gives of a gradient by itself, and are made of rows
# of samples alone.
LEFT_OUT = {
    *KEY_POSITION, "aten.batch_norm.default", "merakc.scaled_linear.default",
    *(op for op in OPS if "empty" in op),
}  # fmt: skip
TRIED = [op for op in OPS if op not in LEFT_OUT]


def growing(op: str, chosen: list[int]) -> list[int]:
    """Which of a call's numbers are sizes of its tensors."""

    def shapes(k: int) -> list[tuple[int, ...]]:
        now = [chosen[j] + 3 * (j == k) for j in range(len(chosen))]
        try:
            return [tuple(t.shape) for t in tensors(call_of(op, now))]
        except Unfit:
            return before

    before = [tuple(t.shape) for t in tensors(call_of(op, chosen))]
    return [k for k in range(len(chosen)) if shapes(k) != before]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", TRIED)
@settings(max_examples=3)
@given(data=st.data())
def test_what_a_row_claims_of_samples_is_so(op: str, data: st.DataObject) -> None:
    """Each call on rows, constants and sums, in parts of uneven sizes and whole; losses know the
    place of each sample, so that rows in another order would be seen.
    """
    chosen = numbers(op, lambda low, high: data.draw(st.integers(low, high)))
    sizes = growing(op, chosen)
    samples = data.draw(st.lists(st.sampled_from(sizes), max_size=2, unique=True)) if sizes else []
    count = len(tensors(call_of(op, chosen)))
    sums = data.draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=2, unique=True))
    case = Case(
        op, tuple(chosen), tuple(samples), tuple(sums), data.draw(st.booleans()),
        data.draw(st.booleans()),
    )  # fmt: skip
    try:
        kinds, error = difference(case)
    except (Unfit, RecordError):
        assume(False)
    assert error < BOUND, (case, kinds)


def kind_of(case: Case) -> Kind:
    return next(s.kind for r, s in found_of(case).states.items() if r.node == "y")


ROWS, SUM, CONSTANT, COUPLED = Kind.ROWS, Kind.SUM, Kind.CONSTANT, Kind.COUPLED


@pytest.mark.parametrize(
    ("op", "chosen", "samples", "kind"),
    [
        ("aten.linear.default", (3, 4, 5, 6, 1), (0,), ROWS),
        ("aten.linear.default", (3, 4, 5, 6, 1), (), CONSTANT),
        ("aten.linear.default", (3, 4, 5, 6, 1), (3,), COUPLED),  # its bias would count often
        ("aten.linear.default", (3, 4, 5, 6, 0), (3,), SUM),
        ("aten.mm.default", (2, 3, 4, 5), (1,), ROWS),
        ("aten.mm.default", (2, 3, 4, 5), (1, 2), COUPLED),  # every sample with every other
        ("aten.mm.default", (2, 3, 4, 5), (3,), SUM),
        ("aten.addmm.default", (2, 3, 4, 5, 1), (3,), COUPLED),
        ("aten.sum.default", (3, 4, 5, 2), (0,), SUM),
        ("aten.sum.dim_IntList", (3, 4, 5, 2, 1, 1), (0,), ROWS),
        ("aten.amax.default", (3, 4, 5, 2, 0, 0), (0,), COUPLED),
        ("aten.amax.default", (3, 4, 5, 2, 1, 0), (0,), ROWS),
        ("aten.softmax.int", (3, 4, 5, 2, 0), (0,), COUPLED),
        ("aten.softmax.int", (3, 4, 5, 2, 1), (0,), ROWS),
        ("aten.cumsum.default", (3, 4, 5, 2, 0), (0,), COUPLED),
        ("aten.roll.default", (3, 4, 5, 2, 1, 0), (0,), COUPLED),
        ("aten.roll.default", (3, 4, 5, 2, 1, 1), (0,), ROWS),
        ("aten.embedding.default", (3, 4, 5, 6, 0), (0,), ROWS),
        ("aten.mse_loss.default", (3, 4, 5, 6, 2), (0,), SUM),
        ("aten.mse_loss.default", (3, 4, 5, 6, 0), (0,), ROWS),
        ("aten.sort.default", (3, 4, 5, 2, 2), (0,), ROWS),
        ("aten.sort.default", (3, 4, 5, 2, 0), (0,), COUPLED),
    ],
)
def test_claims(op: str, chosen: tuple[int, ...], samples: tuple[int, ...], kind: Kind) -> None:
    assert kind_of(Case(op, chosen, samples)) is kind


def test_groups_that_a_parts_size_alone_divides_between_samples_couple() -> None:
    """Two groups of channels, which are samples: of a part of two each is a group of its own."""

    def loss(m: object, z: torch.Tensor, b: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = z.t().reshape(1, 3, -1).transpose(1, 2)
        return torch.nn.functional.group_norm(rows, 2).square().mul(m.vector).sum()  # type: ignore[attr-defined]

    step = check(loss, sizes=(2, 4, 2))
    assert step.loss.kind is COUPLED
    assert "divided otherwise" in step.loss.why


def test_an_op_of_torch_without_a_rule_is_no_rows() -> None:
    renorm: Loss = lambda m, z, b: torch.renorm(z, 2, 1, 0.5).sum()  # noqa: E731
    assert check(renorm).loss.kind is COUPLED
    assert "no rule" in in_parts(renorm).loss.why
