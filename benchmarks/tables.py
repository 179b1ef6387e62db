"""Puts the results of the benchmarks into docs/benchmarks.md, between marks, so that no figure there is typed by hand.

    python benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: made by benchmarks/tables.py -->", "<!-- end of tables -->"
NOTHING = "*No results are stored yet: `make bench` measures and fills this place.*"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def section(path: Path) -> str:
    """One result file: machine and command, how it was measured, and a table for each kind of row."""
    stored = json.loads(path.read_text())
    about = stored["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = f"{about['processor']}, {about['cores_used']} of {about['cores_of_machine']} cores, {about['vectors']}"
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in stored["rows"]:
        kinds.setdefault(tuple(row), []).append(row)
    parts = [f"## {stored['name']}", f"`{about['command']}`, {about['date']}, commit {about['commit']}; {machine}; {versions}.", stored["notes"]]
    return "\n\n".join([*parts, *(table(rows) for rows in kinds.values())])


def main() -> None:
    """Rewrites the page between its marks."""
    text = PAGE.read_text()
    made = "\n\n".join(section(path) for path in sorted(RESULTS.glob("*.json"))) or NOTHING
    new, count = re.subn(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: f"{BEGIN}\n\n{made}\n\n{END}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE}: expected the marks {BEGIN} .. {END} once, found {count}")
    PAGE.write_text(new)
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
