"""The notation of sharding rules, checked against the schema of the op that a rule is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from merakc.errors import RuleError
from merakc.passes.sharding.rows import POINTWISE, Along, Last, Row, Whole

TENSORS = ("Tensor", "Optional[Tensor]")  # the types of a notation's arguments, in a schema
DOTS = "..."
KIND = re.compile(r"(along|last|whole)\((.*)\)", re.DOTALL)
LETTER = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, slots=True)
class Token:
    """One dim of a notation: its letter and marks, and where in the text it stands."""

    text: str
    start: int

    @property
    def letter(self) -> str:
        """The name of the dim."""
        return self.text.strip("?!")


def parse_row(text: str, schema: Any) -> Row:
    """A rule from its text: an einsum, `pointwise`, `along(name)`, `last(n)` or `whole(why)`.

    Raises `RuleError`, with the place in the text, where it is malformed or does not fit the
    schema.
    """
    kind = KIND.fullmatch(text.strip())
    if text.strip() == POINTWISE:
        return POINTWISE
    if kind is None:
        _check(text, schema)
        return text
    name, inner = kind.groups()
    if name == "along":
        if inner not in [a.name for a in schema.arguments]:
            known = ", ".join(a.name for a in schema.arguments)
            raise _error(text, text.index("(") + 1, f"no argument '{inner}' (there are {known})")
        return Along(inner)
    if name == "last":
        if not inner.isdigit() or int(inner) == 0:
            raise _error(text, text.index("(") + 1, f"'{inner}' is no number of dims")
        return Last(int(inner))
    if not inner.strip():
        raise _error(text, text.index("(") + 1, "a reason is needed")
    return Whole(inner.strip())


def _check(text: str, schema: Any) -> None:
    """Raises `RuleError` where an einsum is malformed or does not fit the schema."""
    if text.count("->") != 1:
        raise _error(text, len(text), "one '->' is needed between arguments and outputs")
    arrow = text.index("->")
    arguments = list(_parts(text, 0, arrow))
    outputs = list(_parts(text, arrow + 2, len(text)))
    tensors = [a for a in schema.arguments if str(a.type) in TENSORS]
    if len(arguments) != len(tensors):
        names = ", ".join(a.name for a in tensors) or "none"
        what = f"{len(arguments)} arguments, where the op has {len(tensors)} tensors ({names})"
        raise _error(text, 0, what)
    if len(outputs) != len(schema.returns):
        what = f"{len(outputs)} outputs, where the op has {len(schema.returns)}"
        raise _error(text, arrow + 2, what)
    for part, tensor in zip(arguments, tensors, strict=True):
        _check_argument(text, part, tensor)
    given = {t.letter for part in arguments for t in part}
    for part in outputs:
        _check_output(text, part, given)
    kept = {t.letter for part in outputs for t in part}
    for token in (t for part in arguments for t in part if not t.text.endswith("!")):
        if token.letter not in kept:
            _check_summed(text, token, arguments, [t.name for t in tensors])


def _parts(text: str, start: int, end: int) -> Iterator[list[Token]]:
    """The dims of each comma-separated part of `text[start:end]`."""
    for part in text[start:end].split(","):
        yield [Token(m.group(), start + m.start()) for m in re.finditer(r"\S+", part)]
        start += len(part) + 1


def _check_argument(text: str, part: list[Token], tensor: Any) -> None:
    is_optional = str(tensor.type) != "Tensor"
    start = part[0].start if part else len(text)
    if is_optional and not (part and part[0].text.startswith("?")):
        raise _error(text, start, f"argument '{tensor.name}' may be None: put '?' before it")
    seen: set[str] = set()
    for k, token in enumerate(part):
        plain = token.text.removeprefix("?") if k == 0 and is_optional else token.text
        if plain == DOTS and k == 0:
            continue
        if LETTER.fullmatch(plain.removesuffix("!")) is None:
            raise _error(text, token.start, f"'{token.text}' is no dim of argument '{tensor.name}'")
        if token.letter in seen:
            raise _error(text, token.start, f"'{token.letter}' twice in one argument")
        seen.add(token.letter)


def _check_output(text: str, part: list[Token], given: set[str]) -> None:
    for k, token in enumerate(part):
        if token.text not in given or (token.text == DOTS and k > 0):
            what = f"no argument has the dim '{token.text}'"
            raise _error(text, token.start, what)
        if token.letter in [t.letter for t in part[:k]]:
            raise _error(text, token.start, f"'{token.letter}' twice in one output")


def _check_summed(text: str, token: Token, arguments: list[list[Token]], names: list[str]) -> None:
    """An argument without a summed dim might be added, by every rank once more."""
    for part, name in zip(arguments, names, strict=True):
        if token.letter not in [t.letter for t in part]:
            raise _error(
                text, token.start,
                f"'{token.letter}' is summed, and argument '{name}' lacks it: what it adds would "
                f"be added by every rank; write '{token.letter}!' to keep the dim whole",
            )  # fmt: skip


def _error(text: str, position: int, what: str) -> RuleError:
    line = text.replace("\n", " ")
    return RuleError(
        f"sharding rule, character {position + 1}: {what}\n    {line}\n    {' ' * position}^"
    )
