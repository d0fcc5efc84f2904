"""Tables where there is little room."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from merakc.report.tables import Fitted

COLUMNS = {"stage": True, "modules": False, "waits for dp": True, "predicted peak": True}
ROWS = [
    ("0", "transformer.wte .. transformer.h.1", "17.88 us", "1,024.00 MiB"),
    ("1", "[0] .. (model)\nand lm_head", "3.00 ms", "80.00 GiB"),
]


def shown(
    width: int, columns: dict[str, bool] = COLUMNS, rows: list[tuple[str, ...]] = ROWS
) -> str:
    page = io.StringIO()
    console = Console(file=page, width=width, color_system=None, legacy_windows=False)
    console.print(Fitted(columns, rows))
    return page.getvalue()


def test_golden() -> None:
    lines = [line.rstrip() for line in shown(100).splitlines()]
    assert lines == [
        "",
        "  stage   modules                              waits for dp   predicted peak",
        " " + "─" * 76,
        "      0   transformer.wte .. transformer.h.1       17.88 us     1,024.00 MiB",
        "      1   [0] .. (model)                            3.00 ms        80.00 GiB",
        "          and lm_head",
        "",
    ]


@pytest.mark.parametrize("width", [78, 70, 62, 54, 46, 40, 34])
def test_numbers_are_never_broken_while_there_is_room_for_them(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    for cell in ("17.88 us", "3.00 ms", "1,024.00 MiB", "80.00 GiB"):
        assert cell in text


def test_headers_are_stacked_before_text_is_folded() -> None:
    text = shown(74)
    assert "transformer.wte .. transformer.h.1" in text
    assert "predicted peak" not in text
    narrow = shown(50)  # and then words of it stay whole
    assert "transformer.wte" in narrow
    assert "transformer.wte .. transformer.h.1" not in narrow


def test_many_numbers_come_closer() -> None:
    names = ("devices", "shards", "tokens each", "to first", "MFU", "watts each", "per joule")
    rows = [("2,048", "1, 1, 2048", "20,119", "1.00", "45%", "700", "12.16")] * 2
    text = shown(50, dict.fromkeys(names, True), rows)  # type: ignore[arg-type]
    assert max(map(len, text.splitlines())) <= 50
    assert text.count("1, 1, 2048 ") == 2
    assert "devices" in text


def test_words_stay_whole_before_columns_are_apart() -> None:
    rows = [("0", "model.layers.12.post_layernorm .. (model)", "17.88 us", "1,024.00 MiB")]
    assert "model.layers.12.post_layernorm" not in shown(50, rows=rows)  # too long a word
    rows = [("0", "layers.12.mlp.act_fn .. (model)", "17.88 us", "1,024.00 MiB")]
    assert " layers.12.mlp.act_fn " in shown(56, rows=rows)


def test_rows_become_columns_where_headers_would_be_broken() -> None:
    columns = {"machines": False, "devices": True, "tokens per day": True, "recompute": False}
    columns |= {"price": True, "device hours": True, "kWh": True}
    rows = [("h100", str(n), "95.7 G", "none", "40.1", "20.1", "14.0") for n in (8, 16, 1024)]
    wide = shown(80, columns, rows)  # type: ignore[arg-type]
    assert any("machines" in line and "kWh" in line for line in wide.splitlines())
    lines = [line.rstrip() for line in shown(34, columns, rows).splitlines()]  # type: ignore[arg-type]
    assert max(map(len, lines)) <= 34
    assert " tokens per day  95.7 G  95.7 G" in lines
    assert [line.split() for line in lines if "devices" in line] == [
        ["devices", "8", "16"],
        ["devices", "1024"],
    ]
