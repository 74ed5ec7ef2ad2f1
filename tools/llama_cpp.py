"""llama.cpp's converter, quantizer and forward pass, and the files of tests that it makes.

    python -m tools.llama_cpp --sources FOLDER             makes tests/fixtures/gguf_models anew
    python -m tools.llama_cpp --sources FOLDER lfm2moe     one of its files

FOLDER is the source package of llama-cpp-python, unpacked (`pip download --no-binary :all:`): no
other has the converter. The package itself is installed. A file is a tiny model of transformers
whose matrices hold numbers that Q8_0 represents exactly, so that the model before all conversions
says what logits the file's model has. Nothing of moe_ops is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "gguf_models"
IDS = (3, 17, 31, 22, 7, 12, 29, 12, 4, 13, 23, 5, 27, 20, 9, 2)
Q8_0, MXFP4_MOE, Q4_K_M = 7, 38, 15  # of llama_ftype

_ALL = {
    **{"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
_LATENT = {
    **{"num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 64},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}
_LINEAR = {
    **{"head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}
_SCALED = {
    **{"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "logits_scaling": 2.0,
}
_DENSE_FIRST = {
    **{"head_dim": 16, "moe_intermediate_size": 32, "intermediate_size": 64},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.707},
    **{"mscale_all_dim": 0.707, "original_max_position_embeddings": 16},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
# name -> the model's class, its configuration, what else config.json says, the converter's options
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "qwen3next": ("Qwen3NextForCausalLM", _LINEAR, {}, ("--no-mtp",)),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", _LINEAR, {}, ("--no-mtp", "--fuse-gate-up-exps")),
    "deepseek2-softmax": (
        "DeepseekV2ForCausalLM",
        {**_LATENT, "topk_method": "group_limited_greedy", "rope_parameters": _YARN},
        {},
        (),
    ),
    "deepseek2-sigmoid": (
        "DeepseekV3ForCausalLM",
        {**_LATENT, "n_shared_experts": 1},
        {"scoring_func": "sigmoid"},
        (),
    ),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        {**_DENSE_FIRST, "use_qk_norm": True, "attention_bias": True},
        {},
        (),
    ),
    "granitemoe": ("GraniteMoeForCausalLM", _SCALED, {}, ()),
    "granitemoe-shared": (
        "GraniteMoeSharedForCausalLM",
        {**_SCALED, "shared_intermediate_size": 32},
        {},
        (),
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
        {},
        (),
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            **{"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"attention_bias": True, "lm_head_bias": True},
        },
        {
            "architectures": ["PhiMoEForCausalLM"],
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e6},
                "original_max_position_embeddings": 64,
            },
        },
        (),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32},
            **{"intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1},
            **{"interleave_moe_layer_step": 2, "rope_parameters": _LLAMA3},
        },
        {},
        (),
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **{"intermediate_size": 64, "moe_intermediate_size": 32, "moe_num_experts": 4},
            **{"moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        },
        {},
        (),
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            **{"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "rotary_dim": 8},
        },
        {"scoring_func": "sigmoid"},
        (),
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {
            **{"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4},
            **{"num_experts_per_tok": 2, "num_dense_layers": 1, "conv_L_cache": 3},
            "layer_types": ["conv", "full_attention"],
        },
        {},
        (),
    ),
    "dots1": ("Dots1ForCausalLM", _DENSE_FIRST, {"scoring_func": "sigmoid"}, ()),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 16, "intermediate_size": 32, "num_experts": 4, "moe_topk": 2},
        {"moe_topk": [2, 2], "moe_intermediate_size": [32, 32], "num_shared_expert": [1, 1]},
        (),
    ),
}


def convert(sources: Path, model: Path, out: Path, *options: str) -> None:
    """Convert a folder of transformers by llama.cpp's converter, to F32. A token of 256 is a byte;
    others have a name alone.
    """
    here = sources / "vendor" / "llama.cpp"
    sys.path[:0] = [str(here / "gguf-py"), str(here)]
    try:
        import convert_hf_to_gguf
        from conversion import get_model_class
    finally:
        del sys.path[:2]

    def set_vocab(self: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        count = self.hparams["vocab_size"]
        names = bytes_to_unicode() if count == 256 else {i: f"<{i}>" for i in range(count)}
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("default")
        self.gguf_writer.add_token_list([names[i] for i in range(count)])
        self.gguf_writer.add_token_types([1] * count)
        self.gguf_writer.add_token_merges(["a b"])  # which no token is made by

    architecture = json.loads((model / "config.json").read_text())["architectures"][0]
    get_model_class(architecture).set_vocab = set_vocab
    before = sys.argv
    sys.argv = ["", str(model), "--outtype", "f32", "--outfile", str(out), *options]
    try:
        convert_hf_to_gguf.main()
    finally:
        sys.argv = before


def library() -> Any:
    """llama-cpp-python's bindings, which say nothing but errors."""
    import llama_cpp.llama_cpp as library

    if not hasattr(library, "of_tools"):

        @library.llama_log_callback
        def log(level: int, text: bytes, _: Any) -> None:
            if level >= 4:
                sys.stderr.write(text.decode(errors="replace"))

        library.of_tools = log  # it must live on
        library.llama_log_set(log, ctypes.c_void_p(0))
        library.llama_backend_init()
    return library


def quantize(path: Path, out: Path, preset: int) -> None:
    """Quantize a GGUF file by llama.cpp, without an importance matrix."""
    found = library()
    params = found.llama_model_quantize_default_params()
    params.ftype, params.nthread = preset, 1
    code = found.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama.cpp must quantize {path}, got error {code}")


class Forward:
    """llama.cpp's forward pass of a file on the CPU, with one thread and an fp32 cache."""

    def __init__(self, path: Path, length: int) -> None:
        self.library = lib = library()
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = length
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = params.flash_attn_type = 0
        self.context = lib.llama_init_from_model(self.model, params)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(length, 0, 1)

    def logits(self, ids: list[int]) -> Tensor:
        """Those of all tokens, (len(ids), vocabulary) fp32."""
        lib, batch = self.library, self.batch
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp must decode the tokens, got an error")
        count = len(ids) * self.vocabulary
        numbers = (ctypes.c_float * count).from_address(
            ctypes.addressof(lib.llama_get_logits(self.context).contents)
        )
        return torch.tensor(list(numbers)).view(len(ids), self.vocabulary)


def exact(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Numbers k / 256 with |k| <= 127, which is reached in every 16 columns and 16 rows."""
    numbers = (torch.randn(shape, generator=rng) * 40).round().clamp(-126, 126)
    rows, columns = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    return (
        numbers.where((rows + columns) % 16 != 0, 127 * numbers.sign() + (numbers == 0) * 127)
        / 256
    )


def build(name: str) -> Any:
    """A model of transformers, with numbers that Q8_0 represents."""
    import transformers

    kind, options, _, _ = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**_ALL, **options})).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(exact(parameter.shape, rng))
            else:
                parameter.add_(torch.randn(parameter.shape, generator=rng) / 8)
        for key, buffer in model.named_buffers():
            if key.endswith("bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=rng) / 8)
    return model


def make(sources: Path, name: str) -> Tensor:
    """Write a fixture; its logits."""
    _, _, config, options = MODELS[name]
    model = build(name)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        convert(sources, Path(folder), Path(folder) / "f32.gguf", *options)
        quantize(Path(folder) / "f32.gguf", FIXTURES / f"{name}.gguf", Q8_0)
    return logits


def main() -> None:
    from safetensors.torch import load_file, save_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    args = parser.parse_args()
    FIXTURES.mkdir(exist_ok=True)
    path = FIXTURES / "logits.safetensors"
    logits = load_file(path) if path.exists() else {}
    for name in args.names or MODELS:
        logits[name] = make(args.sources, name)
        print(f"{name}: {(FIXTURES / f'{name}.gguf').stat().st_size} bytes")
    save_file({name: logits[name].contiguous() for name in sorted(logits)}, path)


if __name__ == "__main__":
    main()
