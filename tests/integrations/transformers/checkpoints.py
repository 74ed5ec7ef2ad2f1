"""Tiny models, and checkpoints of them as the tools write them that quantize."""

import copy
import json
import re
from collections.abc import Callable

import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_ops.integrations.transformers import MoeOpsConfig
from tests.integrations.transformers.test_families import relative
from tests.support.writers import Writer

E, H, INNER = 4, 256, 128
SIZES = {
    **{"hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96},
    **{"num_experts_per_tok": 2, "num_hidden_layers": 1},
}


def tiny(name: str, **sizes):
    """A causal language model of this name with random weights."""
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    return cls(cls.config_class(**SIZES | sizes)).eval()


def qwen(layers=2):
    sizes = {"intermediate_size": 256, "moe_intermediate_size": INNER, "num_experts": E}
    return tiny("Qwen3Moe", num_hidden_layers=layers, **sizes)


def mixtral(layers=1, **sizes):
    sizes = {"intermediate_size": INNER, "num_local_experts": E} | sizes
    return tiny("Mixtral", num_hidden_layers=layers, **sizes)


def gpt_oss():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": E}
    model = tiny("GptOss", num_hidden_layers=2, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2 and p.shape[0] == E:
                p.normal_()  # the biases
    return model


def save_plain(model, folder, dtype=torch.bfloat16):
    """The model's own checkpoint, as transformers writes it: one tensor for each expert's
    projection."""
    with torch.no_grad():
        for p in model.parameters():  # not its buffers, which no file holds
            p.copy_(p.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    return folder


def rewrite(folder, change):
    """Let a function change the tensors of a folder's file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, file, {"format": "pt"})


def edit_config(folder, **fields):
    """Change fields of a folder's config.json."""
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | fields))


def set_config(folder, config):
    edit_config(folder, quantization_config=config)


def requantize(folder, writer: Writer, original, part=""):
    """Replace all matrices of the layers whose names have this part by a writer's; the plain model
    gets their values.
    """

    def writer_of(module):
        router = module.endswith("gate")
        return None if router or ".layers." not in module or part not in module else writer

    replace_matrices(folder, writer_of, original)
    set_config(folder, writer.config)


def replace_matrices(folder, writer_of: Callable[[str], Writer | None], original):
    """A checkpoint of a plain model, some of whose matrices come from writers, by their module's
    names; the model gets their values.
    """
    save_plain(original, folder)

    def change(tensors):
        for name in [name for name in tensors if tensors[name].dim() == 2]:
            module = name.removesuffix(".weight")
            writer = writer_of(module)
            if writer is None:
                continue
            expert = re.search(r"experts\.(\d+)", name)
            writer.factor = 1.0 + int(expert[1]) if expert else 1.0
            parts, values = writer.matrix(*tensors.pop(name).shape)
            tensors |= {f"{module}.{part}": t for part, t in parts.items()}
            set_values(original, module, torch.from_numpy(values).float())

    rewrite(folder, change)


def set_values(model, module, values):
    with torch.no_grad():
        if ".experts." not in module:
            model.get_submodule(module).weight.copy_(values)
            return
        path, expert, name = module.replace("block_sparse_moe", "mlp").rsplit(".", 2)
        experts = model.get_submodule(path)
        if name in ("down_proj", "w2"):
            experts.down_proj[int(expert)] = values
        else:
            first = name in ("gate_proj", "w1")
            rows = slice(0, INNER) if first else slice(INNER, None)
            experts.gate_up_proj[int(expert), rows] = values


def replace_stacks(folder, original, parts_of: Callable, ends=("gate_up_proj", "down_proj")):
    """A checkpoint whose stacks (E, columns, rows) are made of ``parts_of(weight)``: tensors by
    what follows the parameter's name, and values, which the model gets.
    """
    save_plain(original, folder)

    def change(tensors):
        for name in [name for name in tensors if name.endswith(ends)]:
            weight = original.get_parameter(name)
            del tensors[name]
            parts, weight.data = parts_of(weight)
            tensors |= {f"{name}{end}": t.clone() for end, t in parts.items()}

    rewrite(folder, change)


def load(folder, *args, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=MoeOpsConfig(*args), dtype=torch.float32, **options
    )


def weights_of(model):
    return {n: p for n, p in model.named_parameters() if getattr(p, "scheme", None)}


def schemes_of(model):
    return {weight.scheme for weight in weights_of(model).values()}


def values_of(model):
    with torch.no_grad():
        return {
            name: p.dequantize() if hasattr(p, "scheme") else p
            for name, p in model.named_parameters()
        }


def assert_same_values(loaded, original):
    """Every parameter, to what fp32 leaves of the writer's float64 values."""
    got, want = values_of(loaded), values_of(original)
    assert got.keys() == want.keys()
    for name, value in want.items():
        same = torch.equal(got[name], value)  # zeros
        assert same or relative(got[name], value) < 1e-6, name
