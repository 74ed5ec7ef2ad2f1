"""GGUF files, written and read without code of moe_ops, from the definitions of ggml's formats.

`decode` says what a block stands for element by element, in the order and precision of ggml's own
dequantization: fp32, one rounding for each operation.
"""

import math
import struct

import numpy as np

TYPES = {  # number, elements and bytes of a block
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_S": (22, 256, 82),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
}
# byte offsets of the fp16 numbers of a block, which random bytes would make NaN
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
F32 = np.float32


def half(block, at):
    return F32(np.frombuffer(block[at : at + 2], "<f2")[0])


def nibble(block, at, i):
    """Code i of 32 in 16 bytes: the low halves of all, then the high ones."""
    return block[at + i % 16] >> (4 * (i // 16)) & 15


def six_bits(block, group):
    """Scale and minimum of a group of Q4_K and Q5_K."""
    s = block[4:16]
    if group < 4:
        return s[group] & 63, s[group + 4] & 63
    high = group - 4
    return s[group + 4] & 15 | s[high] >> 6 << 4, s[group + 4] >> 4 | s[group] >> 6 << 4


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return 0.0
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


def decode(name, block):
    """The fp32 values of one block of bytes."""
    b, values = block, []
    elements = TYPES[name][1]
    for i in range(elements):
        if name == "Q4_0":
            v = half(b, 0) * F32(nibble(b, 2, i) - 8)
        elif name == "Q4_1":
            v = half(b, 0) * F32(nibble(b, 4, i)) + half(b, 2)
        elif name in ("Q5_0", "Q5_1"):
            start = 2 if name == "Q5_0" else 4
            fifth = int.from_bytes(b[start : start + 4], "little") >> i & 1
            code = nibble(b, start + 4, i) | fifth << 4
            if name == "Q5_0":
                v = half(b, 0) * F32(code - 16)
            else:
                v = half(b, 0) * F32(code) + half(b, 2)
        elif name == "Q8_0":
            v = half(b, 0) * F32(np.int8(np.uint8(b[2 + i])))
        elif name == "Q2_K":
            which, quarter, place = i // 128, i % 128 // 32, i % 32
            code, s = b[16 + 32 * which + place] >> (2 * quarter) & 3, b[i // 16]
            v = (half(b, 80) * F32(s & 15)) * F32(code) - half(b, 82) * F32(s >> 4)
        elif name == "Q3_K":
            which, quarter, place, group = i // 128, i % 128 // 32, i % 32, i // 16
            code = b[32 + 32 * which + place] >> (2 * quarter) & 3
            code += (b[i % 32] >> (i // 32) & 1) * 4 - 4
            scale = b[96 + group % 8] >> (4 * (group // 8)) & 15
            scale += (b[104 + group % 4] >> (2 * (group // 4)) & 3) * 16 - 32
            v = (half(b, 108) * F32(scale)) * F32(code)
        elif name in ("Q4_K", "Q5_K"):
            group, chunk, place = i // 32, i // 64, i % 32
            codes = b[16:] if name == "Q4_K" else b[48:]
            code = codes[32 * chunk + place] >> (4 * (group % 2)) & 15
            if name == "Q5_K":
                code |= (b[16 + place] >> group & 1) << 4
            scale, minimum = six_bits(b, group)
            v = (half(b, 0) * F32(scale)) * F32(code) - half(b, 2) * F32(minimum)
        elif name == "Q6_K":
            which, quarter, place = i // 128, i % 128 // 32, i % 32
            low = b[64 * which + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
            high = b[128 + 32 * which + place] >> (2 * quarter) & 3
            scale = np.int8(np.uint8(b[192 + i // 16]))
            v = (half(b, 208) * F32(scale)) * F32((low | high << 4) - 32)
        elif name == "IQ4_NL":
            v = half(b, 0) * F32(IQ4[nibble(b, 2, i)])
        elif name == "IQ4_XS":
            group = i // 32
            low = b[4 + group // 2] >> (4 * (group % 2)) & 15
            high = int.from_bytes(b[2:4], "little") >> (2 * group) & 3
            code = nibble(b, 8 + 16 * group, i % 32)
            v = (half(b, 0) * F32((low | high << 4) - 32)) * F32(IQ4[code])
        elif name == "MXFP4":
            v = F32(math.ldexp(1, b[0] - 127)) * F32(E2M1[nibble(b, 1, i)])
        elif name == "NVFP4":
            group, place = i // 16, i % 16
            code = b[4 + 8 * group + place % 8] >> (4 * (place // 8)) & 15
            v = F32(e4m3(b[group] & 127)) * F32(E2M1[code])
        else:
            raise ValueError(name)
        values.append(v)
    return values


def values(name, data, shape):
    """The fp32 array of a tensor's bytes."""
    if name == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    if name in ("F32", "F16"):
        dtype = {"F32": "<f4", "F16": "<f2"}[name]
        return np.frombuffer(data, dtype).astype(np.float32).reshape(shape)
    size = TYPES[name][2]
    found = [decode(name, data[i : i + size]) for i in range(0, len(data), size)]
    return np.array(found, np.float32).reshape(shape)


def blocks(name, shape, rng, spread=0.01):
    """Random bytes of a tensor: all codes and scales, fp16 numbers of either sign."""
    _, elements, size = TYPES[name]
    count = math.prod(shape) // elements
    data = rng.integers(0, 256, (count, size), np.uint8)
    for at in HALVES[name]:
        numbers = (rng.standard_normal(count) * spread).astype("<f2")
        data[:, at : at + 2] = numbers.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        data[:, 0] = rng.integers(110, 130, count)
    return data.tobytes()


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def field(value):
    """A field's type and value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):  # of one kind
        kind = field(value[0] if value else "")[:4]
        items = b"".join(field(v)[4:] for v in value)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + items
    return struct.pack("<I", 8) + string(value)


def write(path, fields, tensors, *, version=3, magic=b"GGUF", align=32):
    """A file of these fields and tensors: name -> (type, shape in torch's order, bytes). A type is
    a name or a number.
    """
    head, offset, data = b"", 0, b""
    for name, (kind, shape, content) in tensors.items():
        number = TYPES[kind][0] if isinstance(kind, str) else kind
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += string(name) + dims + struct.pack("<IQ", number, offset)
        content += bytes(-len(content) % align)
        data += content
        offset += len(content)
    said = b"".join(string(key) + field(value) for key, value in fields.items())
    head = magic + struct.pack("<IQQ", version, len(tensors), len(fields)) + said + head
    path.write_bytes(head + bytes(-len(head) % align) + data)
    return path


def read(content):
    """What a file says, by a reader that checks nothing: (fields, tensors as `write` takes them,
    byte offset of each tensor's description).
    """
    at = 4

    def take(kinds):
        nonlocal at
        found = struct.unpack_from(f"<{kinds}", content, at)
        at += struct.calcsize(f"<{kinds}")
        return found

    def text():
        nonlocal at
        (length,) = take("Q")
        if length > len(content):
            raise ValueError("too long")
        at += length
        return content[at - length : at].decode(errors="replace")

    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
    kinds[12] = "d"

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            of, count = take("IQ")
            if count > len(content):
                raise ValueError("too many")
            return [value(of) for _ in range(count)]
        return take(kinds[kind])[0]

    _, count, number = take("IQQ")
    fields = {}
    for _ in range(number):
        key = text()
        fields[key] = value(*take("I"))
    described, places = [], {}
    for _ in range(count):
        start = at
        name = text()
        shape = take(f"{take('I')[0]}Q")[::-1]
        described.append((name, shape, *take("IQ")))
        places[name] = start
    align = fields.get("general.alignment", 32)
    begin = -(-at // align) * align
    names = {number: (name, elements, size) for name, (number, elements, size) in TYPES.items()}
    tensors = {}
    for name, shape, number, offset in described:
        kind, elements, size = names[number]
        length = math.prod(shape) // elements * size
        tensors[name] = (kind, shape, content[begin + offset : begin + offset + length])
    return fields, tensors, places
