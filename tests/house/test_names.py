"""Identifiers are words of the glossary (DESIGN.md): names that were replaced do not come back in
the files where they stood.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import moe_ops

PACKAGE = Path(moe_ops.__file__).resolve().parent

_WGMMA = ("kernels/mixed_gemm/sm90_wgmma.py",)
_MAINLOOP = ("kernels/mixed_gemm/sm90_mainloop.py",)
_WGMMA_CONFIGS = (*_WGMMA, "kernels/mixed_gemm/configs.py", "environment.py")
_GEMV = ("kernels/mixed_gemm/gemv.py", "kernels/mixed_gemm/gemv_dot.py")


class Renamed(NamedTuple):
    """Names that were replaced, what they are called now, and the files (or folders) that must
    not have them.
    """

    old: str
    new: str
    places: tuple[str, ...]


RENAMED = [
    Renamed("wait start_dependent", "gdc_wait gdc_launch_dependents", ("kernels/device",)),
    Renamed("start_dependent", "gdc_launch_dependents", ("kernels",)),
    Renamed("DEPENDENT EARLY", "pdl pdl_first", ("kernels/launch.py",)),
    Renamed("DEPENDENT", "PDL", ("kernels",)),
    Renamed("Tile Tiles", "GemmConfig LayerConfig", ("kernels", "tuning", "tables")),
    Renamed("BM WN BK GROUP", "BLOCK_M BLOCK_N BLOCK_K GROUP_M", ("kernels",)),
    Renamed("parts SPLIT", "split_k SPLIT_K", _WGMMA),
    Renamed("piece U", "k_chunk", _WGMMA_CONFIGS),
    Renamed("alone few_pairs", "max_unsorted_pairs pair_bucket", _WGMMA_CONFIGS),
    Renamed("arrange", "permute_tokens", _WGMMA_CONFIGS),
    Renamed("spoken", "why_no_gluon", _WGMMA_CONFIGS),
    Renamed("resident Residence", "occupancy Occupancy", ("kernels/mixed_gemm",)),
    Renamed("twice", "scale_bf16x2", ("kernels/mixed_gemm/decode.py",)),
    Renamed("MENDED", "EXPONENT_CORRECTION", ("kernels/mixed_gemm/decode.py",)),
    Renamed("asked arrived soon", "prefetch_scale unpack_scale next_scale", _MAINLOOP),
    Renamed("started added following", "issue_wgmma accumulate advance_slot", _MAINLOOP),
    Renamed("fill sums", "producer consume", _MAINLOOP),
    Renamed("leave", "exit_without_tile", _WGMMA),
    Renamed(
        "place_of in_place",
        "permuted_column permute_columns",
        (*_WGMMA, "kernels/mixed_gemm/sm90_decode.py", "kernels/device/permutation.py"),
    ),
    Renamed("left", "tokens_are_lhs", ("kernels/mixed_gemm/sm80_mma.py",)),
    Renamed("chosen", "load_expert_and_weight", _GEMV),
    Renamed("Rows", "Routing", ("kernels", "ops")),
    Renamed("Ready prepare", "BoundPlan look_up", ("planning", "ops/call.py")),
    Renamed("untried", "not_tested_note", ("planning", "backends", "ops")),
]
# what comments said in words of their own
REPHRASED = ["Positions of no pair are left to chance", "Nothing moves"]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every identifier: names, attributes, parameters, keywords, definitions,
    imports.
    """
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            dotted = [alias.name for alias in node.names]
            dotted += [alias.asname for alias in node.names if alias.asname]
            if isinstance(node, ast.ImportFrom) and node.module:
                dotted.append(node.module)
            for name in dotted:
                yield from ((part, line) for part in name.split("."))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from ((name, line) for name in node.names)
        else:  # Name.id, Attribute.attr, arg.arg, keyword.arg, FunctionDef.name, ...
            for field in ("id", "attr", "arg", "name", "rest", "kwd_attrs"):
                value = getattr(node, field, None)
                values = value if isinstance(value, list) else [value]
                yield from ((name, line) for name in values if isinstance(name, str))


def files(root: Path, places: tuple[str, ...]) -> list[Path]:
    """The files of a table's row; at least one for each place."""
    found = []
    for place in places:
        path = root / place
        here = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert here, f"{place} must be a file or a folder of files"
        found += here
    return found


@cache
def names_of(path: Path) -> list[tuple[str, int]]:
    """The identifiers of a file."""
    return list(identifiers(ast.parse(path.read_text())))


def violations(root: Path, renamed: list[Renamed]) -> list[str]:
    """Where an old name stands, in words."""
    found = set()
    for old, new, places in renamed:
        banned = set(old.split())
        for path in files(root, places):
            for name, line in names_of(path):
                if name in banned:
                    where = f"{path.relative_to(root)}:{line}"
                    found.add(f"{where}: {name} must be a name of the glossary ({new})")
    return sorted(found)


def test_there_are_files_to_look_at():
    assert len(files(PACKAGE, tuple({place for row in RENAMED for place in row.places}))) > 50


def test_no_old_name_is_an_identifier():
    found = violations(PACKAGE, RENAMED)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.old)
def test_new_names_are_used(row):
    """The table speaks of this tree: each new name is an identifier in its files."""
    used = {name for path in files(PACKAGE, row.places) for name, _ in names_of(path)}
    assert set(row.new.split()) <= used


def test_no_old_phrase_in_kernels():
    for path in files(PACKAGE, ("kernels",)):
        text = path.read_text()
        assert not [phrase for phrase in REPHRASED if phrase in text], path


PLANTED = {
    "a function": "def place_of(column): ...",
    "a class": "class Rows: ...",
    "a name": "twice = 2",
    "an attribute": "config.parts",
    "a parameter": "def f(alone): ...",
    "a parameter by keyword alone": "def f(*, BM): ...",
    "all other parameters": "def f(**left): ...",
    "a keyword": "f(started=1)",
    "an import": "from a import wait",
    "an import's new name": "import a as untried",
    "a module": "import kernels.arrange.b",
    "a global": "def f():\n    global MENDED",
    "an annotation": "def f(x: Tiles): ...",
    "a loop": "for soon in range(3): ...",
    "a pattern": "match 1:\n    case leave: ...",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_a_planted_name_is_found(source, tmp_path):
    """A test of the test, and that words within longer names and within texts are none."""
    (tmp_path / "planted.py").write_text(source)
    names_of.cache_clear()
    everywhere = [row._replace(places=("planted.py",)) for row in RENAMED]
    assert len(violations(tmp_path, everywhere)) >= 1
    old = violations(tmp_path, everywhere)[0].split(": ")[1].split()[0]
    longer = source.replace(old, f"{old}_of_x") + f"\n# {old}\n'{old}'\n"
    (tmp_path / "planted.py").write_text(longer)
    names_of.cache_clear()
    assert not violations(tmp_path, everywhere)
