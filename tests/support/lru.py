"""What a bank of slots holds, call by call, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator


class Slots:
    """An LRU of `size` slots for `experts` experts."""

    def __init__(self, experts: int, size: int) -> None:
        self.experts = experts
        self.content: list[int | None] = [None] * size  # expert of each slot
        self.order = list(range(size))  # slots, the least recently used one first
        self.hits = self.misses = 0

    def passes(self, ids: list[int], count: int) -> Iterator[dict[int, int]]:
        """{expert: slot} of those that each of `count` passes serves."""
        wanted = sorted({e for e in ids if 0 <= e < self.experts})
        for _ in range(count):
            served = {e: self.content.index(e) for e in wanted if e in self.content}
            self.hits += len(served)
            unused = [slot for slot in self.order if slot not in served.values()]
            missing = [e for e in wanted if e not in served]
            for e, slot in zip(missing, unused, strict=False):
                self.content[slot] = e
                served[e] = slot
                self.misses += 1
            used = [slot for slot in self.order if slot in served.values()]
            self.order = [slot for slot in self.order if slot not in used] + used
            wanted = [e for e in wanted if e not in served]
            yield served
        assert not wanted
