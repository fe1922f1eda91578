"""Bytes of a medium from a path, a URI or memory, and RGB images of these, of PIL images and arrays, within limits.

Files are walked before Pillow opens them, against those that are small but take long: Pillow reads markers, chunks and
strips one by one in Python, and a progressive JPEG costs a pass over all its pixels per scan (20 MB of scans of 98
bytes take hours).
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image

from saccade.errors import InputError
from saccade.files import expanded
from saccade.inputs.media.sources import fetch
from saccade.options import LOCAL, MediaLimits

_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # tags of TIFF
_JPEG_PIXELS = 512  # most pixels of a JPEG by a byte of the file: 64 by every bit
_OTHER_BITS = bytes.fromhex("5a3c91b7e4260f68") * 8
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientations, and what makes the picture upright."""


def load_image(source: Any, limits: MediaLimits = LOCAL) -> Image.Image:
    """Load an upright RGB image; transparent ones are laid over white, as the Hugging Face image processors do."""
    if isinstance(source, Image.Image):
        return _rgb(source, f"The PIL image of size {source.size}", limits)
    if isinstance(source, np.ndarray):
        return _rgb(Image.fromarray(_pixels(source)), "The image array", limits)
    name, data = read_source(source, "image", limits)
    if size := webp_size(data):
        _check_size(size, name, limits)
    if is_laborious(data):
        raise InputError(f"{name} has far more parts than a picture needs; save it again.")
    # Pillow warns of images that it deems large, where a larger limit says otherwise.
    is_quiet = limits.image_pixels > (Image.MAX_IMAGE_PIXELS or 0)
    try:
        with warnings.catch_warnings() if is_quiet else nullcontext():
            if is_quiet:
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=limits.formats)
    except Image.DecompressionBombError:
        raise _too_many(name, limits) from None
    except Exception:  # decoders of damaged files raise anything
        raise InputError(
            f"{name} is damaged, or not an image in an accepted format; give one of {', '.join(limits.formats)}."
        ) from None
    return _rgb(image, name, limits, data)


def read_source(source: Any, what: str, limits: MediaLimits = LOCAL) -> tuple[str, bytes]:
    """Read a path, a ``file://``, ``data:`` or http(s) address, or bytes."""
    most = limits.image_bytes if what == "image" else limits.video_bytes
    if isinstance(source, (bytes, bytearray, memoryview)):
        name = f"The {what} given as bytes"
        data = bytes(source)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        name = f"The {what} in the data: URI"
        data = _data_uri(source, what, most)
    elif isinstance(source, str) and _scheme(source) in ("http", "https") and limits.domains:
        name = f"The {what} at the address"
        data = fetch(source, what, limits, most)
    elif isinstance(source, (str, os.PathLike)):
        path = _local_path(os.fspath(source), what, limits)
        name = f"The {what} file {path}"
        data = _read(path, what, most)
    else:
        rest = "a PIL image or a NumPy array" if what == "image" else "a list of frames or a NumPy array [T, H, W, C]"
        raise InputError(
            f"The {what} of type {type(source).__name__} is not usable; give a path, bytes, a data: URI, {rest}."
        )
    if not data:
        raise InputError(f"{name} is empty; give one with content.")
    if len(data) > most:
        raise _too_large(name, most)
    return name, data


def _too_large(name: str, most: int) -> InputError:
    return InputError(f"{name} has more than {most:,} bytes; give a smaller file.")


def _scheme(text: str) -> str:
    return text.split("://", 1)[0].strip().lower() if "://" in text else ""


def _local_path(source: str | bytes, what: str, limits: MediaLimits) -> Path:
    text = os.fsdecode(source)
    scheme = _scheme(text)
    if not limits.paths:
        kind = "an address, and none is fetched" if scheme else "a path, and no files are read"
        raise InputError(f"The {what} is given as {kind} here; send its content as a data: URI.")
    if scheme == "file":
        return Path(unquote(urlsplit(text).path))
    if scheme:
        raise InputError(
            f"The {what} address {text[:200]} is on the network; download it first and give the file's path."
        )
    if not text:
        raise InputError(f"The {what} path is empty; give the path of a file.")
    return expanded(text)


def _read(path: Path, what: str, most: int) -> bytes:
    """Read a regular file; its kind is checked before it is opened, because opening a device can already act."""
    try:
        _check_regular(os.stat(path), path, what)
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(status, path, what)
            if status.st_size > most:
                raise _too_large(f"The {what} file {path}", most)
            return file.read(most + 1)
    except InputError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        why = "may not be read" if isinstance(error, PermissionError) else "does not exist"
        raise InputError(f"The {what} file {str(path)[:200]} {why}; give the path of a readable file.") from None


def _check_regular(status: os.stat_result, path: Path, what: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "directory" if stat.S_ISDIR(status.st_mode) else "pipe, socket or device"
        raise InputError(f"The path {path} is a {kind}; give that of one {what} file.")


def _data_uri(uri: str, what: str, most: int) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError(f"The {what} data: URI has no comma; expected data:{what}/<type>;base64,<data>.")
    if len(body) > 3 * most + 4096:  # the longest form: every byte written as %XX
        raise _too_large(f"The {what} in the data: URI", most)
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"The {what} data: URI is not valid base64; encode the file's bytes again.") from None


def to_uint8(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """Pixels as uint8 from uint8, bool or floats between 0 and 1."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not bool(np.all((array >= 0) & (array <= 1))):
            raise InputError(f"The {what} array has floats outside 0..1; scale them or give uint8 from 0 to 255.")
        return np.round(array * 255).astype(np.uint8)
    raise InputError(f"The {what} array is of type {array.dtype}; give uint8, or floats from 0 to 1.")


def _too_many(name: str, limits: MediaLimits) -> InputError:
    return InputError(f"{name} has more than {limits.image_pixels} pixels; scale it down first.")


def _check_size(size: tuple[int, int], name: str, limits: MediaLimits) -> None:
    width, height = size
    short, long = sorted(size)
    if not short:
        raise InputError(f"{name} has no pixels; give one of at least 1x1.")
    if width * height > limits.image_pixels:
        raise _too_many(name, limits)
    if long > min(limits.longest_side, limits.aspect_ratio * short):
        raise InputError(
            f"{name} is {width} pixels wide and {height} high; give sides of at most {limits.longest_side} pixels, one "
            f"at most {limits.aspect_ratio:g} times as long as the other."
        )


def _rgb(image: Image.Image, name: str, limits: MediaLimits, data: bytes = b"") -> Image.Image:
    _check_size(image.size, name, limits)
    tags = getattr(image, "tag_v2", {})
    if int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_HEIGHT, 0)) > limits.image_pixels:
        raise _too_many(name, limits)  # its decoder allocates a whole tile for any picture
    is_jpeg = data.startswith(b"\xff\xd8")
    try:
        if is_jpeg and image.width * image.height > _JPEG_PIXELS * len(data):
            raise ValueError
        image.load()
        if (image.format == "PNG" and _is_cut_png(data, image)) or (is_jpeg and _is_cut_jpeg(data, image)):
            raise ValueError
        image = _upright(image)
        if image.mode.startswith(("I", "F")):  # wide grey, which convert() would clip
            image = _grey(image, name)
        if image.mode.endswith(("A", "a")) or image.info.get("transparency") is not None:
            # of premultiplied grey, Pillow converts to no other mode
            image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return image if data and image.mode == "RGB" else image.convert("RGB")  # without a copy of its pixels
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{name} needs more memory than there is; scale it down first.") from None
    except Exception:  # decoders of damaged files raise anything
        raise InputError(f"{name} is damaged; give a complete image file.") from None


def _grey(image: Image.Image, name: str) -> Image.Image:
    """Grey of 16 or 32 bits as 8 bits: values are of 0..255, or else of 0..65535; floats also of 0..1."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= 65535:  # NaN, too
        raise InputError(
            f"{name} has grey values from {low:g} to {high:g}; scale them to 0..255 or 0..65535, or floats to 0..1."
        )
    if image.mode == "F" and high <= 1:
        values = np.round(values * 255)
    elif high > 255:
        values = values // 256
    values = values.astype(np.uint8)
    clear = image.info.get("transparency")
    return Image.fromarray(values if clear is None else np.where(np.asarray(image) == clear, 255, values))


def _is_cut_jpeg(data: bytes, image: Image.Image) -> bool:
    """Whether the compressed pixels of a JPEG end before its last block, which is then grey."""
    last = np.asarray(image.crop((image.width - 1, image.height - 1, *image.size)), np.int16)
    if (abs(last - 128) > 1).any():
        return False
    end = next((marker.start() for marker in _jpeg_markers(data) if marker[1] == b"\xd9"), len(data))
    other = Image.open(io.BytesIO(data[:end] + _OTHER_BITS + data[end:]), formats=("JPEG",))
    return other.tobytes() != image.tobytes()


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; Pillow's own function also rewrites all other tags, and fails at odd ones."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # of damaged tags, anything; the pixels are whole
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _pixels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``[H, W]`` or ``[H, W, 1 | 3 | 4]``, uint8 or floats from 0 to 1 -> ``[H, W, 3 | 4]`` uint8."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InputError(
            f"An image array of shape {array.shape} is not usable; expected [H, W], [H, W, 1], [H, W, 3] or "
            "[H, W, 4], channels last."
        )
    array = to_uint8(array, "image")
    return array if array.shape[2] == 4 else np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


PIECES = 1 << 16  # markers, chunks or strips of a file; larger files may have one per 256 bytes
SCANS = 64  # scans of a JPEG; encoders write about ten
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
_STRIPS = (273, 279, 324, 325)  # TIFF tags with one value per strip or tile
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and steps between columns and rows, of the passes of an interlaced PNG."""


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file's canvas, which its decoder allocates at once; None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    body = data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF


def is_laborious(data: bytes) -> bool:
    """Whether a JPEG, PNG or TIFF has more scans, markers, chunks or strips than a picture needs."""
    most = max(PIECES, len(data) // 256)
    if data.startswith(b"\xff\xd8"):
        scans = 0
        for number, marker in enumerate(_jpeg_markers(data)):
            scans += marker[1] == b"\xda"
            if scans > SCANS or number == most:
                return True
    if data.startswith(b"\x89PNG"):
        return next(islice(_png_chunks(data), most - 1, None), None) is not None
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+") and _is_laborious_tiff(data, most)


def _jpeg_markers(data: bytes) -> Iterator[re.Match[bytes]]:
    """The markers of a JPEG up to its end."""
    place = 2
    while (marker := _MARKER.search(data, place)) is not None:
        yield marker
        if marker[1] == b"\xd9":
            return
        alone = marker[1] in (b"\x01", b"\xd8")
        place = marker.end() + (0 if alone else int.from_bytes(data[marker.end() : marker.end() + 2], "big"))


def _png_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Place and content length of every chunk of a PNG."""
    place = 8
    while place + 12 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        yield place, size
        place += 12 + size


def _is_cut_png(data: bytes, image: Image.Image) -> bool:
    """Whether the compressed pixels of a PNG end before its last row, which Pillow then leaves at zero."""
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data.ljust(29, b"\0"), 16)
    last_row = np.asarray(image.crop((0, image.height - 1, *image.size)))
    if not data or (last_row.any() and not interlace):
        return False
    missing = 0
    for x, y, dx, dy in _ADAM7 if interlace else ((0, 0, 1, 1),):
        columns = len(range(x, width, dx))
        rows = len(range(y, height, dy))
        missing += rows * (1 + (columns * depth * _CHANNELS[colour] + 7) // 8) if columns else 0
    decoder = zlib.decompressobj()
    for place, size in _png_chunks(data):
        piece = data[place + 8 : place + 8 + size] if data[place + 4 : place + 8] == b"IDAT" else b""
        while piece and missing > 0:
            missing -= len(decoder.decompress(piece, 1 << 16))
            piece = decoder.unconsumed_tail
    return missing > 0


def _is_laborious_tiff(data: bytes, most: int) -> bool:
    order = "<" if data[:1] == b"I" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    entry = struct.Struct(order + ("HHQQ" if is_big else "HHII"))
    try:
        (start,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
        (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), data, start)
        entries = memoryview(data)[start + (8 if is_big else 2) :]
        size = min(count, len(entries) // entry.size) * entry.size
        tags = islice(entry.iter_unpack(entries[:size]), most)
        return count > most or any(tag in _STRIPS and values > most for tag, _, values, _ in tags)
    except struct.error:
        return False  # damaged; Pillow says so
