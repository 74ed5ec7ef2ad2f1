"""Whether a quantized checkpoint loads with the values that its tool's formulas give.

    python -m tools.compare PLAIN OUT TIMEOUT CELL...      through moe_ops
    python compare.py --alone PLAIN OUT TIMEOUT CELL...    by transformers and the tool's library

A cell is FAMILY:SCHEME or FAMILY:SCHEME=EXPECTED, where EXPECTED names the scheme of moe_ops in
whose way activations must be rounded. Results are OUT/FAMILY-SCHEME.json and
OUT/FAMILY-SCHEME.alone.json.

Each quantized matrix becomes plain numbers, whose rows find their places in the plain model by
what they are near to: neither names nor orders of rows are trusted.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tools import formulas, writers

IDS = torch.tensor([[3, 17, 101, 42, 7, 122, 99, 12, 64, 33, 73, 5, 77, 20, 9, 52]])
NEAR = 0.9  # cosine of a quantized row and its own; rows of others are below 0.7
WEIGHTS, LOGITS = 1e-6, 2e-5


def by_tokens(got: Tensor, want: Tensor) -> Tensor:
    """Relative errors of the tokens' logits."""
    got, want = (t.double().reshape(-1, t.shape[-1]) for t in (got, want))
    return (got - want).norm(dim=1) / want.norm(dim=1)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def is_of_experts(name: str) -> bool:
    return ".experts." in f".{name}"


class Places:
    """Finds the rows of a plain model that quantized rows stand for."""

    def __init__(self, model: nn.Module):
        self.values = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        self.taken = {n: torch.zeros(v.shape, dtype=torch.bool) for n, v in self.values.items()}
        self.rows: dict[int, list[tuple[Tensor, str, bool, Tensor]]] = {}
        for name, value in self.values.items():
            if value.dim() not in (2, 3) or name.endswith("bias") or not value.numel():
                continue
            for turned in (False, True) if value.dim() == 3 else (False,):
                lying = value.transpose(-2, -1) if turned else value
                rows = lying.reshape(-1, lying.shape[-1])
                unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
                place = torch.arange(len(rows))
                self.rows.setdefault(rows.shape[1], []).append((unit, name, turned, place))

    def of_experts(self) -> set[str]:
        """The parameters of experts of which a file's tensors took a place."""
        return {n for n, t in self.taken.items() if is_of_experts(n) and bool(t.any())}

    def put(self, name: str, value: Tensor) -> str | None:
        """Place a tensor's rows; what does not fit, if something does not."""
        last = None
        for turned in (False, True) if value.dim() == 3 else (False,):
            lying = value.transpose(-2, -1) if turned else value
            rows = lying.reshape(-1, lying.shape[-1])
            last = self._put(name, rows)
            if last is None:
                return None
        return last

    def _put(self, name: str, rows: Tensor) -> str | None:
        if not rows.numel():
            return f"{name}: it is empty"
        candidates = self.rows.get(rows.shape[1])
        if not candidates:
            return f"{name}: the plain model has no rows of {rows.shape[1]}"
        unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
        best = torch.stack([(unit @ c[0].T).max(1).values for c in candidates])
        where = [(unit @ c[0].T).argmax(1) for c in candidates]
        if float(best.amax(0).min()) < NEAR:
            return f"{name}: a row is like none of the plain model's"
        which = best.argmax(0)
        for i, (_, target, turned, _place) in enumerate(candidates):
            chosen = which == i
            if not chosen.any():
                continue
            value, taken = self.values[target], self.taken[target]
            for t, new in ((value, rows[chosen]), (taken, torch.ones_like(rows[chosen]).bool())):
                lying = t.transpose(-2, -1).contiguous() if turned else t
                flat = lying.reshape(-1, lying.shape[-1])
                flat[where[i][chosen]] = new
                flat = flat.view(lying.shape)
                t.copy_(flat.transpose(-2, -1) if turned else flat)
        return None


class RoundedInput(TorchFunctionMode):
    """Rounds what is multiplied by weights of experts, as a scheme says."""

    def __init__(
        self, model: nn.Module, weights: set[str], scheme: str, scales: dict[bool, Tensor]
    ):
        from tests.support import oracle

        self.round, self.scheme, self.scales = oracle.quantized_activation, scheme, scales
        self.ranges = []
        for name, p in model.named_parameters():
            if name in weights and p.dim() == 3:
                start = p.data_ptr()
                end = start + p.numel() * p.element_size()
                self.ranges.append((start, end, "down" in name or "output" in name))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        products = (nn.functional.linear, torch.matmul, torch.bmm, torch.mm, Tensor.matmul)
        if func in (*products, Tensor.__matmul__, Tensor.bmm) and len(args) >= 2:
            x, weight = args[0], args[1]
            at = weight.data_ptr() if isinstance(weight, Tensor) else 0
            down = [d for start, end, d in self.ranges if start <= at < end]
            if down:
                rows = x.reshape(-1, x.shape[-1]).double()
                rounded = self.round(rows, self.scheme, self.scales.get(down[0]))
                args = (rounded.to(x.dtype).view(x.shape), *args[1:])
        return func(*args, **(kwargs or {}))


def activation_scales(folder: Path) -> dict[bool, Tensor]:
    """The largest static scale of a layer's inputs, and that of down_proj's."""
    found: dict[bool, list[Tensor]] = {}
    for name, t in formulas.read(folder)[0].items():
        if "experts" not in name or "shared_experts" in name:
            continue
        if name.endswith("input_scale"):
            scale = t.float()
        elif name.endswith("input_global_scale"):
            scale = 1 / t.float()
        else:
            continue
        down = "down_proj" in name or ".w2." in name
        found.setdefault(down, []).append(scale.amax().reshape(()))
    return {down: torch.stack(scales).amax() for down, scales in found.items()}


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=IDS, use_cache=False)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def expected(plain: Path, folder: Path, scheme: str) -> tuple[nn.Module, Places, Tensor, Tensor]:
    """The plain model with a file's values, what became of its parameters, and its logits with
    activations rounded as a scheme says and without.
    """
    model = (
        writers.model_class(plain)
        .from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )
    places = Places(model)
    found, quantized = formulas.values(folder)
    placed = {name: places.put(name, found[name]) for name in quantized}
    problems = [why for why in placed.values() if why]
    rounded = places.of_experts()  # a matrix that the file keeps plain has its input as it is
    for name, value in found.items():
        plain_matrix = value.dim() == 2 and min(value.shape) >= 32
        if name not in quantized and plain_matrix and value.is_floating_point():
            places.put(name, value)
    if problems:
        raise LookupError("; ".join(problems[:3]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(places.values[name])
    plain_logits = output(model)
    if not rounded:
        return model, places, plain_logits, plain_logits
    with RoundedInput(model, rounded, scheme, activation_scales(folder)):
        return model, places, output(model), plain_logits


def loaded(plain: Path, folder: Path, **more: Any) -> nn.Module:
    return writers.model_class(plain).from_pretrained(folder, dtype=torch.float32, **more).eval()


def check(plain: Path, folder: Path, wanted: str, keep: Path | None = None) -> dict[str, Any]:
    """What moe_ops makes of a folder; ``keep``: where the expected logits are written."""
    from moe_ops.integrations.transformers import MoeOpsConfig

    broken = None
    try:
        _, places, want, unrounded = expected(plain, folder, wanted)
    except LookupError as error:
        broken = error
    try:
        model = loaded(plain, folder, quantization_config=MoeOpsConfig())
    except (ValueError, ImportError) as error:
        text = str(error).replace(f"{folder}/", "")
        return {"status": "refused", "why": f"{type(error).__name__}: {text}"}
    if broken is not None:  # the tool wrote no such weight, and it loaded all the same
        raise broken
    if keep is not None:
        save_file({"logits": want.contiguous()}, keep)
    schemes, worst = set(), (0.0, "")
    for name, p in model.named_parameters():
        if hasattr(p, "scheme"):
            schemes.add(p.scheme)
            p = p.dequantize(torch.float32)
        p = p.detach()
        target = places.values[name][: len(p)]  # nothing keeps those of identity experts
        error = relative(p, target) if target.norm() else float(p.double().norm())
        if not error < worst[0]:
            worst = (error, name)
    got = output(model)
    errors, rounding = by_tokens(got, want), relative(want, unrounded)
    result = {"schemes": sorted(schemes), "weights": worst[0], "logits": relative(got, want)}
    if not worst[0] < WEIGHTS:
        return result | {"status": "wrong", "why": f"{worst[1]} is off by {worst[0]:.2g}"}
    # a quotient next to a tie may be rounded either way, which moves few tokens
    few = float(errors.median()) < LOGITS and result["logits"] < rounding / 2
    if not (float(errors.max()) < LOGITS or few):
        return result | {"status": "wrong", "why": f"logits are off by {result['logits']:.2g}"}
    return result | {"status": "right"}


def check_alone(plain: Path, folder: Path, kept: Path) -> dict[str, Any]:
    """What transformers makes of it, with the tool's library beside it."""
    if not kept.exists():
        return {"status": "unknown"}
    want = load_file(kept)["logits"]
    try:
        load = writers.model_class(plain).from_pretrained
        model, said = load(folder, dtype=torch.float32, output_loading_info=True)
        got = output(model.eval())
    except Exception as error:
        return {"status": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    random = sorted(n for n in map(str, said["missing_keys"]) if is_of_experts(n))
    # attention's activations are rounded too, by libraries that quantize them
    right = not random and relative(got, want) < 0.25
    return {
        "status": "right" if right else "wrong",
        "logits": relative(got, want),
        "random": random[:2],
    }


def main() -> None:
    alone = "--alone" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--alone"]
    plain, out, timeout = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import transformers  # noqa: F401

    if not alone:
        import moe_ops.integrations.transformers  # noqa: F401
        from tests.support import oracle  # noqa: F401
    for cell in arguments[3:]:
        name, _, wanted = cell.partition("=")
        family, _, scheme = name.partition(":")
        folder = out / f"{family}-{scheme}"
        result = folder.with_name(folder.name + (".alone.json" if alone else ".json"))
        result.unlink(missing_ok=True)
        if not folder.exists():
            continue

        def run(folder=folder, family=family, wanted=wanted, result=result):
            arguments, kept = (plain / family, folder), Path(f"{folder}.expected.safetensors")
            done = check_alone(*arguments, kept) if alone else check(*arguments, wanted, kept)
            result.write_text(json.dumps(done))

        log = folder.with_name(folder.name + ".check.log")
        why = writers.in_own_process(run, timeout, log)
        if why:
            result.write_text(json.dumps({"status": "failed", "why": why}))
        said = json.loads(result.read_text())
        print(cell, said["status"], re.sub(r"\s+", " ", said.get("why", ""))[:230], flush=True)


if __name__ == "__main__":
    main()
