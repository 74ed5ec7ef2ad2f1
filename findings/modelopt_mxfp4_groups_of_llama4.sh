#!/usr/bin/env bash
# ModelOpt evaluates MXFP4 experts of Llama 4 in groups of inputs, and exports groups of outputs.
#
# Found in nvidia-modelopt 0.47.0 with transformers 5.14.1 and torch 2.13.0, on a CPU.
#
# Llama 4 stores its experts as (expert, input, output). MX formats share a scale along the axis
# that a product sums over, here the inputs, and so one expects a scale for 32 inputs of an output.
# The quantized model in memory does that: its quantizers get the weights transposed. Its export
# of NVFP4 does too: 16 inputs to a scale. Its export of MXFP4 packs and groups 32 neighbours of
# the last axis: one input of 32 outputs. The file thus holds other numbers than the model that was
# evaluated, in groups that a kernel with MX instructions cannot multiply, under the same
# `quant_algo` "mxfp4" as its linear layers, whose groups are of inputs. (ModelOpt imports requests
# without requiring it, hence its line among the packages.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install -qq --no-compile torch==2.13.0
"$python" -m pip install -qq --no-compile \
  transformers==5.14.1 accelerate==1.15.0 nvidia-modelopt==0.47.0 \
  requests==2.34.2

cat >"$folder/finding.py" <<'PYTHON'
import tempfile

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Llama4TextConfig

EXPERTS, INPUTS, WIDTH = 2, 128, 96
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LAYER = "model.layers.0.feed_forward"
STACK = f"{LAYER}.experts.gate_up_proj"
LINEAR = f"{LAYER}.shared_expert.up_proj.weight"
config = Llama4TextConfig(
    vocab_size=128,
    hidden_size=INPUTS,
    intermediate_size=WIDTH,
    intermediate_size_mlp=WIDTH,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    num_local_experts=EXPERTS,
    num_experts_per_tok=1,
    interleave_moe_layer_step=1,
    pad_token_id=0,
    architectures=["Llama4ForCausalLM"],
)


def quantized(scheme):
    """A model with ModelOpt's quantizers, and the weights of its stack before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    weight = model.get_parameter(STACK).detach().float().clone()
    assert weight.shape == (EXPERTS, INPUTS, 2 * WIDTH)
    return mtq.quantize(model, scheme), weight


def exported(scheme):
    """The exported tensors, and the weights of the stack before."""
    model, weight = quantized(scheme)
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        return load_file(f"{folder}/model.safetensors"), weight


def group(parts, name, shape):
    """How many elements of each axis share a scale."""
    scale = parts[f"{name}_weight_scale" if name == STACK else f"{name}_scale"]
    return tuple(size // count for size, count in zip(shape, scale.shape, strict=True))


# what the model's own quantizer is given, with its arithmetic (which needs a GPU) turned off
model, weight = quantized(mtq.MXFP4_DEFAULT_CFG)
mtq.disable_quantizer(model, "*")
given = []
quantizer = model.get_submodule(f"{LAYER}.experts").gate_up_proj_weight_quantizer
quantizer.register_forward_pre_hook(lambda module, args: given.append(tuple(args[0].shape)))
with torch.no_grad():
    model(torch.arange(1, 9)[None])
print(f"the model quantizes {given[0]} along its last axis: inputs")
assert given[0] == (EXPERTS, 2 * WIDTH, INPUTS)

parts, weight = exported(mtq.W4A16_NVFP4_CFG)
stack = group(parts, STACK, weight.shape)
print(f"NVFP4 file: (expert, input, output) of the stack that share a scale: {stack}")
assert stack == (1, 16, 1)

parts, weight = exported(mtq.MXFP4_DEFAULT_CFG)
stack = group(parts, STACK, weight.shape)
linear = group(parts, LINEAR, (WIDTH, INPUTS))
print(f"MXFP4 file: {stack}; (output, input) of a linear layer: {linear}")
assert stack == (1, 1, 32) and linear == (1, 32)

# the stack so read is the weight: not scales in another order, but groups of another axis
codes = parts[STACK].long()
codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
values = LEVELS[codes & 7] * (1 - 2 * (codes >> 3))
scale = torch.exp2(parts[f"{STACK}_weight_scale"].float() - 127).repeat_interleave(32, -1)
error = ((values * scale - weight).norm() / weight.norm()).item()
print(f"relative error of the stack read with groups of outputs: {error:.3f}")
assert error < 0.2
PYTHON
OMP_NUM_THREADS=1 "$python" -W ignore "$folder/finding.py"
