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
