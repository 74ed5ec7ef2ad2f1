"""The rows of the rules: each is chosen somewhere, and what it chooses is compiled."""

import ast
import itertools
import os
import re
import subprocess
import sys

import pytest

from moe_ops.choose import rules
from tests.support.paths import ROOT, TOOLS

TABLES = {
    name: rows
    for name, rows in vars(rules).items()
    if isinstance(rows, tuple) and isinstance(rows[0], tuple) and isinstance(rows[0][0], str)
}
# a row of w13 among those of both products
ELSEWHERE = {("WGMMA_GEMM2", "m8 4bit c256 sparse w13")}


def test_the_last_row_of_each_table_holds_always():
    for name, rows in TABLES.items():
        assert rows[-1][0] == "" and "" not in [when for when, _ in rows[:-1]], name


def test_first_takes_the_first_row_whose_words_hold():
    rows = (("a b", 1), ("!a b", 2), ("", 3))
    found = [
        rules.first(rows, rules.words(a=a, b=b)) for a, b in itertools.product((1, 0), (1, 0))
    ]
    assert found == [1, 3, 2, 3]
    assert rules.block_of(((4, 8), (rules.ANY, 64)), 4) == 8
    assert rules.block_of(((4, 8), (rules.ANY, 64)), 4.1) == 64
    assert [rules.is_short(waves) for waves in (1, 1.01, 1.5, 1.51)] == [False, True, True, False]


REACHED = """
import random
import compile_matrix
from compile_kernels import Call, compile_call, gpu_of, refused
from moe_ops.choose import mixed, plain, rules
from tests.choose.test_rules import TABLES

missing = {(name, when) for name, rows in TABLES.items() for when, _ in rows}
names = {id(rows): name for name, rows in TABLES.items()}

def first(rows, held):
    when, value = next(row for row in rows if rules.first((row, ("", None)), held) is not None)
    missing.discard((names[id(rows)], when))
    return value

plain.first = mixed.first = first
calls = [c for c in compile_matrix.calls() if isinstance(c, Call) and c.backend == "triton"]
random.Random(0).shuffle(calls)
for call in calls:
    for arch in (90, 80):
        if missing and not refused(call, arch):
            compile_call(call, gpu_of(arch), arch, False)
print(sorted(missing))
"""


@pytest.mark.slow
def test_the_tiles_of_one_call_are_compiled():
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    call = ("--arch", "80", "--shape", "qwen3", "--scheme", "", "--M", "4096")
    command = [sys.executable, str(TOOLS / "compile_kernels.py"), *call]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    block_n, block_k, stages, warps = rules.first(rules.PLAIN_GEMM1, rules.of_block(128))
    row = re.search(r"moe_ops_gemm1 (.*)", answer.stdout)[1]
    assert f"BLOCK_N={block_n} BLOCK_K={block_k} NUM_STAGES={stages} warps={warps}" in row


@pytest.mark.slow
def test_calls_of_the_compile_matrix_reach_each_row():
    """So that every tile that can be chosen is compiled. WGMMA_GEMM stands in the tables of both
    products, too, but alone is for any batch, which has fewer blocks.
    """
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(ROOT), str(TOOLS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-c", REACHED]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    missing = set(ast.literal_eval(answer.stdout)) - ELSEWHERE
    assert not {(name, when) for name, when in missing if name != "WGMMA_GEMM"}
