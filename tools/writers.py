"""Run in the environment of one quantizing tool: it writes checkpoints of plain ones.

    python writers.py TOOL TIMEOUT PLAIN OUT FAMILY:SCHEME...

Each cell runs in a process forked from one that imported the tool, and leaves a folder
OUT/FAMILY-SCHEME or, beside it, OUT/FAMILY-SCHEME.error with the reason why the tool wrote
nothing. Nothing of moe_ops is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "GPTQMODEL_CPU_WORKERS": "2",
}
COLUMNS = 128  # of the plain models, and of their vocabulary


def model_class(folder: Path):
    """The class that wrote a plain checkpoint."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    name, kind = config["architectures"][0], config["model_type"]
    found = getattr(transformers, name, None)
    if found is None:
        for family in (kind, kind.removesuffix("_text"), folder.name):
            path = f"transformers.models.{family}.modeling_{family}"
            if importlib.util.find_spec(f"transformers.models.{family}"):
                found = getattr(importlib.import_module(path), name)
                break
    if found is None:
        raise ImportError(f"transformers {transformers.__version__} has no {name}")
    return found


def load_plain(folder: Path, **more):
    import torch

    return model_class(folder).from_pretrained(folder, dtype=torch.bfloat16, **more).eval()


def tokenizer_of(folder: Path):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def calibration(count: int = 16, tokens: int = 24):
    """Random sequences of token ids (count, tokens)."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, COLUMNS - 8, (count, tokens), generator=generator)


# --- the tools --------------------------------------------------------------------------------


def llmcompressor(plain: Path, scheme: str, out: Path) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = load_plain(plain)
    recipe = QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])
    more = {}
    if scheme in ("FP8", "NVFP4", "W4AFP8"):
        import datasets

        ids = calibration().tolist()
        ones = [[1] * len(row) for row in ids]
        more["dataset"] = datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": ones})
        more |= {"num_calibration_samples": len(ids), "max_seq_length": len(ids[0])}
        more |= {"pipeline": "basic", "tokenizer": tokenizer_of(plain)}
    oneshot(model=model, recipe=recipe, **more)
    model.save_pretrained(out, save_compressed=True)


def autoround(plain: Path, scheme: str, out: Path) -> None:
    import torch
    from auto_round import AutoRound

    name, _, form = scheme.partition("@")
    more = {"group_size": 32} if name.startswith("W") else {}
    if name.startswith("NV"):  # whose scales of activations are calibrated
        rows = [{"input_ids": r, "attention_mask": r * 0 + 1} for r in calibration()]
        more["dataset"] = torch.utils.data.DataLoader(rows, batch_size=1)
    model = load_plain(plain)
    rounder = AutoRound(
        model,
        tokenizer_of(plain),
        scheme=name,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        nsamples=4,
        seqlen=16,
        **more,
    )
    rounder.quantize_and_save(str(out), format=form or "auto_round")
    for inner in [found.parent for found in out.glob("*/config.json")]:  # a folder of its own
        shutil.copytree(inner, out, dirs_exist_ok=True)
        shutil.rmtree(inner)


def gptqmodel(plain: Path, scheme: str, out: Path) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    bits, size = (int(n) for n in re.fullmatch(r"w(\d)g(\d+)", scheme).groups())
    config = QuantizeConfig(bits=bits, group_size=size)
    model = GPTQModel.load(str(plain), config, device="cpu")
    rows = calibration(32, 64)
    model.quantize([{"input_ids": r[None], "attention_mask": r[None] * 0 + 1} for r in rows])
    model.save(str(out))


def modelopt(plain: Path, scheme: str, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    model = load_plain(plain)

    def loop(model):
        with torch.no_grad():
            for row in calibration():
                model(input_ids=row[None])

    mtq.quantize(model, getattr(mtq, scheme), loop)
    export_hf_checkpoint(model, export_dir=str(out))


def torchao(plain: Path, scheme: str, out: Path) -> None:
    from torchao import quantization
    from transformers import TorchAoConfig

    found = getattr(quantization, scheme)
    config = found(version=2) if scheme.startswith("Int8") else found()
    load_plain(plain, quantization_config=TorchAoConfig(config)).save_pretrained(out)


def transformers(plain: Path, scheme: str, out: Path) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # the formulas run on a CPU; its products do not
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *a, **k: None
    assert scheme == "FP8"
    load_plain(plain, quantization_config=FineGrainedFP8Config()).save_pretrained(out)


def mlx(plain: Path, scheme: str, out: Path) -> None:
    import mlx_lm

    # fields that mlx-lm asks for and transformers 5 no longer writes
    copy = out.with_name(out.name + ".plain")
    shutil.copytree(plain, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    experts = "num_experts", "num_local_experts"
    for new, old in (experts, experts[::-1]):
        if config.get(old) is not None:
            config.setdefault(new, config[old])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("rope_theta", rope.get("rope_theta", 1e4))
    (copy / "config.json").write_text(json.dumps(config))
    affine = re.fullmatch(r"affine(\d)g(\d+)", scheme)
    mode, bits, size = ("affine", *affine.groups()) if affine else (scheme, 4, 32)
    mlx_lm.convert(
        str(copy),
        str(out),
        quantize=True,
        q_bits=int(bits),
        q_group_size=int(size),
        q_mode=mode,
    )
    shutil.rmtree(copy)


TOOLS = {
    one.__name__: one
    for one in (llmcompressor, autoround, gptqmodel, modelopt, torchao, transformers, mlx)
}
IMPORTS = {
    "llmcompressor": ("llmcompressor", "transformers", "datasets"),
    "autoround": ("auto_round", "transformers"),
    "gptqmodel": (),  # starts threads
    "modelopt": ("modelopt.torch.quantization", "modelopt.torch.export"),
    "torchao": ("torchao.quantization", "transformers"),
    "transformers": ("transformers",),
    "mlx": (),
}


def in_own_process(function, timeout: int, log: Path) -> str:
    """Fork, and say why the function failed; "" if it did not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = 0
        try:
            function()
        except BaseException as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode()[:4000])
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(write)
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return f"TimeoutError: not done after {timeout} s"
        time.sleep(0.05)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return text or ("" if status == 0 else f"exit status {status}")


def main() -> None:
    tool, timeout, plain, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    os.environ.update(VARIABLES)
    for module in IMPORTS[tool]:
        importlib.import_module(module)
    out.mkdir(parents=True, exist_ok=True)
    plain, out = plain.resolve(), out.resolve()
    os.chdir(out)  # where tools leave their logs
    for cell in sys.argv[5:]:
        family, _, scheme = cell.partition(":")
        folder = out / f"{family}-{scheme}"
        error = folder.with_name(folder.name + ".error")
        shutil.rmtree(folder, ignore_errors=True)
        error.unlink(missing_ok=True)
        start = time.monotonic()
        why = in_own_process(
            lambda s=scheme, f=family, to=folder: TOOLS[tool](plain / f, s, to),
            timeout,
            folder.with_name(folder.name + ".log"),
        )
        if not why and not list(folder.glob("*.safetensors")):
            why = "FileNotFoundError: it wrote no safetensors"
        if why:
            shutil.rmtree(folder, ignore_errors=True)
            error.write_text(why)
        print(f"{cell} {time.monotonic() - start:.0f} s {why[:150]!r}", flush=True)


if __name__ == "__main__":
    main()
