"""FlashInfer's modules: versions, builds, and which GPU takes which."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_ops import activations
from moe_ops.backends.flashinfer import backend, binding, library
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem


def test_available_names_the_version(monkeypatch):
    read = binding.binding.__wrapped__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    older = "needs flashinfer-python 0.6.13 or newer, got 0.6.12; pip install 'flashinfer-python>="
    for version, reason in (
        ("0.6.13", None),
        ("0.6.13.post1", None),
        ("0.6.12", older),
        ("0.6.14", "its fused-MoE module are not where those of 0.6.13 are; pip install"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        monkeypatch.setattr(binding, "binding", read)
        answer = backend.available.__wrapped__()
        assert answer is None if reason is None else reason in answer
        said = backend.BACKEND.library.untested_version
        assert (said is not None) == (version == "0.6.14")


RUN = """  void runMoe(TensorView output, TensorView input, TensorView token_selected_experts,
              Optional<TensorView> token_final_scales, TensorView fc1_expert_weights,
              Optional<TensorView> fc1_expert_biases, TensorView fc2_expert_weights,
              Optional<TensorView> fc2_expert_biases, Optional<Array<Tensor>> quant_scales,
              Optional<TensorView> input_sf, Optional<TensorView> swiglu_alpha,
              Optional<TensorView> swiglu_beta, Optional<TensorView> swiglu_limit,
              MORE bool swizzled_input_sf, int64_t tp_size, int64_t tp_rank, int64_t ep_size,
              int64_t ep_rank, int64_t cluster_size, int64_t cluster_rank, bool enable_alltoall,
              bool min_latency_mode, Optional<Array<int64_t>> profile_ids, bool enable_pdl,
              ActivationType base_activation_type = ActivationType::Swiglu END) {"""
INIT = """tvm::ffi::Module init(DLDataType activation_dtype, DLDataType weight_dtype,
                      DLDataType output_dtype, bool use_deepseek_fp8_block_scale,
                      bool use_w4_group_scaling, bool use_mxfp8_act_scaling,
                      bool use_packed_weights MORE) {"""


def read(more="", end="", init="", mixed=binding._MIXED_ORDER):
    run = RUN.replace("MORE", more).replace("END", end)
    return binding.read(run + INIT.replace("MORE", init), mixed)


def test_sources_say_what_the_module_takes():
    """Those of 0.6.13 and, with three tensors, two flags and another order of weights, 0.7.2."""
    assert read() == binding.Binding()
    newer = read(
        more="Optional<TensorView> clamped_relu2_limit, Optional<TensorView> situ_beta, "
        "Optional<TensorView> situ_linear_beta,",
        end=", Optional<TensorView> workspace_buffer = Optional<TensorView>{}",
        init=", bool use_fused_finalize, bool use_wfp4afp8_humming",
        mixed="fp4x8_interleaved |= ...",
    )
    assert newer == binding.Binding("", (True, False), (None,) * 3, False)
    for changed, reason in (
        ({"more": "int64_t padding,"}, "run_moe takes .*swiglu_limit, padding, swizzled"),
        ({"end": ", bool other"}, "base_activation_type, other"),
        ({"init": ", bool other"}, "init takes .*use_packed_weights, other"),
    ):
        assert re.search(reason, read(**changed).why_not)


def test_another_order_of_weights_is_refused(monkeypatch):
    problem = Problem(
        "experts", 8, 256, 128, 256, 2, torch.bfloat16, "mxfp4_w4a16", "flashinfer_mixed:up_gate",
        Options(activations.resolve("silu")),
    )  # fmt: skip
    h200 = Machine("cuda", (9, 0), "NVIDIA H200", ("flashinfer",))
    assert backend.supports(problem, h200) == []
    monkeypatch.setattr(binding, "binding", lambda: binding.Binding(mixed_order=False))
    assert "reads 4-bit weights in another order" in backend.supports(problem, h200)[0]


@pytest.mark.parametrize("built", [True, False])
def test_a_module_that_is_not_built_is_announced(built, monkeypatch):
    """Before it is built, which takes long."""
    told, loaded = [], mock.MagicMock()

    def build_and_load():
        told.append("built")
        return loaded

    spec = mock.MagicMock(is_compiled=built, build_and_load=build_and_load)
    package = mock.MagicMock()
    package.jit.fused_moe.gen_cutlass_fused_moe_sm90_module.return_value = spec
    package.jit.env.FLASHINFER_CSRC_DIR = Path("/there")
    names = {"": package, ".jit": package.jit, ".jit.fused_moe": package.jit.fused_moe}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert library.module.__wrapped__("90") is loaded
    texts = [str(w.message) for w in caught]
    assert told == ["built"]
    assert [("24 minutes" in t and "moe_ops.warmup" in t) for t in texts] == (
        [] if built else [True]
    )
    loaded.set_deepgemm_jit_include_dirs.assert_called_once_with(
        ["/there/nv_internal/tensorrt_llm"]
    )


@pytest.mark.parametrize(
    "capability, name",
    [((9, 0), "90"), ((10, 0), "100"), ((10, 3), "103"), ((12, 1), "120"), ((8, 9), "")],
)
def test_modules_of_gpus(capability, name):
    assert library.architecture(capability) == name
