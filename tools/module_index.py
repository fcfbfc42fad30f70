"""Write docs/reference/modules.md: every module of the package with the first sentence of its docstring.

Usage: python tools/module_index.py [--check]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "carpool"
PAGE = ROOT / "docs" / "reference" / "modules.md"
HEAD = """# Modules

Every module of `src/carpool` with the first sentence of its docstring, written by `python tools/module_index.py`. Which
package is for what: [Architecture](../architecture.md#packages).
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for folder, rows in groupby(modules(), key=lambda row: row[0].parent):
        title = folder.as_posix() if folder != Path() else "carpool"
        lines = [f"- `{path.name}` — {sentence}" for path, sentence in rows]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def modules() -> Iterator[tuple[Path, str]]:
    """Each module, relative to the package, with its first sentence; folder by folder."""
    paths = sorted(
        (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")), key=lambda path: (path.parts[:-1], path.name)
    )
    for path in paths:
        docstring = ast.get_docstring(ast.parse((SOURCE / path).read_text(encoding="utf-8"))) or ""
        if path.name != "__init__.py":
            yield path, " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is up to date."""
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print("docs/reference/modules.md is out of date. Run: python tools/module_index.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
