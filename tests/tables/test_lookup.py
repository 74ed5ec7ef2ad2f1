"""The measured tables: files, what a look-up finds, and what it passes over."""

import json
import math

from moe_ops import backends
from moe_ops.kernels import triton_tiles
from moe_ops.kernels.triton_tiles import Tile
from moe_ops.tables import lookup, record
from tests.support.cases import BF16
from tests.tuning.test_tuning import CHIP, MANY, ONE, TARGET, chosen, fill


def test_record_replaces_and_keeps_others(table):
    fill(table)
    fill(table, top_k=4)
    content = json.loads(table.read_text())
    assert content["gpu"] == "Test GPU"
    assert [entry["top_k"] for entry in content["entries"]] == [2, 4]
    assert [(r["num_tokens"], r["us"]) for r in content["entries"][0]["triton"]] == [
        (1, 10.0),
        (64, 19.0),
    ]
    assert record.measured_tokens(table, TARGET) == {1, 64}
    assert record.measured_tokens(table, TARGET | {"scheme": "fp8_block"}) == set()
    assert lookup.tables() == {"Test GPU": table}


def test_measured_tiles_are_chosen(table):
    default, far = chosen(64), {M: chosen(M) for M in (2, 16, 256, 5000)}
    fill(table)
    lookup._entries.cache_clear()
    triton_tiles._for_experts.cache_clear()
    tuned = MANY._replace(tokens=64)
    assert default != tuned
    assert chosen(1) == ONE
    # M = 1 lends its tiles to no other M, 64 to those from 17 to 255
    assert {M: chosen(M) for M in far} == far
    assert chosen(17) == tuned._replace(chunk=64)  # how pairs are sorted follows M
    assert chosen(255) == tuned
    assert chosen(64) == tuned
    assert chosen(64, top_k=1) != tuned
    with triton_tiles.searching(None) as seen:
        assert chosen(64) == default
    assert seen == [default]
    with triton_tiles.searching(ONE):
        assert chosen(64) == ONE


def test_tiles_that_want_h_in_fp32_are_for_few_rows(table):
    """A workspace for more than two rows an expert has no place for it."""
    target = TARGET | {"scheme": "fp8_block"}
    tuned = MANY._replace(tokens=16, quantize=True, wide_h=True, chunk=64)
    record.record(table, "Test GPU", target, 8, tuned, 1.0)
    problem = (2, 8, 512, 256, BF16, CHIP, "fp8_block", ("block", "group"), True)
    assert triton_tiles.for_experts(8, *problem) == tuned
    assert not triton_tiles.for_experts(9, *problem).wide_h


def test_tiles_that_want_another_workspace_are_passed_over(table):
    record.record(table, "Test GPU", TARGET, 64, MANY._replace(wide_h=True), 1.0)
    assert not chosen(64).wide_h
    assert chosen(64) == triton_tiles.choose(128, 8, 512, 256, 2, False, CHIP.shared_memory)


def test_quantized_layers_without_a_gate_have_tiles_of_their_own(table):
    target = TARGET | {"scheme": "fp8_block"}
    tuned = MANY._replace(gemm1=Tile(256, 128, 3, 4), quantize=True)
    record.record(table, "Test GPU", target, 64, tuned, 1.0)
    problem = (64, 2, 8, 512, 256, BF16, CHIP, "fp8_block", ("block", "group"))
    assert triton_tiles.for_experts(*problem, True).gemm1 == tuned.gemm1
    assert triton_tiles.for_experts(*problem, False).gemm1.rows == 128


def test_tables_in_the_package_name_backends_that_exist():
    for path in lookup.tables().values():
        for entry in json.loads(path.read_text())["entries"]:
            rows = entry.get("backends", [])
            counts = [row["num_tokens"] for row in rows]
            assert counts == sorted(set(counts))
            for row in rows:
                assert set(row["us"]) <= set(backends.list_backends())
                assert all(us > 0 and math.isfinite(us) for us in row["us"].values())
