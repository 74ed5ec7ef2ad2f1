"""Docstrings read as the site reads them: items of their sections are whole. Neither they nor
comments quote a time: measurements stand in benchmarks/results, a comment has the reason.

`make docs` finds some of the faults of sections, too, but only where it makes a page of them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.house.test_imports import package_files

# sections that list items, and what an item begins with
ITEMS = {
    "Args": re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)*(?: \([^)]*\))?:(?: |$)"),
    "Attributes": re.compile(r"\w+(?:, \w+)*(?: \([^)]*\))?:(?: |$)"),
    "Tensors": re.compile(r"\w+(?:, \w+)*(?: \([^)]*\))?:(?: |$)"),
    "Raises": re.compile(r"[A-Z][\w.]*(?:, [A-Z][\w.]*)*:(?: |$)"),
}
SECTION = re.compile(r"^(\w+):$")


def faults(docstring: str) -> list[str]:
    """The lines of a docstring that begin an item where none can begin, and empty sections."""
    found, items, depth, empty = [], None, 0, ""
    for line in docstring.splitlines():
        section = SECTION.match(line)
        if section or (line and not line.startswith(" ")):
            found += [f"{empty}: has no items"] if empty else []
            name = section[1] if section else ""
            items, depth, empty = ITEMS.get(name), 0, name if name in ITEMS else ""
            continue
        text = line.strip()
        if items is None or not text:
            continue
        indent = len(line) - len(line.lstrip())
        if not depth:
            depth, empty = indent, ""
        if indent < depth or (indent == depth and not items.match(text)):
            found.append(text)
    return found + ([f"{empty}: has no items"] if empty else [])


def documented(source: str) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """The module, its classes, functions and methods."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield node
        if isinstance(node, ast.Module | ast.ClassDef):
            pending += node.body


def test_sections_of_docstrings_list_items():
    wrong = []
    for path in package_files():
        for node in documented(path.read_text()):
            for line in faults(ast.get_docstring(node) or ""):
                wrong.append(f"{path}: {getattr(node, 'name', 'module')}: {line}")
    assert not wrong, "\n".join(wrong)


WHOLE = """Summary.

Args:
    x, y: two of them, which take
        more than one line: here.
    *args: others.

Returns:
    Anything: in any form
    whatever.

Raises:
    ValueError, TypeError: for a reason
        or another.
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("        or another", "    or\n        another", ["or"]),
        ("        more than", "    more than", ["more than one line: here."]),
        ("    *args", "    sizes). *args", ["sizes). *args: others."]),
        ("ValueError, TypeError: for", "for", ["for a reason"]),
        (
            "    ValueError, TypeError: for a reason\n        or another.\n",
            "",
            ["Raises: has no items"],
        ),
    ],
)
def test_faults_of_wrapping_are_found(old, new, found):
    assert faults(WHOLE.replace(old, new) if old else WHOLE) == found


TIME = re.compile(r"\b\d+(?:\.\d+)?[\s#]*(?:us|ms|µs|ns)\b")


def times(source: str) -> list[str]:
    """The times that its docstrings and comments quote, also over the end of a line."""
    if not TIME.search(source):  # most files: nothing to parse
        return []
    texts, line = [ast.get_docstring(node) or "" for node in documented(source)], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            texts[-1:] = (
                [f"{texts[-1]} {text}"] if token.start[0] == line + 1 else [texts[-1], text]
            )
            line = token.start[0]
    return [found for text in texts for found in TIME.findall(text)]


def test_comments_quote_no_times():
    quoted = {path: times(path.read_text()) for path in package_files()}
    assert not {path: found for path, found in quoted.items() if found}


def test_times_are_found():
    assert times('"""It takes 20.7 us."""\n') == ["20.7 us"]
    assert times('def f():\n    """Of 3\n    ms."""\n') == ["3\nms"]
    assert times("x = 1  # 26.6\n# us more\n") == ["26.6 us"]
    assert times('x = "5 ms"  # tells us why\nus = 3\n# of 4 users\n') == []
