"""Measured sections of Markdown documents: `<!-- begin NAME -->` to `<!-- end NAME -->`."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Section = Callable[[], Iterator[str]]

_PATTERN = re.compile(
    r"<!-- begin (?P<name>\w+) -->\n(?P<old>.*?)<!-- end (?P=name) -->", re.DOTALL
)


def fill(document: Path, sections: Mapping[str, Section]) -> None:
    """Rewrite those sections of a document; others stay. A table without rows was not measured."""

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in sections:
            return match[0]
        made = list(sections[name]())
        table = bool(made) and made[0].startswith("|")
        lines = "Not measured." if table and len(made) == 2 else "\n".join(made).strip()
        return f"<!-- begin {name} -->\n{lines}\n<!-- end {name} -->"

    text = document.read_text()
    if not any(match["name"] in sections for match in _PATTERN.finditer(text)):
        raise SystemExit(f"{document}: none of the sections {', '.join(sections)}")
    document.write_text(_PATTERN.sub(section, text))
