"""Valid files, spoiled: bytes, JSON, sealed files and images, each at the places where its format can be wrong."""

import io
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from PIL import Image
from torch import Tensor

from metaaugment.files import sealed

# Substitutes for any JSON value; as text, because not all of them exist as Python values.
ODD = (
    "null", "true", "false", "0", "-1", "1", "2", "3", "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e999", "NaN",
    "Infinity",
    "-Infinity", *(str(n) for n in (255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**70)),
    "9" * 400, "9" * 5000, '""', '" "', '"\\u0000"', '"\\ud800"', '"é"', '"nan"', '"1"', f'"{"a" * 20_000}"',
    '"../../../../etc/hostname"', '"/dev/zero"', '"/dev/null"', '"."', '"cuda"', "[]", "{}", "[[]]", "[null]", "[0]",
    '{"": null}',
    '{"a": 1, "a": 2}', "[1, [2, [3]]]", "[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000, "[" * 900 + "]" * 900, f"[{'0,' * 3000}0]", '{"@tensor": "/p"}',
    '{"@tensor": 1}', '{"@tensor": []}',
    '"metaaugment"', '"digits"', '"policy-network"', '"__class__"', '"os.system"',
)  # fmt: skip


class Raw(str):
    """JSON text that is part of a tree as it is."""


def text(tree: Any) -> str:
    """JSON of a tree that may hold raw texts."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {text(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(text, tree)) + "]"
    return json.dumps(tree)


# -- bytes ------------------------------------------------------------------------------------------------------------


@st.composite
def spoiled_bytes(draw: DrawFn, content: bytes) -> bytes:
    """Bytes changed, inserted, left out, doubled or cut off at up to four places, most often in headers."""
    for _ in range(draw(st.integers(1, 4))):
        reach = draw(st.sampled_from((16, 128, 1024, len(content))))
        start = draw(st.integers(0, min(reach, len(content))))
        span = draw(st.sampled_from((1, 2, 4, 8, 64, 1000)))
        new = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(WORDS)))
        match draw(st.sampled_from(("change", "change", "insert", "leave out", "double", "cut off", "append"))):
            case "change":
                content = content[:start] + new + content[start + len(new) :]
            case "insert":
                content = content[:start] + new + content[start:]
            case "leave out":
                content = content[:start] + content[start + span :]
            case "double":
                content = content[: start + span] + content[start : start + span] + content[start + span :]
            case "cut off":
                content = content[:start] if draw(st.booleans()) else content[: len(content) - start]
            case "append":
                content += new * span
    return content


# Numbers at the limits of their types, as bytes in a file.
WORDS = tuple(
    struct.pack(order + kind, value)
    for order in "<>"
    for kind, values in (
        ("H", (0, 1, 0x7FFF, 0xFFFF)),
        ("I", (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1)),
        ("Q", (0, 2**63, 2**64 - 1)),
    )
    for value in values
)


# -- JSON -------------------------------------------------------------------------------------------------------------


@st.composite
def spoiled_json(draw: DrawFn, tree: Any) -> str:
    """JSON with other values or keys at up to three places, and now and then with spoiled bytes in its text."""
    for _ in range(draw(st.integers(1, 3))):
        tree = _edited(draw, tree)
    found = text(tree)
    if draw(st.integers(0, 15)) == 0:
        return draw(spoiled_bytes(found.encode())).decode("latin-1")
    return found


def _edited(draw: DrawFn, tree: Any) -> Any:
    if isinstance(tree, dict | list) and tree and draw(st.integers(0, 5)):
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key, copy = draw(st.sampled_from(keys)), tree.copy()
        match draw(st.integers(0, 11)):
            case 0:
                del copy[key]
            case 1 if isinstance(tree, dict):
                copy[f"{key}x"] = copy.pop(key)
            case 2 if isinstance(tree, dict):
                members = [f"{json.dumps(k)}: {text(v)}" for k, v in tree.items()]
                members.append(f"{json.dumps(key)}: {draw(st.sampled_from(ODD))}")  # the key twice
                return Raw("{" + ", ".join(members) + "}")
            case 3 if isinstance(tree, dict):
                copy["more"] = copy[key]
            case 4:
                copy[key] = tree[draw(st.sampled_from(keys))]
            case _:
                copy[key] = _edited(draw, tree[key])
        return copy
    if draw(st.integers(0, 3)):
        return Raw(draw(st.sampled_from(ODD)))
    return _near(draw, tree)


def _near(draw: DrawFn, value: Any) -> Any:
    """A value like this one, as by a slip of the hand."""
    if isinstance(value, Raw):
        return Raw(f"[{value}]")
    if isinstance(value, bool) or value is None:
        return int(bool(value))
    if isinstance(value, int):
        near = value + 1, value - 1, -value, value * 1000, float(value), str(value), value + 0.5
        return draw(st.sampled_from(near))
    if isinstance(value, float):
        return draw(st.sampled_from((-value, value * 1e9, value * 1e-9, round(value), str(value), 1 - value, [value])))
    if isinstance(value, str):
        return draw(st.sampled_from((value[:-1], value + "x", value.upper(), value * 2, [value], f"{value}\0", 0)))
    if isinstance(value, list):
        return draw(st.sampled_from((value[::-1], value * 2, value[:-1], [value], {"0": value})))
    return draw(st.sampled_from(([value], list(value), list(value.values()), str(value)[:50])))


# -- sealed files -----------------------------------------------------------------------------------------------------

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint64,
)  # fmt: skip
FILLS = (float("nan"), float("inf"), -1.0, 0.0, 1e38, 255.0, -1e9)


@st.composite
def spoiled_sealed(draw: DrawFn, content: bytes) -> bytes:
    """A sealed file spoiled as it is, or inside and then sealed again, to reach what lies behind the seal."""
    way = draw(st.sampled_from(("bytes", "header", "state", "state", "state", "tensors", "tensors", "both")))
    if way == "bytes":
        return draw(spoiled_bytes(content))
    if way == "header":
        return resealed(draw(spoiled_header(content)))
    state, tensors = opened(content)
    if way != "state":
        tensors = draw(spoiled_tensors(tensors))
    return seal(draw(spoiled_json(state)) if way != "tensors" else json.dumps(state), tensors)


@st.composite
def spoiled_header(draw: DrawFn, content: bytes) -> bytes:
    """The header of a safetensors file with other types, shapes, offsets and lengths."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    header = draw(spoiled_json(json.loads(header))).encode("utf-8", "replace")
    header += b" " * (-len(header) % 8)
    if draw(st.integers(0, 3)) == 0:
        header = draw(spoiled_bytes(header))
    n = len(header)
    size = draw(st.sampled_from((n,) * 9 + (0, 1, n - 8, n + 8, 10**8, 2**31, 2**63, 2**64 - 1)))
    return (size % 2**64).to_bytes(8, "little") + header + data


@st.composite
def spoiled_tensors(draw: DrawFn, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = dict(tensors)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(tensors)))
        tensors |= {name: _spoiled_tensor(draw, tensors[name], tensors)}
        match draw(st.integers(0, 9)):
            case 0 if len(tensors) > 1:
                del tensors[name]
            case 1:
                tensors[draw(st.sampled_from((f"{name}x", "", "/", "/a/b/c")))] = tensors.pop(name)
    return tensors


def _spoiled_tensor(draw: DrawFn, tensor: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    match draw(st.integers(0, 6)):
        case 0:
            return tensor.to(draw(st.sampled_from(DTYPES)))
        case 1:
            return others[draw(st.sampled_from(sorted(others)))].clone()
        case 2:
            shape = draw(st.sampled_from(((), (0,), (1,), (0, 2**40), (2, 3), (1, 1, 1, 1, 1), (0, 14, 14), (14, 14))))
            return torch.zeros(shape, dtype=tensor.dtype)
        case 3:
            turned = tensor.mT if tensor.ndim > 1 else tensor
            return draw(st.sampled_from((tensor.reshape(-1), tensor[None], turned))).contiguous()
        case 4 if tensor.ndim:
            return torch.cat([tensor, tensor]) if draw(st.booleans()) else tensor[:-1].clone()
        case 5 if tensor.numel():
            flat = tensor.clone().reshape(-1)
            flat[draw(st.integers(0, flat.numel() - 1))] = _fill(draw, tensor)
            return flat.reshape(tensor.shape)
    return torch.full_like(tensor, _fill(draw, tensor))


def _fill(draw: DrawFn, tensor: Tensor) -> Any:
    if tensor.is_floating_point():
        limit = torch.finfo(tensor.dtype).max
        fill = draw(st.sampled_from(FILLS))
        kept = math.isnan(fill) or (math.isinf(fill) and tensor.element_size() > 1)  # eight bits have no infinity
        return fill if kept else max(-limit, min(fill, limit))
    if tensor.dtype in (torch.bool, torch.complex64):
        return draw(st.booleans())
    limits = torch.iinfo(tensor.dtype)
    most = limits.max if tensor.dtype != torch.uint64 else 2**31
    return draw(st.sampled_from((limits.min, max(limits.min, -1), 0, 1, 100, most)))


def opened(content: bytes) -> tuple[Any, dict[str, Tensor]]:
    """What a sealed file holds: its state, and its tensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["state"]), safetensors.torch.load(content)


def seal(state: str, tensors: Mapping[str, Tensor]) -> bytes:
    """A file that is intact as far as its seal goes."""
    return safetensors.torch.save(dict(tensors), {"state": state, "sha256": sealed._digest(tensors, state)})


def resealed(content: bytes) -> bytes:
    """The file with the right SHA-256, if it still is a safetensors file."""
    try:
        tensors = safetensors.torch.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        return content.replace(metadata["sha256"].encode(), sealed._digest(tensors, metadata["state"]).encode())
    except Exception:  # it no longer is one, in whatever way
        return content


# -- images -----------------------------------------------------------------------------------------------------------

SIDES = (0, 1, 2, 255, 8192, 9459, 13_377, 32_767, 65_535, 2**31 - 1, 2**31, 2**32 - 1)


def images() -> dict[str, bytes]:
    """Small images in many formats and modes, by names that say which."""
    found = {}
    for kind, mode, options in (
        *(("PNG", mode, {}) for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16")),
        ("PNG", "P", {"transparency": 3}), ("PNG", "L", {"transparency": 7}),
        ("PNG", "RGB", {"transparency": (1, 2, 3)}),
        ("PNG", "RGB", {"exif": _turned(6)}), ("PNG", "RGB", {"icc_profile": b"no profile" * 20}),
        *(("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")), ("JPEG", "RGB", {"progressive": True}),
        *(("JPEG", "RGB", {"exif": _turned(turn)}) for turn in (3, 5, 8, 99)),
        *(("GIF", mode, {}) for mode in ("1", "L", "P", "RGBA")),
        ("WEBP", "RGB", {}), ("WEBP", "RGBA", {}), ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {"exif": _turned(2)}),
        *(("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I")),
        ("TIFF", "F", {}),
        *(("TIFF", "RGB", {"compression": packed}) for packed in ("packbits", "tiff_lzw", "tiff_adobe_deflate")),
        ("TIFF", "RGB", {"compression": "jpeg"}),
        ("TIFF", "1", {"compression": "group4"}),
        *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("PPM", mode, {}) for mode in ("1", "L", "RGB", "I;16", "F")),
        ("ICO", "RGBA", {}), ("TGA", "RGB", {}), ("EPS", "RGB", {}), ("JPEG2000", "RGB", {}), ("PCX", "L", {}),
    ):  # fmt: skip
        stream = io.BytesIO()
        _picture(mode).save(stream, kind, **options)
        found[f"{kind} {mode} {' '.join(options)}".strip()] = stream.getvalue()
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        stream = io.BytesIO()
        _picture("RGB").save(stream, kind, save_all=True, append_images=[_picture("RGB").rotate(90), _picture("RGB")])
        found[f"{kind} of several frames"] = stream.getvalue()
    return found


def _picture(mode: str) -> Image.Image:
    picture = Image.linear_gradient("L").resize((23, 17))
    if mode in ("I;16", "I", "F"):
        return picture.convert("I").point(lambda value: value * 256).convert(mode)
    if mode == "LAB":
        return Image.merge("LAB", [picture] * 3)
    return picture.convert("RGB").convert(mode)


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@st.composite
def spoiled_image(draw: DrawFn, images: Mapping[str, bytes]) -> bytes:
    name = draw(st.sampled_from(sorted(images)))
    content = images[name]
    for _ in range(draw(st.integers(1, 2))):
        match draw(st.integers(0, 4)):
            case 0 | 1:
                content = draw(spoiled_bytes(content))
            case 2:
                content = sized(content, draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES)))
            case 3 if content.startswith(PNG):
                content = draw(spoiled_png(content))
            case 4:
                content += draw(st.sampled_from(sorted(images.values(), key=len)))  # one file after another
            case _:
                content = draw(spoiled_bytes(content))
    return content


PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def chunks(png: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG, as far as they can be told apart."""
    found, place = [], len(PNG)
    while place + 12 <= len(png):
        length = int.from_bytes(png[place : place + 4], "big")
        found.append((png[place + 4 : place + 8], png[place + 8 : place + 8 + length]))
        place += 12 + length
    return found


@st.composite
def spoiled_png(draw: DrawFn, png: bytes) -> bytes:
    """A PNG with chunks changed, left out, doubled or added, but with right checksums."""
    parts = chunks(png)
    if not parts:
        return draw(spoiled_bytes(png))
    place = draw(st.integers(0, len(parts) - 1))
    kind, content = parts[place]
    match draw(st.integers(0, 5)):
        case 0:
            parts.insert(draw(st.integers(0, len(parts))), (kind, content))
        case 1:
            del parts[place]
        case 2:
            more = (b"tRNS", b"eXIf", b"PLTE", b"gAMA", b"acTL", b"fcTL", b"fdAT", b"cHRM", b"pHYs")
            parts.insert(place, (draw(st.sampled_from(more)), draw(st.binary(max_size=40))))
        case 3:
            bomb = zlib.compress(b"\0" * 2**24, 9)
            kinds = (b"zTXt", b"a\0\0"), (b"iCCP", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0")
            kind, start = draw(st.sampled_from(kinds))
            parts.insert(place, (kind, start + bomb))
        case _:
            parts[place] = kind, draw(spoiled_bytes(content or b"\0"))
    return PNG + b"".join(chunk(*part) for part in parts)


def sized(content: bytes, width: int, height: int) -> bytes:
    """The same image, whose header claims another size."""
    if content.startswith(PNG) and content[12:16] == b"IHDR":
        return PNG + chunk(b"IHDR", struct.pack(">II", width, height) + content[24:29]) + content[33:]
    if content.startswith(b"GIF8"):
        small = struct.pack("<HH", width % 2**16, height % 2**16)
        frame = content.find(b",")
        content = content[:6] + small + content[10:]
        return content if frame < 0 else content[: frame + 5] + small + content[frame + 9 :]
    if content.startswith(b"BM"):
        return content[:18] + struct.pack("<II", width, height) + content[26:]
    if content.startswith(b"P") and content[2:3] == b"\n":
        kind, _, rest = (*content.split(b"\n", 2), b"", b"")[:3]
        return b"%s\n%d %d\n%s" % (kind, width, height, rest)
    if content[8:16] == b"WEBPVP8X":
        sides = b"".join((side % 2**24).to_bytes(3, "little") for side in (width, height))
        return content[:24] + sides + content[30:]
    for marker in (b"\xff\xc0", b"\xff\xc2"):  # JPEG's frame
        if content.startswith(b"\xff\xd8") and (place := content.find(marker)) >= 0:
            return content[: place + 5] + struct.pack(">HH", height % 2**16, width % 2**16) + content[place + 9 :]
    for tag, side in ((b"\x00\x01", width), (b"\x01\x01", height)):  # TIFF's ImageWidth and ImageLength, little-endian
        for kind in (b"\x03\x00", b"\x04\x00"):
            if content.startswith(b"II") and (place := content.find(tag + kind + b"\x01\0\0\0")) >= 0:
                content = content[: place + 2] + b"\x04\x00\x01\0\0\0" + struct.pack("<I", side) + content[place + 12 :]
    return content


def bombs() -> dict[str, bytes]:
    """Images of few bytes that really are huge, and take gigabytes if nobody checks their size first."""
    found = {}
    for kind, mode, side, options in (
        ("PNG", "1", 13_370, {}), ("PNG", "P", 13_370, {"bits": 1, "transparency": 0}), ("PNG", "LA", 8190, {}),
        ("PNG", "RGBA", 8190, {}),
        ("PNG", "I;16", 8190, {}), ("GIF", "P", 9000, {"transparency": 0}),
        ("TIFF", "1", 13_370, {"compression": "group4"}),
        ("TIFF", "RGBA", 8190, {"compression": "tiff_adobe_deflate"}),
        ("TIFF", "CMYK", 8190, {"compression": "tiff_lzw"}),
        ("JPEG", "RGB", 8190, {"quality": 1, "exif": _turned(6)}),
        ("WEBP", "RGBA", 9000, {"lossless": True, "method": 0}),
    ):  # fmt: skip
        stream = io.BytesIO()
        Image.new(mode, (side, side)).save(stream, kind, **options)
        found[f"{kind} {mode} {side}"] = stream.getvalue()
    return found
