"""Experts that sequences of tokens choose, and how often a bank of slots has them.

    python benchmarks/routing_traces.py [--experts 128] [--top-k 8] [--layers 8] [--steps 512]

prints hit rates by resident share and batch: of a bank for each layer, and of one bank for all
layers of the same memory. benchmarks/residency.py replays the same traces on a GPU.

No trace holds a model's own routing. "local" is drawn with the locality that was published for
Qwen3-30B-A3B: 45 % of a token's experts are those of the token before, 80 % those of the last
8 tokens, and an LRU of 40 % of the experts hits 90 to 95 %.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from harness import format_table

REPEATED, RECENT, RECENT_TOKENS = 0.45, 0.80, 8
# An expert that RECENT_TOKENS did not choose is drawn with probability rank**-RECENCY_EXPONENT,
# rank 1 for the one chosen last.
RECENCY_EXPONENT = 0.75
TRACES = ("local", "switches", "uniform")
SWITCH_STEPS = 32
UNTIMED_STEPS = 64  # before a trace begins, so that its first steps are as local as its last


@dataclass(frozen=True)
class Trace:
    """What draws a trace. Sequences of a batch, and layers, are independent of one another.

    Args:
        kind: "local"; "uniform", all experts equally likely; or "switches", local with another
            topic every `SWITCH_STEPS` steps, whose experts are those that were used least
            recently.
        repeated: share of a token's experts that the token before has too, for each layer; all
            layers have `REPEATED` without it. `RECENT` counts them too.
    """

    kind: str
    num_experts: int
    top_k: int
    layers: int
    batch: int
    seed: int = 0
    repeated: tuple[float, ...] = ()

    def draw(self, steps: int) -> np.ndarray:
        """Ids (steps, layers, batch, top_k) int32; the top_k of a token are distinct."""
        random = np.random.default_rng([self.seed, TRACES.index(self.kind)])
        ids = np.empty((steps, self.layers * self.batch, self.top_k), np.int32)
        if self.kind == "uniform":
            for step in range(steps):
                noise = random.random((ids.shape[1], self.num_experts))
                ids[step] = noise.argpartition(self.top_k - 1, 1)[:, : self.top_k]
        else:
            self._draw_local(random, ids)
        return ids.reshape(steps, self.layers, self.batch, self.top_k)

    def _draw_local(self, random: np.random.Generator, ids: np.ndarray) -> None:
        E, top_k, rows = self.num_experts, self.top_k, ids.shape[1]
        repeated = np.repeat(self.repeated or (REPEATED,) * self.layers, self.batch)
        recent = np.maximum(RECENT, repeated)
        # of each row its experts, the one used last in front, and the step of each one's last use
        order = random.permuted(np.tile(np.arange(E), (rows, 1)), axis=1)
        used = np.tile(-1 - np.arange(E) // top_k, (rows, 1))
        for step in range(-UNTIMED_STEPS, len(ids)):
            if self.kind == "switches" and step % SWITCH_STEPS == 0:
                order = order[:, ::-1]
                used = np.tile(step - 1 - np.arange(E) // top_k, (rows, 1))
            draw = random.random((rows, top_k))
            asked = (draw >= repeated[:, None]) * 1 + (draw >= recent[:, None])
            age = step - used
            kind = (age > 1) * 1 + (age > RECENT_TOKENS)  # 0 repeats, 1 is recent, 2 is neither
            rank = np.arange(1, E + 1) - (kind < 2).sum(1, keepdims=True)
            weight = np.where(kind == 2, np.maximum(rank, 1.0) ** -RECENCY_EXPONENT, 1.0)
            # the largest of log(weight) + Gumbel noise are a draw without replacement
            score = np.log(weight) - np.log(random.exponential(size=weight.shape))
            chosen = np.zeros((rows, E), bool)
            lacking = np.zeros(rows, int)  # what is lacking of one kind comes from the next
            for which in (0, 1, 2, 1, 0):
                count = lacking + (asked == which).sum(1)
                asked[asked == which] = -1
                free = (kind == which) & ~chosen
                chosen |= _best(np.where(free, score, -np.inf), np.minimum(count, free.sum(1)))
                lacking = np.maximum(count - free.sum(1), 0)
            which = (~chosen).argsort(1, kind="stable")  # the chosen ones in front
            order = np.take_along_axis(order, which, 1)
            used = np.take_along_axis(used, which, 1)
            used[:, :top_k] = step
            # those in front have no order among themselves
            order[:, :top_k] = random.permuted(order[:, :top_k], axis=1)
            if step >= 0:
                ids[step] = order[:, :top_k]


def _best(score: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Of each row, where its `count` largest scores are."""
    return (-score).argsort(1).argsort(1) < count[:, None]


class Lru:
    """Slots that hold what was used last. A call's own hits stay, unless it uses more than there
    are slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, keys: Iterable[Hashable]) -> tuple[int, int]:
        """Hits and misses of one call that uses distinct keys."""
        keys = list(keys)
        misses = [key for key in keys if key not in self.held]
        for key in keys:
            if key in self.held:
                self.held.move_to_end(key)
        for key in misses:
            if len(self.held) == self.slots:
                self.held.popitem(last=False)
            self.held[key] = None
        return len(keys) - len(misses), len(misses)


class Counts(NamedTuple):
    """Of the steps of a trace: experts that a layer's call finds in its bank, and that it
    lacks. Tokens of a call that choose the same expert count as one."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)


def simulate(ids: np.ndarray, slots: int, shared: bool = False, skip: int = 0) -> Counts:
    """Counts of an LRU on a trace (steps, layers, batch, top_k).

    Args:
        slots: slots of a layer.
        shared: one bank of `slots` times the layers, in place of one for each.
        skip: steps at the beginning that fill the banks and are not counted.
    """
    steps, layers = ids.shape[:2]
    banks = [Lru(slots * layers)] * layers if shared else [Lru(slots) for _ in range(layers)]
    hits = misses = 0
    for step in range(steps):
        for layer in range(layers):
            found = banks[layer].use((layer, e) for e in np.unique(ids[step, layer]).tolist())
            if step >= skip:
                hits, misses = hits + found[0], misses + found[1]
    return Counts(hits, misses)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.4, 0.6])
    given = parser.parse_args()
    spread = tuple(np.linspace(0.25, 0.65, given.layers).tolist())
    rows = []
    for kind, repeated in [*((kind, ()) for kind in TRACES), ("local", spread)]:
        for batch in given.batch:
            sizes = (given.experts, given.top_k, given.layers, batch)
            ids = Trace(kind, *sizes, repeated=repeated).draw(given.steps)
            for share in given.shares:
                slots = max(round(share * given.experts), given.top_k)
                each, one = (
                    simulate(ids, slots, shared, given.steps // 4) for shared in (False, True)
                )
                calls = given.layers * (given.steps - given.steps // 4)
                name = f"{kind}, layers differ" if repeated else kind
                rates = [f"{counts.hit_rate:.3f}" for counts in (each, one)]
                missing = [f"{counts.misses / calls:.2f}" for counts in (each, one)]
                rows.append((name, batch, share, slots, *rates, *missing))
    header = ("trace", "batch", "share", "slots", "hit rate", "one bank", "misses a call")
    print(format_table((*header, "one bank"), rows))


if __name__ == "__main__":
    main()
