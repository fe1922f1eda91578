"""Bytes of an image or video file from a path, a URI, a web address or memory, within limits."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from saccade.errors import InputError
from saccade.files import expanded
from saccade.inputs.media.bounds import LOCAL, MediaLimits
from saccade.inputs.media.fetch import fetch

_WEB = ("http", "https")


def read_source(source: Any, what: str, limits: MediaLimits = LOCAL) -> tuple[str, bytes]:
    """Read a path, a ``file://``, ``data:`` or http(s) address, or bytes."""
    most = limits.image_bytes if what == "image" else limits.video_bytes
    if isinstance(source, (bytes, bytearray, memoryview)):
        name, data = f"The {what} given as bytes", bytes(source)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        name, data = f"The {what} in the data: URI", _data_uri(source, what, most)
    elif isinstance(source, str) and _scheme(source) in _WEB and limits.domains:
        name, data = f"The {what} at the address", fetch(source, what, limits, most)
    elif isinstance(source, (str, os.PathLike)):
        path = _local_path(os.fspath(source), what, limits)
        name, data = f"The {what} file {path}", _read(path, what, most)
    else:
        raise InputError(
            f"An {what} of type {type(source).__name__} is not usable; give a path, bytes, a data: URI, "
            f"a PIL image or a NumPy array."
            if what == "image"
            else f"A {what} of type {type(source).__name__} is not usable; give a path, bytes, a data: URI, "
            f"a list of frames or a NumPy array [T, H, W, C]."
        )
    if not data:
        raise InputError(f"{name} is empty; give one with content.")
    if len(data) > most:
        raise too_large(name, most)
    return name, data


def too_large(name: str, most: int) -> InputError:
    """The error for more bytes than the limit."""
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
                raise too_large(f"The {what} file {path}", most)
            return file.read(most + 1)
    except InputError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        why = "may not be read" if isinstance(error, PermissionError) else "does not exist"
        raise InputError(f"The {what} file {str(path)[:200]} {why}; give the path of a readable file.") from None


def _check_regular(status: os.stat_result, path: Path, what: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"The path {path} is a directory; give that of one {what} file.")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"The path {path} is a pipe, socket or device; give that of one {what} file.")


def _data_uri(uri: str, what: str, most: int) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError(f"The {what} data: URI has no comma; expected data:{what}/<type>;base64,<data>.")
    encoded = header.lower().endswith(";base64")
    if len(body) > 3 * most + 4096:  # the longest form: every byte written as %XX
        raise too_large(f"The {what} in the data: URI", most)
    if not encoded:
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"The {what} data: URI is not valid base64; encode the file's bytes anew.") from None
