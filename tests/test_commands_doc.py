"""The examples in docs/commands.md are what the commands print.

After a change that is meant: `python -m tests.test_commands_doc` writes the page again.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.as_users import told

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "commands.md"
# A command, and the block of what it prints, where one follows.
EXAMPLE = re.compile(
    r"```bash\n(?P<command>.*?)\n```(?:\n\n```text\n(?P<shown>.*?)```)?", re.DOTALL
)
# Rounding errors and seconds are another machine's: the largest tensor may be, too.
FIGURE = re.compile(r"\d+\.\d+e-\d+|in \d+ s")


def examples(folder: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Each example of the page, and what its command prints now."""
    for match in EXAMPLE.finditer(PAGE.read_text()):
        yield match, told(folder, match["command"])


def facts(command: str, text: str) -> list[str]:
    """The lines of an output that are the same on every machine."""
    lines = text.splitlines()
    if " verify " in command:
        lines = [FIGURE.sub("#", line).split("  loss of ")[0] for line in lines]
        lines = [re.split(r" {2,}(?:gradient|weight) of ", line)[0].rstrip() for line in lines]
        lines = [line for line in lines if line[:20].strip()]  # the rest of a long name
    if command.endswith("doctor"):
        return re.findall(r"\b(Python|torch|pymetis|gloo|shared memory|host name)\b", text)
    return lines


def test_the_examples_are_what_is_printed(tmp_path: Path) -> None:
    commands = []
    for match, text in examples(tmp_path):
        commands.append(match["command"].split()[1])
        if match["shown"] is not None:
            assert facts(match["command"], match["shown"]) == facts(match["command"], text)
    assert commands == ["plan", "verify", "simulate", "scale", "graph", "show", "doctor"]


if __name__ == "__main__":
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as place:
        for found, now in examples(Path(place)):
            if found["shown"] is not None:
                old = found[0]
                start = found.start("shown") - found.start()
                page = page.replace(old, f"{old[:start]}{now}```")
    PAGE.write_text(page)
