"""A module with variables, which a forward of the tests reads."""

FACTOR = 1.0
TABLE = {"factor": 1.0}


def factor_of(options: object) -> object:
    """It has an attribute of the name of a variable here."""
    return options.TABLE  # type: ignore[attr-defined]
