"""Checkpoints that quantizing tools wrote, of tiny models: the values of the formats' formulas.

`tests/fixtures/quantizers` holds TOOL-FAMILY-SCHEME, made by `tools/writers.py` of the plain
models of `tools/plain.py`.
"""

import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from tests.support.paths import ROOT
from tools import compare, plain, quantizers

FIXTURES = ROOT / "tests" / "fixtures" / "quantizers"
WIDTH = 64


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_file_of_a_tool(name, tmp_path):
    tool, family, scheme = re.fullmatch(r"([a-z]+)-(\w+)-(.+)", name).groups()
    plain.save(family, tmp_path, WIDTH)
    result = compare.check(tmp_path, FIXTURES / name, quantizers.TOOLS[tool].schemes()[scheme])
    assert result["status"] == "right", result
