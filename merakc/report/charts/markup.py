"""HTML put together from values: whatever is not markup already is escaped."""

from __future__ import annotations

from html import escape

from merakc.files.printable import printable


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float) -> Markup:
    """An element. Plain children are escaped, those that are None left out.

    Attributes lose an underscore at their end (`class_`); others become hyphens.
    """
    inner = "".join(_text(child) for child in children if child is not None)
    return Markup(f"<{name}{_attributes(attributes)}>{inner}</{name}>")


def void(name: str, /, **attributes: str | float) -> Markup:
    """An element that has no end: `<meta>`."""
    return Markup(f"<{name}{_attributes(attributes)}>")


def join(*parts: str | None) -> Markup:
    """Pieces one after the other, plain ones escaped."""
    return Markup("".join(_text(part) for part in parts if part is not None))


def _attributes(attributes: dict[str, str | float]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(printable(_number(value)), quote=True)}"'
        for name, value in attributes.items()
    )


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _text(child: str) -> str:
    return child if isinstance(child, Markup) else escape(printable(child), quote=False)
