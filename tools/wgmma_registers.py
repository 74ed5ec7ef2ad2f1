"""Find instructions that write registers which asynchronous products (`wgmma`) in flight use.

    python tools/wgmma_registers.py FILE ...   # what `nvdisasm -c` prints of a kernel

`ptxas` keeps registers of products apart from all else between instructions that follow one
another, but not across the end of a loop: a loop whose products stay in flight must wait for them
before it decodes into the variables that were their operands (kernels/mixed_gemm/sm90_mainloop.py,
STREAM). Where one did not, results were wrong on an H200, in some runs. This walks through the
first loop of products three times, as the hardware would, with the groups of products that no
DEPBAR has waited for. Standard library alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

TURNS = 3  # of the loop: enough for products of one turn that the next one waits for
READS_ALONE = ("ST", "BAR", "SYNCS", "BRA", "WARP", "U")  # without a destination among registers


class Group(NamedTuple):
    """Products that are waited for together: registers of operands, and of sums."""

    operands: set[int]
    sums: set[int]


def _registers(argument: str, count: int = 1) -> set[int]:
    found = re.match(r"[-|~]*R(\d+)", argument)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()


def product_loop(sass: str) -> list[str]:
    """The instructions of the first loop around products, without addresses and predicates; []
    if there is none.
    """
    lines = [re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.split("\n")]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    products = [i for i, line in enumerate(lines) if "GMMA" in line]
    for i, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L\w+)\)", line)
        start = labels.get(target[1], i) if target else i
        if products and i > products[0] > start:
            body = [re.sub(r"^@!?U?P\w+\s+", "", text) for text in lines[start : i + 1]]
            return [text for text in body if text and text[0] != "."]
    return []


def overwritten(sass: str) -> list[str]:
    """The instructions of the loop of products that write registers of products in flight, or read
    sums of theirs.
    """
    body = product_loop(sass)
    flight: list[Group] = []
    found, last_product = [], ""
    for instruction in body * TURNS:
        name, _, rest = instruction.rstrip(" ;").partition(" ")
        arguments = [argument.strip() for argument in rest.split(",")]
        if "GMMA" in name:
            if not flight or "gsb0" in last_product:
                flight.append(Group(set(), set()))
            rows = int(re.search(r"\.\d+x(\d+)x", name)[1])  # type: ignore[index]
            flight[-1].sums.update(_registers(arguments[0], rows // 2))
            flight[-1].operands.update(_registers(arguments[1], 4))
            last_product = instruction
        elif "DEPBAR" in name and "gsb0" in rest:
            left = int(arguments[-1], 0)
            flight = flight[len(flight) - left :] if left else []
        elif not name.startswith(READS_ALONE):
            count = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            read = [_registers(argument) for argument in arguments[1:]]
            written = _registers(arguments[0], count)
            for group in flight:
                early = written & (group.operands | group.sums)
                if early or any(group.sums & registers for registers in read):
                    found.append(instruction)
    return list(dict.fromkeys(found))


def main() -> None:
    for name in sys.argv[1:]:
        sass = Path(name).read_text()
        found = overwritten(sass)
        print(f"{name}: {len(product_loop(sass))} instructions, {len(found)} of them too early")
        for instruction in found[:5]:
            print(f"    {instruction}")


if __name__ == "__main__":
    main()
