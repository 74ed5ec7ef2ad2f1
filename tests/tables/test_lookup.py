"""The measured tables: files, what a look-up finds, and what it passes over."""

import json
import math

import pytest

import moe_ops
from moe_ops import backends as backends_module
from moe_ops.choose import plain as configs
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels.configs import (
    SM90_WGMMA,
    GemmConfig,
    config_of,
    fields_of,
)
from moe_ops.schemes import SCHEMES
from moe_ops.tables import lookup, record
from tests.support.cases import BF16
from tests.tuning.test_tuning import (
    GPU,
    MANY,
    ONE,
    TARGET,
    chosen,
    fill,
    layer_config,
    rows_of_tables,
)


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


def test_measured_configs_are_chosen(table):
    default, far = chosen(64), {M: chosen(M) for M in (2, 16, 256, 5000)}
    fill(table)
    lookup._entries.cache_clear()
    configs.for_experts.cache_clear()
    tuned = MANY._replace(block_m=64)
    assert default != tuned
    assert chosen(1) == ONE
    # M = 1 lends its config to no other M, 64 to those from 17 to 255
    assert {M: chosen(M) for M in far} == far
    assert chosen(17) == tuned._replace(sort_chunk=64)  # how pairs are sorted follows M
    assert chosen(255) == tuned
    assert chosen(64) == tuned
    assert chosen(64, top_k=1) != tuned
    with override(None) as seen:
        assert chosen(64) == default
    assert seen == [default]
    with override(ONE):
        assert chosen(64) == ONE


def test_configs_that_want_h_in_fp32_are_for_few_rows(table):
    """A workspace for more than two rows an expert has no place for it."""
    target = TARGET | {"scheme": "fp8_block"}
    tuned = MANY._replace(block_m=16, quantize_x=True, h_in_fp32=True, sort_chunk=64)
    record.record(table, "Test GPU", target, 8, fields_of(tuned), 1.0)
    problem = (BF16, "fp8_block", ("block", "group"), True)

    def config(M, experts, routed=0):
        layer = LayerSizes(2 * M, experts, 512, 256, GPU, 2, routed)
        return configs.for_experts(layer, *problem)

    assert config(8, 8) == tuned
    assert not config(9, 8).h_in_fp32
    # half of the table's experts: its configs, by the rows that its workspace has
    assert config(4, 4, 8) == tuned != config(4, 4)
    assert not config(5, 4, 8).h_in_fp32


def test_configs_that_want_another_workspace_are_passed_over(table):
    record.record(table, "Test GPU", TARGET, 64, fields_of(MANY._replace(h_in_fp32=True)), 1.0)
    assert not chosen(64).h_in_fp32
    assert chosen(64) == configs.choose(LayerSizes(128, 8, 512, 256, GPU), 2, False)


def test_quantized_layers_without_a_gate_have_configs_of_their_own(table):
    target = TARGET | {"scheme": "fp8_block"}
    tuned = MANY._replace(gemm1=GemmConfig(256, 128, 3, 4), quantize_x=True)
    record.record(table, "Test GPU", target, 64, fields_of(tuned), 1.0)
    layer = LayerSizes(128, 8, 512, 256, GPU, 2)
    problem = (layer, BF16, "fp8_block", ("block", "group"))
    assert configs.for_experts(*problem, True).gemm1 == tuned.gemm1
    assert configs.for_experts(*problem, False).gemm1.block_n == 128


def test_tables_hold_configs_by_the_names_of_their_fields():
    assert fields_of(ONE) == {
        "kernel": "sm80_mma",
        "block_m": 16,
        "gemm1": {"block_n": 64, "block_k": 128, "num_stages": 4, "num_warps": 4},
        "gemm2": {"block_n": 64, "block_k": 64, "num_stages": 3, "num_warps": 4},
        "direct": True,
    }
    for config in (ONE, MANY, MANY._replace(split_k=3, kernel=SM90_WGMMA)):
        assert config_of(fields_of(config), config.sort_chunk) == config
    for _, row in rows_of_tables():
        assert fields_of(layer_config(row)) == row["config"]


def test_tables_in_the_package_name_backends_that_exist():
    for path in lookup.tables().values():
        for entry in json.loads(path.read_text())["entries"]:
            rows = entry.get("backends", [])
            counts = [row["num_tokens"] for row in rows]
            assert counts == sorted(set(counts))
            for row in rows:
                assert set(row["us"]) <= set(backends_module.list_backends())
                assert all(us > 0 and math.isfinite(us) for us in row["us"].values())


def test_claims_are_of_backends_and_schemes_that_there_are():
    rows = lookup._claims()
    assert {row["backend"] for row in rows} <= set(moe_ops.list_backends())
    assert {row["scheme"] for row in rows} <= {"", *SCHEMES}
    assert all(row["since"] < row.get("until", row["since"] + 1) for row in rows)
    # of one backend and scheme the first row that fits counts, so that larger experts come first
    of: dict[tuple, list[int]] = {}
    for row in rows:
        of.setdefault((row["backend"], row["scheme"]), []).append(row.get("elements", 0))
    assert all(sizes == sorted(set(sizes), reverse=True) for sizes in of.values())


@pytest.mark.parametrize("elements, found", [
    (1 << 25, (24, 512)), ((1 << 25) - 1, (24, 80)), (1 << 24, (24, 80)), (1000, (24, None)),
])  # fmt: skip
def test_a_claim_is_the_first_row_that_fits(elements, found):
    assert lookup.claim("cutlass", "fp8_block", elements) == found
    assert lookup.claim("cutlass", "int4_w4a8", elements) is None
    assert lookup.claim("triton", "fp8_block", elements) is None
