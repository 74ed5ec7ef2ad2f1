"""A file under benchmarks/results is read by code, or it is not there; a picture is one that a
document shows.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import BENCHMARKS, ROOT

RESULTS = BENCHMARKS / "results"
READERS = ("benchmarks", "tools", "tests")


def patterns(source: str) -> Iterator[str]:
    """The names of JSON files in a source, outside of docstrings; what a field of an f-string or
    of a format stands for is a star. A name that says nothing about a file is none.
    """
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            texts = [v.value if isinstance(v, ast.Constant) else "*" for v in node.values]
            text = "".join(map(str, texts))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings | parts:
            text = re.sub(r"\{[^}]*\}", "*", node.value) if isinstance(node.value, str) else ""
        if text.endswith(".json") and re.match(r"\w{4}", text):
            yield text


def unread(names: list[str], sources: list[str]) -> list[str]:
    """Those of the names that no source names."""
    known = [pattern for source in sources for pattern in patterns(source)]
    return [n for n in names if not any(fnmatch.fnmatch(n, pattern) for pattern in known)]


def test_files_are_read():
    sources = [p.read_text() for folder in READERS for p in (ROOT / folder).rglob("*.py")]
    names = sorted(path.name for path in RESULTS.glob("*.json"))
    assert len(names) > 10
    assert not unread(names, sources)


def test_pictures_are_shown():
    text = "\n".join(path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
    pictures = sorted(path.name for path in RESULTS.iterdir() if path.suffix != ".json")
    assert pictures and all(name.endswith(".png") for name in pictures)
    assert not [name for name in pictures if f"benchmarks/results/{name})" not in text]


def times_in_prose(document: str) -> list[str]:
    """The times that a document quotes outside of the blocks that a script makes."""
    prose = re.sub(r"<!-- made by .*?<!-- end -->", "", document, flags=re.S)
    return re.findall(r"\b\d+(?:\.\d+)?\s*(?:us|ms|µs|ns)\b", prose)


def test_prose_on_performance_quotes_no_times():
    assert not times_in_prose((ROOT / "docs" / "performance.md").read_text())


def test_a_time_in_prose_is_found():
    made = "<!-- made by report.py: a -->\n| 3 us |\n<!-- end -->\n"
    assert times_in_prose(f"{made}It takes 4.5 ms.\n{made}") == ["4.5 ms"]


def test_what_is_not_read_is_found():
    names = ["alpha_x.json", "beta_y.json", "gamma.json", "delta.json"]
    source = '''
"""writes gamma.json"""
def f(gpu, kept):
    """delta.json"""
    g(folder / f"alpha_{gpu}.json", "beta_{}.json", f"{kept}.json")
'''
    assert unread(names, [source]) == ["gamma.json", "delta.json"]
    assert unread(names, [source, "READ = 'gamma.json'"]) == ["delta.json"]


def test_there_is_one_folder_of_results():
    assert [path for path in Path(BENCHMARKS).rglob("*.json") if path.parent != RESULTS] == []
