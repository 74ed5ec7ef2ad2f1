"""What a call and a backend are made of: records of few fields, each written in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moe_ops

PACKAGE = Path(moe_ops.__file__).resolve().parent
MOST_FIELDS = 12


def fields_of(source: str, name: str) -> list[str]:
    """The annotated names in the body of a class."""
    (found,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return [part.target.id for part in found.body if isinstance(part, ast.AnnAssign)]  # type: ignore[union-attr]


def too_many(source: str) -> list[str]:
    """The fields of Backend that are too many; what belongs together is a record."""
    return fields_of(source, "Backend")[MOST_FIELDS:]


def written_twice(sources: dict[str, str]) -> list[str]:
    """Fields of Options that the bodies of other classes write again."""
    options = fields_of(sources["ops/options.py"], "Options")
    return sorted(
        f"{name}: {node.name}.{field}"
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name != "Options"
        for field in fields_of(source, node.name)
        if field in options
    )


def sources_of_calls() -> dict[str, str]:
    rooms = ("ops", "planning", "autograd")  # groups of a kernel's arguments are not flags
    paths = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}


def test_a_flag_of_a_call_is_written_once():
    found = sources_of_calls()
    assert "exchange" in fields_of(found["ops/options.py"], "Options")
    assert written_twice(found) == []


def test_a_flag_that_is_written_again_is_found():
    found = sources_of_calls()
    field = "    scheme: str  # `schemes.layer_scheme` of w13 and w2\n"
    assert field in found["ops/args.py"]
    found["ops/args.py"] = found["ops/args.py"].replace(field, field + "    exchange: str = ''\n")
    assert written_twice(found) == ["ops/args.py: ExpertsArgs.exchange"]


def test_a_backend_has_few_fields():
    source = (PACKAGE / "ops" / "backend.py").read_text()
    assert "supports" in fields_of(source, "Backend")
    assert too_many(source) == []


def test_a_field_more_is_found():
    source = (PACKAGE / "ops" / "backend.py").read_text()
    line = "    operators: dict[str, Operator]"
    assert line in source
    fuller = source.replace(line, "    more: bool = False\n" + line)
    assert too_many(fuller) == ["operators"]
    with pytest.raises(ValueError):
        too_many(source.replace("class Backend:", "class Other:"))
