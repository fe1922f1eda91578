"""Cheap walks over image files before Pillow opens them, against files that are small but take long.

Pillow reads markers, chunks and strips one by one in Python, and a progressive JPEG costs a pass over all its pixels
per scan: 20 MB of scans of 98 bytes take hours.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

PIECES = 1 << 16
"""Markers, chunks or strips of a file; larger files may have one per 256 bytes."""

SCANS = 64
"""Scans of a JPEG; encoders write about ten."""

_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
_STRIPS = (273, 279, 324, 325)
"""TIFF tags with one value per strip or tile."""


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file's canvas, which its decoder allocates at once; None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, body = data[12:16], data[20:30].ljust(10, b"\0")
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
        return _jpeg(data, most)
    if data.startswith(b"\x89PNG"):
        return _png(data, most)
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _tiff(data, most)
    return False


def _jpeg(data: bytes, most: int) -> bool:
    scans = 0
    for number, marker in enumerate(_jpeg_markers(data)):
        scans += marker[1] == b"\xda"
        if scans > SCANS or number == most:
            return True
    return False


def _jpeg_markers(data: bytes) -> Iterator[re.Match[bytes]]:
    """The markers of a JPEG up to its end."""
    place = 2
    while (found := _MARKER.search(data, place)) is not None:
        yield found
        if found[1] == b"\xd9":
            return
        alone = found[1] in (b"\x01", b"\xd8")
        place = found.end() + (0 if alone else int.from_bytes(data[found.end() : found.end() + 2], "big"))


def jpeg_end(data: bytes) -> int:
    """Place of the marker that ends a JPEG; its length without one."""
    return next((marker.start() for marker in _jpeg_markers(data) if marker[1] == b"\xd9"), len(data))


def _png(data: bytes, most: int) -> bool:
    place = 8
    for _ in range(most):
        if place + 12 > len(data):
            return False
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return True


_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and steps between columns and rows, of the passes of an interlaced PNG."""


def is_cut_png(data: bytes, last_row: Any) -> bool:
    """Whether the compressed pixels of a PNG end before its last row, which Pillow then leaves at zero."""
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data.ljust(29, b"\0"), 16)
    if not data or (last_row.any() and not interlace):
        return False
    missing = 0
    for x, y, dx, dy in _ADAM7 if interlace else ((0, 0, 1, 1),):
        columns, rows = len(range(x, width, dx)), len(range(y, height, dy))
        missing += rows * (1 + (columns * depth * _CHANNELS[colour] + 7) // 8) if columns else 0
    decoder = zlib.decompressobj()
    for piece in _png_pixels(data):
        while piece and missing > 0:
            missing -= len(decoder.decompress(piece, 1 << 16))
            piece = decoder.unconsumed_tail
    return missing > 0


def _png_pixels(data: bytes) -> Iterator[bytes]:
    """The compressed pixels of a PNG, chunk by chunk."""
    place = 8
    while place + 12 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if data[place + 4 : place + 8] == b"IDAT":
            yield data[place + 8 : place + 8 + size]
        place += 12 + size


def _tiff(data: bytes, most: int) -> bool:
    order, is_big = "<" if data[:1] == b"I" else ">", data[2:4] in (b"+\0", b"\0+")
    entry = struct.Struct(order + ("HHQQ" if is_big else "HHII"))
    try:
        (start,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, 8 if is_big else 4)
        (count,) = struct.unpack_from(order + ("Q" if is_big else "H"), data, start)
        entries = memoryview(data)[start + (8 if is_big else 2) :]
        size = min(count, len(entries) // entry.size) * entry.size
        found = islice(entry.iter_unpack(entries[:size]), most)
        return count > most or any(tag in _STRIPS and values > most for tag, _, values, _ in found)
    except struct.error:
        return False  # damaged; Pillow says so
