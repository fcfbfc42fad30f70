"""Check the links between the Markdown pages of a folder, headings included.

Usage: python tools/check_docs.py [FOLDER]
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]*`", re.DOTALL)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages(root: Path) -> list[Path]:
    """All Markdown files below the root, apart from hidden folders and such as hold generated files."""
    skipped = {"build", "dist", "node_modules", "out"}
    found = []
    for path in root.rglob("*.md"):
        folders = path.relative_to(root).parts[:-1]
        if not any(folder.startswith(".") or folder in skipped for folder in folders):
            found.append(path)
    return sorted(found)


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation gone, spaces to hyphens, repeats numbered."""
    found: set[str] = set()
    for match in HEADING.finditer(FENCE.sub("", text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1])
        base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        slug, repeat = base, 0
        while slug in found:
            repeat += 1
            slug = f"{base}-{repeat}"
        found.add(slug)
    return found


def broken_links(page: Path, root: Path) -> Iterator[str]:
    """Each link of the page that leads nowhere, as ``page:line: reason``."""
    # Code is blanked rather than cut out, so that line numbers hold.
    text = CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if SCHEME.match(target):
            continue
        name, _, anchor = unquote(target).partition("#")
        where = f"{page.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
        path = (root / name.lstrip("/") if name.startswith("/") else page.parent / name) if name else page
        if not path.exists():
            yield f"{where}: {target} does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield f"{where}: {target} names no heading of {path.name}"


def main(arguments: list[str]) -> int:
    """Print what is broken and return how the process should end."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    checked = pages(root)
    broken = [problem for page in checked for problem in broken_links(page, root)]
    for problem in broken:
        print(problem, file=sys.stderr)
    print(f"{len(checked)} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
