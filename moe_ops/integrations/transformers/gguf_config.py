"""The configuration of transformers' model that the fields of a GGUF file say.

A GGUF file has no config.json: its fields say the same in words of its own. Of the fields of an
architecture each is used, known to change nothing, or refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from moe_ops.integrations.checkpoints.common import shown
from moe_ops.integrations.checkpoints.gguf import GgufFiles
from moe_ops.integrations.transformers.gguf_names import LAYER, architecture_of, number_of_layers

_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
Said = dict[str, Any]


class Fields:
    """The fields of a file's architecture, and which of them were asked for."""

    def __init__(self, files: GgufFiles) -> None:
        self.files, self.prefix = files, f"{files.architecture}."
        own = [key for key in files.fields if key.startswith(self.prefix)]
        self.unused = {key.removeprefix(self.prefix) for key in own}

    def get(self, key: str, default: Any = None) -> Any:
        """A field of any kind."""
        self.unused.discard(key)
        return self.files.fields.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """As `GgufFiles.integer`."""
        self.unused.discard(key)
        return self.files.integer(self.prefix + key, default, least)

    def number(self, key: str, default: float | None = None) -> float:
        """A field that must be a positive number, unless it is missing and has a default."""
        value = self.get(key, default)
        if type(value) is not float or not 0 < value < float("inf"):
            raise self.error(key, "a positive number")
        return float(f"{value:.7g}")  # of an fp32 number, as it was written

    def boolean(self, key: str) -> bool:
        """A field that is true, false or missing."""
        value = self.get(key, False)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def error(self, key: str, wanted: Any) -> ValueError:
        """That a field must be something else."""
        got = self.files.fields.get(self.prefix + key)
        return ValueError(
            f"{self.prefix}{key} of {self.files.files[0]} must be {wanted}, got {shown(got)}"
        )


def config_of(files: GgufFiles) -> PreTrainedConfig:
    """The configuration that a file's fields say.

    Raises:
        ValueError: a field is missing, of another kind than it must be, or of no known use; or
            contradicts another one or a tensor. The message names field and file.
    """
    arch, fields = architecture_of(files), Fields(files)
    said: Said = dict(arch.constants)
    vocabulary = files.entries.get("token_embd.weight")
    if vocabulary is None:
        raise ValueError(f"token_embd.weight must be in {files.files[0]}, got no tensor for it")
    _check_layers(fields)
    _read(fields, said)
    said["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon")
    said |= {to: any(map(_is(part), files.entries)) for part, to in arch.present.items()}
    heads = said["num_attention_heads"]
    size = fields.integer("attention.key_length", max(1, said["hidden_size"] // heads))
    rotated = fields.integer("rope.dimension_count", size)
    rope = _rope(fields, rotated)
    if arch.derive != "latent_attention":  # whose heads have other sizes
        said["head_dim"] = size
        _check(fields, "attention.value_length", size)
        if arch.partial_rotary:
            rope["partial_rotary_factor"] = rotated / size
        else:
            _check(fields, "rope.dimension_count", size)
    _check(fields, "vocab_size", vocabulary.shape[0])
    if arch.derive:
        _DERIVE[arch.derive](fields, said, rope)
    for key, value in arch.fixed.items():
        _check(fields, key, value)
    for key in sorted(fields.unused - {*arch.silent}):
        if key.startswith("rope.scaling.") and fields.get("rope.scaling.type") is None:
            raise fields.error(key, f"beside {fields.prefix}rope.scaling.type")
        raise ValueError(
            f"{fields.prefix}{key} of {files.files[0]} must be a field that moe_ops knows, got "
            f"{shown(fields.get(key))}; give from_pretrained a config that says what it means"
        )
    tokens = ((f"tokenizer.ggml.{name}_token_id", name) for name in ("bos", "eos", "padding"))
    ids = {to: files.fields[key] for key, to in tokens if type(files.fields.get(key)) is int}
    try:
        config = AutoConfig.for_model(
            said.pop("model_type", arch.model_type),
            **said,
            vocab_size=vocabulary.shape[0],
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in files.entries,
            bos_token_id=ids.get("bos"),
            eos_token_id=ids.get("eos"),
            pad_token_id=ids.get("padding"),
        )
    except Exception as error:  # of transformers' own checks, which raise several kinds
        raise ValueError(
            f"{files.files[0]} must describe a model that transformers has, got: {error}"
        ) from error
    config.dtype = torch.bfloat16  # where the call names none: blocks have no dtype of their own
    return config


def _read(fields: Fields, said: Said) -> None:
    """Add what the fields say that gguf.toml names."""
    arch, defaults = architecture_of(fields.files), dict(said)
    found: dict[str, str] = {}  # name in the configuration -> field

    def add(key: str, to: str, value: Any) -> None:
        if to in found and said[to] != value:
            raise fields.error(key, f"{said[to]}, as {fields.prefix}{found[to]} is")
        said[to], found[to] = value, key

    for key, to in arch.integers.items():
        if to and (key in fields.unused or to not in defaults):
            add(key, to, fields.integer(key, least=min(1, defaults.get(to, 1))))
    said["num_hidden_layers"] = number_of_layers(fields.files)
    for key, to in arch.optional.items():
        if key in fields.unused:
            add(key, to, fields.integer(key))
    for key, to in arch.numbers.items():
        add(key, to, fields.number(key, defaults.get(to)))
    for key, to in arch.booleans.items():
        add(key, to, fields.boolean(key))
    used, count = arch.integers["expert_used_count"], arch.integers["expert_count"]
    if said[used] > said[count]:
        raise fields.error("expert_used_count", f"at most {said[count]}, the number of experts")


def _check_layers(fields: Fields) -> None:
    """Raise ValueError unless the tensors are those of as many layers as the file says."""
    layers = {int(match[1]) for match in map(LAYER.match, fields.files.entries) if match}
    count = number_of_layers(fields.files)
    fields.unused.discard("nextn_predict_layers")
    found = max(layers, default=-1) + 1
    if not count <= found <= fields.files.integer(f"{fields.prefix}block_count"):
        raise fields.error("block_count", f"{found}, as the file's tensors have it")


def _is(part: str) -> Any:
    return lambda tensor: tensor.endswith(f".{part}")


def _check(fields: Fields, key: str, value: int) -> None:
    """Raise ValueError unless a field has this value, or is missing."""
    if fields.integer(key, value, least=0) != value:
        raise fields.error(key, f"{value}, as the file's tensors and transformers' model have it")


# --- positions ------------------------------------------------------------------------------


def _rope(fields: Fields, rotated: int) -> Said:
    """What fields and tensors say of positions, in transformers' words."""
    found: Said = {"rope_theta": fields.number("rope.freq_base")}
    kind = fields.get("rope.scaling.type")
    fields.get("rope.scaling.finetuned")
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise fields.error("rope.scaling.type", "'none', 'linear', 'yarn' or 'longrope'")
    divisors = _divisors(fields, rotated, kind == "longrope")
    if divisors and kind in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", "'none' or 'longrope' beside divisors")
    if kind in ("linear", "yarn"):
        found |= {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        key = "rope.scaling.original_context_length"
        found["original_max_position_embeddings"] = fields.integer(key)
        for key, to in _YARN.items():
            if f"rope.scaling.{key}" in fields.unused:
                found[to] = fields.number(f"rope.scaling.{key}")
        return found | architecture_of(fields.files).rope
    if kind == "none":  # some files say by what it is not scaled
        for key in ("factor", "original_context_length"):
            fields.get(f"rope.scaling.{key}")
    return {"rope_type": "default"} | found | divisors


def _divisors(fields: Fields, rotated: int, needed: bool) -> Said:
    """Those of frequencies, which are tensors; {} if there are none. transformers has no other
    word for divisors than "longrope".
    """
    files, names = fields.files, ("rope_factors_short.weight", "rope_factors_long.weight")
    found: Said = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
    found["original_max_position_embeddings"] = fields.integer("context_length")
    if "rope_freqs.weight" in files.entries:
        names = ("rope_freqs.weight",) * 2
    elif needed or {*names} & files.entries.keys():
        key = "rope.scaling.original_context_length"
        found["original_max_position_embeddings"] = fields.integer(key)
        found["attention_factor"] = fields.number("rope.scaling.attn_factor", 1.0)
    else:
        return {}
    for name, to in zip(names, ("short_factor", "long_factor"), strict=True):
        entry = files.entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != (torch.float32, (rotated // 2,)):
            raise ValueError(
                f"{name} of {files.files[0]} must be {rotated // 2} fp32 numbers, got "
                f"{None if entry is None else (entry.dtype, entry.shape)}"
            )
        values = files.read(name)
        if not (values.isfinite() & (values > 0)).all():
            raise ValueError(f"{entry} must hold positive numbers, got others")
        found[to] = [float(f"{value:.7g}") for value in values.tolist()]
    return found


# --- what single architectures say --------------------------------------------------


def _linear_attention(fields: Fields, said: Said, rope: Said) -> None:
    """Layers of linear attention, and which they are."""
    values, keys = said["linear_num_value_heads"], said["linear_num_key_heads"]
    if values % keys:
        raise fields.error("ssm.time_step_rank", f"a multiple of {keys}, the key heads")
    inner = fields.integer("ssm.inner_size")
    if inner % values:
        raise fields.error("ssm.inner_size", f"a multiple of {values}, the value heads")
    said["linear_value_head_dim"] = inner // values
    count = said["num_hidden_layers"]
    every = fields.integer("full_attention_interval", 4)
    default = tuple((i + 1) % every != 0 for i in range(count))
    linear = fields.get("attention.recurrent_layers", default)
    if type(linear) is not tuple or len(linear) < count:
        raise fields.error("attention.recurrent_layers", f"true or false for {count} layers")
    kinds = {True: "linear_attention", False: "full_attention"}
    said["layer_types"] = [kinds[bool(is_linear)] for is_linear in linear[:count]]
    sections = fields.get("rope.dimension_sections")  # of images: equal in text
    if sections is not None:
        if type(sections) is not tuple or not all(type(n) is int for n in sections):
            raise fields.error("rope.dimension_sections", "integers")
        rope["mrope_section"] = [*sections[:3]]


def _latent_attention(fields: Fields, said: Said, rope: Said) -> None:
    """Latent attention, and whether routers compute sigmoids or a softmax."""
    size = fields.integer("attention.key_length")
    size = fields.integer("attention.key_length_mla", size)
    rotated = said["qk_rope_head_dim"]
    if size <= rotated:
        raise fields.error("attention.key_length_mla", f"more than {rotated}")
    said["qk_nope_head_dim"] = size - rotated
    rows = fields.integer("attention.value_length")
    said["v_head_dim"] = fields.integer("attention.value_length_mla", rows)
    ranks = "attention.q_lora_rank"
    said["q_lora_rank"] = fields.integer(ranks) if ranks in fields.unused else None
    said["num_key_value_heads"] = said["num_attention_heads"]  # files count the latent's one
    of_mean = "rope.scaling.yarn_log_multiplier"
    if of_mean in fields.unused and rope["rope_type"] == "yarn":
        scale = round(10 * fields.number(of_mean), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    gating = fields.get("expert_gating_func", 1)
    biased = any(map(_is("exp_probs_b.bias"), fields.files.entries))
    if gating != 2 and (gating != 1 or biased):
        raise fields.error("expert_gating_func", "2, sigmoid, beside exp_probs_b, or else 1")
    if gating == 1:
        if said["norm_topk_prob"]:
            raise fields.error("expert_weights_norm", "false in a model that routes by softmax")
        grouped = said["n_group"] > 1
        said |= architecture_of(fields.files).variant
        said |= {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _shared_width(fields: Fields, said: Said, rope: Said) -> None:
    key = "expert_shared_feed_forward_length"
    if key in fields.unused:
        said |= architecture_of(fields.files).variant
        said["shared_intermediate_size"] = fields.integer(key)


def _norms_of_heads(fields: Fields, said: Said, rope: Said) -> None:
    said["use_qk_norm"] = said["num_local_experts"] != 128  # which no field says


def _window(fields: Fields, said: Said, rope: Said) -> None:
    window = fields.integer("attention.sliding_window", 0, least=0)
    said["sliding_window"] = window or None
    fields.get("rope.scaling.original_context_length")
    if rope["rope_type"] == "longrope":
        rope |= {f"{of}_mscale": rope["attention_factor"] for of in ("short", "long")}


def _short_convolutions(fields: Fields, said: Said, rope: Said) -> None:
    """Layers with keys and values are those of attention."""
    heads, count = fields.get("attention.head_count_kv"), said["num_hidden_layers"]
    numbers = {*heads} - {0} if type(heads) is tuple and len(heads) == count else {0, 1}
    if len(numbers) != 1 or not all(type(n) is int and n > 0 for n in numbers):
        raise fields.error("attention.head_count_kv", f"0 or one number for {count} layers")
    said["num_key_value_heads"] = numbers.pop()
    said["layer_types"] = ["full_attention" if n else "conv" for n in heads]
    said["norm_eps"] = said["rms_norm_eps"]


_DERIVE = {
    "latent_attention": _latent_attention,
    "linear_attention": _linear_attention,
    "norms_of_heads": _norms_of_heads,
    "shared_width": _shared_width,
    "short_convolutions": _short_convolutions,
    "window": _window,
}
