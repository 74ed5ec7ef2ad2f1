"""The tree of files in DESIGN.md.

    python -m tools.tree            # say whether it is that of the package
    python -m tools.tree --write    # make it so

What stands behind a folder's name, and the order of folders, is written by hand and kept; files
come from the disk. A new folder comes behind its neighbours, with the first line of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DESIGN = ROOT / "DESIGN.md"
NOTES = 26  # the column at which notes begin
WIDTH = 99
BLOCK = re.compile(r"(## 2\. The tree\n.*?```\n)(.*?)(```)", re.S)
HEADING = re.compile(r"( *)(\w+)/ *(.*)")


class Folder(NamedTuple):
    path: Path  # from the root
    note: str


def known(block: str) -> list[Folder]:
    """The folders of a tree, in its order."""
    found: list[Folder] = []
    path = Path()
    for line in block.splitlines():
        if heading := HEADING.fullmatch(line):
            path = Path(*path.parts[: len(heading[1]) // 2], heading[2])
            found.append(Folder(path, heading[3]))
    return found


def folders(block: str, root: Path) -> Iterator[Folder]:
    """Those of a tree that are there, and behind their neighbours those that it lacks."""
    listed = known(block)
    (package,) = [folder for folder in listed if len(folder.path.parts) == 1]
    order = {folder.path: number for number, folder in enumerate(listed)}

    def of(folder: Folder) -> Iterator[Folder]:
        yield folder
        below = [f for f in listed if f.path.parent == folder.path and (root / f.path).is_dir()]
        for init in sorted((root / folder.path).glob("*/__init__.py")):
            path = init.parent.relative_to(root)
            if path not in order:
                said = ast.get_docstring(ast.parse(init.read_text())) or ""
                below.append(Folder(path, said.partition("\n")[0]))
        for one in below:
            yield from of(one)

    yield from of(package)


def tree(block: str, root: Path = ROOT) -> str:
    """The tree of the package as it is, from one that may be behind."""
    lines = []
    for path, note in folders(block, root):
        indent = "  " * (len(path.parts) - 1)
        lines.append(f"{indent}{path.name}/".ljust(NOTES if note else 0) + note)
        names = sorted(file.stem for file in (root / path).glob("*.py"))
        files = ", ".join(name for name in names if name != "__init__")
        lines += textwrap.wrap(
            *(files, WIDTH),
            initial_indent=f"{indent}    ",
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
        )
    return "\n".join(lines) + "\n"


def up_to_date(text: str, root: Path = ROOT) -> str:
    """A text with its tree made anew."""
    found = BLOCK.search(text)
    if found is None:
        raise ValueError("DESIGN.md must have a block of code under '## 2. The tree', got none")
    return text[: found.start(2)] + tree(found[2], root) + text[found.end(2) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    text = DESIGN.read_text()
    made = up_to_date(text)
    if made != text and not given.write:
        sys.exit("the tree in DESIGN.md is behind: make tree")
    DESIGN.write_text(made)


if __name__ == "__main__":
    main()
