"""Wrong rules of the algebra are seen, and the benchmark that says so sees what is missed."""

from __future__ import annotations

import contextlib
import math
from functools import cache

import pytest

from benchmarks.loss_formulas import FORMULAS
from benchmarks.loss_sabotages import SABOTAGES
from benchmarks.sabotage import Sabotage
from benchmarks.sabotaged_losses import (
    Line,
    Seen,
    Subject,
    complaints,
    judge,
    measure,
    summary,
    table,
)
from merakc.errors import RecordError
from merakc.passes.batches.proof import certificate
from merakc.passes.batches.proof.certificate import certify

# A formula for some of the kinds of operation, and what sees each wrong rule of these.
SEEN = {
    ("softmax, sort, roll, … over samples", "softmax_over_batch"): {Seen.CERTIFICATE},
    ("softmax of rows", "imsat"): {Seen.SHAPES},
    ("a part of the samples", "prefix"): {Seen.SHAPES, Seen.CERTIFICATE},
    ("mean over samples", "rmse"): {Seen.NOT_REACHED},
    ("mean of a loss", "mse"): {Seen.CERTIFICATE},
    ("variance and norm over samples", "variance"): {Seen.CERTIFICATE},
    ("a function of a sum", "log_cosh_of_mean"): {Seen.CERTIFICATE, Seen.HARMLESS},
    ("a sum plus a constant", "constant_added"): {Seen.CERTIFICATE},
    ("rows that meet a sum", "centred"): {Seen.CERTIFICATE},
    ("numbers in arithmetic", "sum_by_n"): {Seen.CERTIFICATE},
    ("the share of a part", "mse"): {Seen.CERTIFICATE},
    ("known values", "targets_standardised"): {Seen.CERTIFICATE, Seen.CHECK},
    ("mean over valid labels", "ce"): {Seen.CERTIFICATE},
    ("mean over valid labels", "tokens_time_first"): {Seen.CERTIFICATE},
}


@cache
def subject(name: str) -> Subject:
    return Subject(FORMULAS[name])


@pytest.mark.parametrize(("of", "name"), SEEN)
def test_a_wrong_rule_is_seen(of: str, name: str) -> None:
    own = [sabotage for sabotage in SABOTAGES if sabotage.of == of]
    assert own
    found = {judge(sabotage, subject(name)) for sabotage in own}
    assert found - {Seen.NOT_REACHED} <= SEEN[of, name] | {Seen.HARMLESS}
    assert found & SEEN[of, name]


def test_what_nothing_sees_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = [s for s in SABOTAGES if (s.of, s.claim[:4]) == ("numbers in arithmetic", "are ")]
    among = [subject("sum_by_n")]
    (seen,) = measure([own], among)
    assert complaints([seen]) == []
    monkeypatch.setattr("benchmarks.sabotaged_losses.certify", lambda *_: "")
    lines = list(measure([own], among))
    assert lines == [Line(own, {"sum_by_n": Seen.MISSED})]
    assert complaints(lines) == ["numbers in arithmetic, are those of the part: sum_by_n"]
    assert "1 are missed" in summary(lines)
    assert table(lines)[1] == [own.of, own.claim, "", "", "", "", "1"]


def test_nothing_is_seen_where_nothing_is_wrong() -> None:
    right = Sabotage("nothing", "it is right", lambda _: contextlib.nullcontext())
    assert judge(right, subject("info_nce")) is Seen.NOT_REACHED
    (whole,) = {f.total for f in subject("info_nce").found((5, 3)).values()}
    first, rest = subject("info_nce").found((5, 3)).values()
    loss = next(o for o in first.part.outputs if o.kind.value == "loss")
    assert (certify(first, loss, rest), whole) == ("", 8)


def test_values_that_hang_on_rounding_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a covariance that has no inverse, since some of the targets that are drawn are zero."""
    found = subject("whitened_targets").found((2, 2, 2, 2))[2]
    loss = next(o for o in found.part.outputs if o.kind.value == "loss")
    assert certify(found, loss) == ""
    for bound in ({"SURE": 0, "LOST": math.inf}).items():
        monkeypatch.setattr(certificate, *bound)
    with pytest.raises(RecordError, match="computed with numbers"):
        certify(found, loss)
