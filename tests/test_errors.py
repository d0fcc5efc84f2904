"""The tree of errors."""

from __future__ import annotations

import inspect
import pickle

import pytest

from merakc import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]
ERRORS = [cls for cls in CLASSES if not issubclass(cls, Warning)]


@pytest.mark.parametrize("error", ERRORS)
def test_one_base_catches_every_error(error: type[Exception]) -> None:
    assert issubclass(error, errors.MerakError)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_crosses_processes(error: type[Exception]) -> None:
    # A failing rank hands its error to the parent.
    back = pickle.loads(pickle.dumps(error("dp (3) does not divide the batch (8)")))
    assert type(back) is error
    assert str(back) == "dp (3) does not divide the batch (8)"


def test_what_is_no_error_is_a_warning_of_the_user() -> None:
    assert set(CLASSES) - set(ERRORS) == {errors.MerakWarning}
    assert issubclass(errors.MerakWarning, UserWarning)


def test_a_failure_of_the_users_code_is_told_with_its_line() -> None:
    def theirs() -> None:
        inspect.getmembers(errors, "no function")  # type: ignore[call-overload]

    with pytest.raises(TypeError) as caught:
        theirs()
    text = errors.failure(caught.value)
    assert text.startswith("TypeError: 'str' object is not callable, at ")
    line = inspect.getsourcelines(theirs)[1] + 1  # not that of the standard library
    assert text.endswith(f"tests/test_errors.py:{line}")
    assert errors.failure(ValueError("two\nlines")) == "ValueError: two lines"
    assert errors.failure(KeyboardInterrupt()) == "KeyboardInterrupt"
