"""How texts are damaged: in their bytes, line by line, and in the values of their JSON."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pydantic

from merakc.errors import MerakError
from merakc.ir.plan_file import PlanFile, file_text

# What a terminal obeys, what ends lines and directions in Unicode, and what is no UTF-8.
ESCAPES = (
    "\x1b[2J\x1b[31m",
    "\x1b]0;title\x07",
    "\u202e",
    "\u2028",
    "\x00",
    "\r\n",
    "\ud83d\ude00",
)
BYTES = (b"\xff\xfe", b"\xc3", b"\x00", b"\x1b[2J", b"\xed\xa0\x80", b"\xef\xbb\xbf")
NUMBERS = (
    0, -1, 1, 2, 10**9, 10**12, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
WORDS = (
    "", "x", "0", "true", "null", "../../etc/passwd", "/dev/zero", "%s%n", "{0}", "a" * 100_000,
    "[bold red]x[/]", "<script>1</script>", *ESCAPES[:4],
)  # fmt: skip
LINES = ("1e999", "nan", "inf", "-1", "0", "[[[[[]]]]]", '""', "true", "1979-05-27", '"\\u001b[2J"',
         "9" * 40, "{}", "-0.0", '"' + "a" * 5000 + '"')  # fmt: skip

PLAN_HEAD = ("schema_version", "hash", "file_hash")
_PLAN = pydantic.TypeAdapter(PlanFile)


def damaged_bytes(text: str, rng: random.Random) -> bytes:
    """Some bytes lost, doubled, changed, cut off or put in."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 8, 64, 4096)))
    match rng.randrange(6):
        case 0:
            del data[start:end]
        case 1:
            data[start:start] = data[start:end]
        case 2:
            del data[start:]
        case 3:
            data[start:start] = rng.choice(BYTES)
        case 4:
            data[start] ^= 1 << rng.randrange(8)
        case _:
            digits = [k for k, letter in enumerate(data) if 48 <= letter < 58] or [start]
            data[rng.choice(digits)] = 48 + rng.randrange(10)
    return bytes(data)


def damaged_lines(text: str, rng: random.Random) -> bytes:
    """A line lost, doubled, moved or given another value, as of TOML."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            values = [k for k, line in enumerate(lines) if "=" in line] or [at]
            at = rng.choice(values)
            key = lines[at].partition("=")[0]
            lines[at] = f"{key.rstrip()} = {rng.choice(LINES)}"
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def damaged_json(text: str, rng: random.Random, finished: Callable[[Any], Any]) -> bytes:
    """Values, keys and entries changed; `finished` is given what is made, and may sign it."""
    body = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change(body, rng)
    found = json.dumps(finished(body), ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        found = _doubled(found, rng)
    return found.encode("utf-8", "surrogatepass")


def _doubled(text: str, rng: random.Random) -> str:
    """A key that stands twice, with two values."""
    keys = list(re.finditer(r'"(\w+)": ', text))
    if not keys:
        return text
    at = rng.choice(keys)
    return (
        f"{text[: at.start()]}{at.group()}{rng.choice(('0', 'null', '[]'))}, {text[at.start() :]}"
    )


def _change(body: Any, rng: random.Random) -> None:
    places = list(places_in(body))
    if not places:
        return
    owner, key = rng.choice(places)
    value = owner[key]
    match rng.randrange(12):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[f"{key}{rng.choice(ESCAPES)}"] = owner.pop(key)
        case 2 if isinstance(owner, dict):
            owner["unknown"] = value
        case 3 if isinstance(value, list) and value:
            value.insert(rng.randrange(len(value) + 1), copy.deepcopy(rng.choice(value)))
        case 4 if isinstance(value, list):
            rng.shuffle(value)
        case 5 | 6:
            other, place = rng.choice(places)
            if not isinstance(value, dict | list) and not isinstance(other[place], dict | list):
                owner[key], other[place] = other[place], value
        case 7:
            owner[key] = _nested(rng.choice((10, 60, 400)))
        case 8:
            owner[key] = rng.choice(WORDS)
        case 9 if isinstance(value, str):
            at = rng.randrange(len(value) + 1)
            owner[key] = value[:at] + rng.choice(ESCAPES) + value[at:]
        case 10 if isinstance(value, int | float):
            owner[key] = rng.choice((value + 1, -value, value * 2, value - 1, str(value)))
        case _:
            owner[key] = rng.choice(NUMBERS)


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def places_in(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below, as what holds it and under which key."""
    keys = (
        owner if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
    )
    for key in keys:
        yield owner, key
        yield from places_in(owner[key])


def rehashed(body: dict[str, Any]) -> str:
    """A plan's file of those contents with hashes that fit, if they can be read at all."""
    rest = {k: v for k, v in body.items() if k not in PLAN_HEAD}
    try:
        return file_text(_PLAN.validate_python(rest).hash, rest)
    except (pydantic.ValidationError, MerakError, ValueError, TypeError, OverflowError):
        return json.dumps(body)
