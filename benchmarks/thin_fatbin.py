"""Keep the machine code of one GPU architecture in a shared object, so that it compresses well.

    python benchmarks/thin_fatbin.py _C_stable_libtorch.abi3.so thin.so [--architecture 90]
    python benchmarks/thin_fatbin.py _moe_C_stable_libtorch.abi3.so thin.so --assembled FOLDER

For libraries of peers that are carried to another machine: of vLLM 0.26's 79 MB, 9 are left behind
`xz -9e`. Every fat binary keeps its place. One that has code for the architecture keeps nothing
else; of another one the smallest entry stays, so that a driver finds no code for this GPU in it,
as before. Zeros take the place of what is removed. Format: fatbinary of the CUDA toolkit, a header
(magic, version, header bytes, bytes behind it) and entries (kind, header bytes, bytes,
architecture).

Where there is only PTX for the architecture, a driver compiles it when the library is loaded,
which takes minutes for vLLM's Marlin. FOLDER holds it compiled: 1.fatbin, 2.fatbin and so on, for
the PTX files that `cuobjdump -xptx all` numbers so; a missing one leaves its fat binary without
code.

    ptxas -arch=sm_90 -O3 FILE.1.sm_80.ptx -o 1.cubin
    fatbinary --create=1.fatbin -64 --compress-all --image3=kind=elf,sm=90,file=1.cubin
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2  # kinds of entries
ELF_SECTION = "<IIQQQQ"  # name, type, flags, address, offset, size


class Entry(NamedTuple):
    kind: int
    architecture: int
    content: bytes  # with its header


class FatBinary(NamedTuple):
    start: int  # of its header
    body: int  # of its entries
    end: int
    entries: list[Entry]


def sections(data: bytes, wanted: str) -> Iterator[tuple[int, int]]:
    """(start, end) of the sections of a 64-bit ELF file that have a name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    found = [struct.unpack_from(ELF_SECTION, data, table + i * size) for i in range(count)]
    strings = found[names][4]
    for name, _, _, _, offset, length in found:
        start = strings + name
        if data[start : data.index(0, start)].decode() == wanted:
            yield offset, offset + length


def fat_binaries(data: bytes) -> Iterator[FatBinary]:
    for at, end in sections(data, ".nv_fatbin"):
        yield from _in_range(data, at, end)


def _in_range(data: bytes, at: int, end: int) -> Iterator[FatBinary]:
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic == 0:  # padding
            at += 8
            continue
        if magic != MAGIC:
            raise SystemExit(f"no fat binary at byte {at}: {magic:#x}")
        entries, inside = [], at + header
        while inside < at + header + size:
            kind, _, head, body = struct.unpack_from("<HHIQ", data, inside)
            (architecture,) = struct.unpack_from("<I", data, inside + 28)
            content = bytes(data[inside : inside + head + body])
            entries.append(Entry(kind, architecture, content))
            inside += head + body
        yield FatBinary(at, at + header, inside, entries)
        at = inside


def thinned(
    data: bytes, architecture: int, assembled: Path | None = None
) -> tuple[bytearray, int]:
    """(the object with the code of one architecture alone, the bytes of code that are left)."""
    out, left = bytearray(data), 0
    binaries = list(fat_binaries(data))
    others = [
        entry
        for binary in binaries
        for entry in binary.entries
        if entry.kind == CUBIN and entry.architecture != architecture
    ]
    smallest = min(others, key=lambda entry: len(entry.content), default=None)
    ptx_files = 0
    for binary in binaries:
        entries = binary.entries
        ptx_files += any(entry.kind == PTX for entry in entries)
        kept = [e for e in entries if e.kind == CUBIN and e.architecture == architecture]
        if not kept and assembled and any(entry.kind == PTX for entry in entries):
            kept = _assembled(assembled / f"{ptx_files}.fatbin", binary.end - binary.body)
        if not kept:
            fallback = entries if smallest is None else [*entries, smallest]
            kept = [min(fallback, key=lambda entry: len(entry.content))]
        body = b"".join(entry.content for entry in kept)
        out[binary.body : binary.end] = body.ljust(binary.end - binary.body, b"\0")
        struct.pack_into("<Q", out, binary.start + 8, len(body))
        left += len(body)
    return out, left


def _assembled(path: Path, room: int) -> list[Entry]:
    """The entries of a file of fatbinary, none where there is no file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    entries = [entry for binary in _in_range(data, 0, len(data)) for entry in binary.entries]
    size = sum(len(entry.content) for entry in entries)
    if size > room:
        raise SystemExit(f"{path} has {size:,} bytes of code, and there is room for {room:,}")
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--assembled", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    data = given.source.read_bytes()
    out, left = thinned(data, given.architecture, given.assembled)
    given.target.write_bytes(out)
    print(
        f"{left:,} of {sum(b.end - b.body for b in fat_binaries(data)):,} bytes of code are left"
    )


if __name__ == "__main__":
    main()
