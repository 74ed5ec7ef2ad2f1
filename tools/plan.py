"""python -m tools.plan: what a step of one layer would take on several GPUs.

    python -m tools.plan --shape 128 2048 768 8 --gpus 1 2 8
    python -m tools.plan --shape 256 7168 2048 8 --scheme fp8_block
        --gpus 8 --hosts 1 2 4 --tokens 64 512 4096 --zipf 0.6

Nothing runs on a GPU: the times come from the model of tools/costs.py, which lies within
12 % of what two H100s and two H200s took from 512 tokens a GPU on, for experts of Qwen3 and
DeepSeek-V3 in bf16 and fp8_block (one case of one H200 within 15 %), and 11 % of what four H200s
took in fp8_block from 4096 on. More GPUs and several hosts were not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from moe_ops.meta.symmetric import MANY_TOKENS
from moe_ops.parallel import wire
from moe_ops.parallel.placement import PLACEMENTS, AnyPlacement, Placement
from moe_ops.parallel.replicas import balanced
from moe_ops.schemes import get_scheme
from tools import costs

TOKENS = (1, 64, 512, 4096)
EXTRA_SLOTS = (1, 2, 4)  # of each GPU, for redundant experts
PAYS = 0.03  # part of a step that redundant experts must save: the model is no better than that
# the one for tokens that all GPUs have is no choice for others
SENDING = costs.DISPATCHERS[:3]


def parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").split("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=" ".join((text[0] + " " + text[2]).split()),
        epilog="examples:\n" + text[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    layer = made.add_argument_group("the layer")
    layer.add_argument(
        "--shape",
        type=int,
        nargs=4,
        required=True,
        metavar=("E", "K", "I", "TOP_K"),
        help="experts, hidden size, intermediate size, experts a token",
    )
    layer.add_argument("--scheme", default="", help='of the weights; "" is bf16, the default')
    routing = made.add_argument_group("routing")
    skew = routing.add_mutually_exclusive_group()
    skew.add_argument(
        "--histogram",
        type=Path,
        metavar="FILE",
        help="E numbers, how often each expert was chosen: those of MoELayer.expert_load, as JSON "
        "or separated by spaces",
    )
    skew.add_argument(
        "--zipf",
        type=float,
        default=0.0,
        metavar="S",
        help="the n-th most chosen expert has n ** -S of the first's tokens; 0, the default: all "
        "alike",
    )
    routing.add_argument("--placement", choices=PLACEMENTS, default=PLACEMENTS[0])
    where = made.add_argument_group("the deployment")
    where.add_argument("--tokens", type=int, nargs="+", default=[*TOKENS], help="of each GPU")
    where.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8], help="of each host")
    where.add_argument("--hosts", type=int, nargs="+", default=[1])
    where.add_argument("--gpu", choices=[*costs.GPUS], default=next(iter(costs.GPUS)))
    where.add_argument("--link-gb-s", type=float, help="a copy to another GPU of the host")
    where.add_argument("--network-gb-s", type=float, help="network of each GPU, line rate")
    where.add_argument(
        "--quantized-wire",
        action=argparse.BooleanOptionalAction,
        help="tokens travel to the experts as the scheme quantizes them, but with "
        "symmetric_memory; default: as layers do on GPUs, with every scheme that allows it",
    )
    return made


def read_histogram(path: Path) -> list[float]:
    """Numbers of a file.

    Raises:
        ValueError: no such file, or something in it that is no number.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
            return [float(value) for value in values]
        except (ValueError, TypeError) as error:
            raise ValueError(f"must be a JSON list of numbers: {error}") from None
    try:
        return [float(word) for word in re.split(r"[\s,]+", text.strip())]
    except ValueError as error:
        raise ValueError(f"must hold numbers: {error}") from None


@dataclasses.dataclass(frozen=True)
class Case:
    """One deployment, with what all of its steps share."""

    fleet: costs.Fleet
    layer: costs.Layer
    shares: Sequence[float]
    strategy: str
    quantized_wire: bool

    def placement(self, extra_slots: int = 0) -> AnyPlacement:
        """The strategy's, or with redundant experts that which balances the load."""
        E, R = self.layer.num_experts, self.fleet.size
        if not extra_slots:
            return Placement(E, R, self.strategy)
        parts = costs.chosen(self.shares, self.layer.top_k)
        return balanced(parts, R, -(-E // R) + extra_slots)

    def load(self, num_tokens: int, extra_slots: int = 0) -> tuple[costs.Load, float]:
        """That of the GPU with the longest to do, and its pairs over the mean."""
        R = self.fleet.size
        found = costs.loads(self.layer, self.shares, self.placement(extra_slots), R * num_tokens)
        gpu, rows = self.fleet.gpu, R * num_tokens
        most = max(found, key=lambda load: costs.expert_time(gpu, self.layer, load, rows).us)
        return most, most.pairs * R / sum(load.pairs for load in found)

    def step(self, dispatcher: str, num_tokens: int, extra_slots: int = 0) -> costs.Step:
        load, _ = self.load(num_tokens, extra_slots)
        return costs.step(
            self.fleet, self.layer, dispatcher, num_tokens, load, self.quantized_wire
        )


HEADER = (
    *("hosts", "GPUs", "tokens", "dispatcher", "us", "dispatch", "experts", "combine"),
    *("imbalance", "bound by", "MB", "from hosts", "gain"),
)


def rows_of(case: Case, num_tokens: int) -> list[tuple[str, ...]]:
    """A row for each dispatcher; "*" marks the fastest of those that send tokens.

    "gain" is how many times as many tokens a second all GPUs have as one that holds all experts
    and runs as many tokens as all of them together. "MB" reach one GPU in a step, there and back,
    "from hosts" of them from other hosts.
    """
    fleet = case.fleet
    one = dataclasses.replace(case, fleet=costs.Fleet(fleet.gpu, 1))
    alone = one.step("none", fleet.size * num_tokens)
    names = costs.dispatchers_of(fleet) if fleet.size > 1 else ("none",)
    steps = [case.step(name, num_tokens) for name in names]
    best = min((s for s in steps if s.dispatcher in SENDING), key=lambda s: s.us, default=None)
    imbalance = case.load(num_tokens)[1]
    return [
        (
            str(fleet.hosts),
            str(fleet.size),
            str(num_tokens),
            step.dispatcher + "*" * (step is best),
            f"{step.us:.0f}",
            f"{step.dispatch:.0f}",
            f"{step.experts.us:.0f}",
            f"{step.combine:.0f}",
            f"{imbalance:.2f}",
            step.bound,
            f"{step.num_bytes / 1e6:.1f}",
            f"{step.network_bytes / 1e6:.1f}",
            f"{alone.us / step.us:.2f}",
        )
        for step in steps
    ]


def redundant_row(case: Case, num_tokens: int) -> tuple[str, ...]:
    """us of a step with no, 1, 2 and 4 slots more on each GPU, by the fastest dispatcher, and
    whether they pay.
    """
    sending = [name for name in costs.dispatchers_of(case.fleet) if name in SENDING]
    times = {
        extra: min(case.step(name, num_tokens, extra).us for name in sending)
        for extra in (0, *EXTRA_SLOTS)
    }
    best = min(times, key=lambda extra: times[extra])
    least = next(extra for extra in times if times[extra] <= times[best] * (1 + PAYS))
    said = "no" if times[least] > times[0] * (1 - PAYS) else f"{least} a GPU"
    size = [str(case.fleet.hosts), str(case.fleet.size), str(num_tokens)]
    return (*size, *[f"{us:.0f}" for us in times.values()], said)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under the first, in columns: words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = [not any(char.isdigit() for char in cell) for cell in rows[-1]]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    )


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The deployments that were asked for.

    Raises:
        ValueError: of the layer, a number of GPUs or hosts, or the routing.
    """
    E, K, I, top_k = arguments.shape
    layer = costs.Layer(E, K, I, top_k, arguments.scheme)
    for name in ("tokens", "gpus", "hosts"):
        if min(getattr(arguments, name)) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if not 0 <= arguments.zipf < 10:
        raise ValueError(f"--zipf must be in 0..10, got {arguments.zipf}")
    scheme = layer.scheme
    reason = wire.why_not_scheme(scheme, bool(scheme) and _has_known_scale(scheme))
    if arguments.quantized_wire and reason:
        raise ValueError(
            f"--quantized-wire needs a scheme whose rows travel quantized, got {scheme!r}: "
            f"{reason}; fp8_block is one"
        )
    quantized = not reason if arguments.quantized_wire is None else arguments.quantized_wire
    shares = costs.zipf(layer.num_experts, arguments.zipf)
    if arguments.histogram is not None:
        try:
            shares = read_histogram(arguments.histogram)
        except ValueError as error:
            raise ValueError(f"--histogram {arguments.histogram} {error}") from None
        if len(shares) != layer.num_experts or min(shares) < 0 or not sum(shares) > 0:
            raise ValueError(
                f"--histogram must have {layer.num_experts} numbers, none negative and not all 0, "
                f"got {len(shares)} from {min(shares)} to {max(shares)}"
            )
    gpu = costs.GPUS[arguments.gpu]
    for name in ("link_gb_s", "network_gb_s"):
        if (rate := getattr(arguments, name)) is not None:
            if not rate > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {rate}")
            gpu = dataclasses.replace(gpu, **{name: rate})
    fleets = [costs.Fleet(gpu, n, hosts) for hosts in arguments.hosts for n in arguments.gpus]
    for fleet in fleets:
        if fleet.size > layer.num_experts:
            raise ValueError(
                f"--gpus and --hosts make {fleet.size} GPUs, more than {layer.num_experts} "
                "experts; some would hold none"
            )
    return [Case(fleet, layer, shares, arguments.placement, quantized) for fleet in fleets]


def _has_known_scale(scheme: str) -> bool:
    """Whether weights of a scheme always have a scale of activations."""
    activation = get_scheme(scheme).activation
    return activation is not None and activation.static


def report(chosen: Sequence[Case], tokens: Sequence[int]) -> str:
    """Both tables, and what the numbers rest on."""
    rows: list[tuple[str, ...]] = [HEADER]
    redundant: list[tuple[str, ...]] = [
        ("hosts", "GPUs", "tokens", "us", *[f"+{n}" for n in EXTRA_SLOTS], "pays")
    ]
    for case in chosen:
        for num_tokens in tokens:
            rows += rows_of(case, num_tokens)
            if case.fleet.size > 1:
                redundant.append(redundant_row(case, num_tokens))
    gpu, layer = chosen[0].fleet.gpu, chosen[0].layer
    how = "as they are"
    if chosen[0].quantized_wire:
        how = f"as {layer.scheme} quantizes them, but with symmetric_memory"
        if wire.quantizes_later(layer.scheme, layer.hidden_size):
            how += f" below {MANY_TOKENS} tokens"
    lines = [
        f"{gpu.name}: {gpu.memory_tb_s} TB/s of memory, {gpu.bf16_tflop_s} TFLOP/s in bf16, "
        f"{gpu.link_gb_s} GB/s to a GPU, {gpu.network_gb_s} GB/s to other hosts",
        f"tokens travel to the experts {how}",
        "",
        table(rows),
    ]
    if len(redundant) > 1:
        lines += ["", "with slots for redundant experts, on each GPU:", table(redundant)]
    if any(case.fleet.size > 2 for case in chosen):
        lines += ["", "Predictions for more than two GPUs were not compared with measurements."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser()
    given = made.parse_args(arguments)
    try:
        print(report(cases(given), given.tokens))
    except ValueError as error:
        made.error(str(error))


if __name__ == "__main__":
    main()
