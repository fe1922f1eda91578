"""RGB images from paths, bytes, URIs, PIL images and arrays, and digests of tensors."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
import torch
from PIL import Image, ImageOps

from saccade.errors import InputError

MAX_PIXELS = 178_956_970
"""Larger images are refused before they are decoded (Pillow's own limit for decompression bombs)."""


def load_image(source: Any) -> Image.Image:
    """Load an upright RGB image.

    Transparent images are laid over white, as the Hugging Face image processors do.

    Args:
        source: a path, a ``file://`` or ``data:`` URI, the bytes of an image file, a PIL image, or an array
            ``[H, W]``, ``[H, W, 1]``, ``[H, W, 3]`` or ``[H, W, 4]`` of uint8 or of floats from 0 to 1.

    Returns:
        A decoded image in mode RGB with its EXIF orientation applied.

    Raises:
        InputError: the source is missing, empty, corrupt, too large or of another kind.
    """
    if isinstance(source, Image.Image):
        return _rgb(source, f"The PIL image of size {source.size}")
    if isinstance(source, np.ndarray):
        return Image.fromarray(_rgb_array(source))
    name, data = read_source(source, "image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError:
        raise InputError(f"{name} has more than {MAX_PIXELS} pixels; scale it down first.") from None
    except (OSError, ValueError, SyntaxError):
        raise InputError(
            f"{name} is not an image that Pillow can read; give a PNG, JPEG or WebP file."
        ) from None
    return _rgb(image, name)


def read_source(source: Any, what: str) -> tuple[str, bytes]:
    """Read a path, a ``file://`` or ``data:`` URI, or bytes.

    Args:
        source: place or content of the file.
        what: "image" or "video", for messages.

    Returns:
        A name for messages, and the content.

    Raises:
        InputError: there is no such file, it is empty, or the source is a web address or of another kind.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        name, data = f"The {what} given as bytes", bytes(source)
    elif isinstance(source, str) and source.startswith("data:"):
        name, data = f"The {what} in the data: URI", _data_uri(source, what)
    elif isinstance(source, (str, os.PathLike)):
        path = _local_path(os.fspath(source), what)
        name, data = f"The {what} file {path}", _read(path, what)
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
    return name, data


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors by name, dtype, shape and bytes (BLAKE2b, 32 hex digits).

    ``batch_num_images`` counts as one or several: LLaVA-OneVision tiles an image only when it is alone, how many
    others there are makes no difference, and a conversation that gains an image keeps its earlier ones.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        if name == "batch_num_images":
            tensor = tensor.clamp(max=2)
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _local_path(source: str | bytes, what: str) -> Path:
    text = os.fsdecode(source)
    scheme = text.split("://", 1)[0].lower() if "://" in text else ""
    if scheme == "file":
        return Path(unquote(urlsplit(text).path))
    if scheme:
        raise InputError(
            f"The {what} address {text[:200]} is on the network; download it first and give the file's path."
        )
    if not text:
        raise InputError(f"The {what} path is empty; give the path of a file.")
    return Path(text).expanduser()


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise InputError(f"The path {path} is a directory; give that of one {what} file.") from None
    except (OSError, ValueError) as error:
        missing = not isinstance(error, PermissionError)
        why = "does not exist" if missing else "may not be read"
        raise InputError(
            f"The {what} file {str(path)[:200]} {why}; give the path of a readable file."
        ) from None


def _data_uri(uri: str, what: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma:
        raise InputError(f"The {what} data: URI has no comma; expected data:{what}/<type>;base64,<data>.")
    if not header.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"The {what} data: URI is not valid base64; encode the file's bytes anew.") from None


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.width * image.height > MAX_PIXELS:
        raise InputError(f"{name} has more than {MAX_PIXELS} pixels; scale it down first.")
    if not image.width or not image.height:
        raise InputError(f"{name} has no pixels; give one of at least 1x1.")
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16") or image.mode == "I":  # 16-bit grey, which convert() would clip
            wide = np.asarray(image).astype(np.int64)
            image = Image.fromarray((np.clip(wide, 0, 65535) >> 8).astype(np.uint8))
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError):
        raise InputError(f"{name} is damaged; give a complete image file.") from None


def _rgb_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``[H, W]`` or ``[H, W, 1 | 3 | 4]``, uint8 or floats from 0 to 1 -> ``[H, W, 3]`` uint8."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InputError(
            f"An image array of shape {array.shape} is not usable; expected [H, W], [H, W, 1], [H, W, 3] or "
            "[H, W, 4], channels last."
        )
    array = to_uint8(array, "image")
    if array.shape[2] == 4:
        return np.asarray(_rgb(Image.fromarray(array), "The image array"))
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def to_uint8(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """Pixels as uint8 from uint8, bool or floats between 0 and 1.

    Raises:
        InputError: another type, or floats outside 0..1.
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        if not bool(np.all((array >= 0) & (array <= 1))):
            raise InputError(
                f"The {what} array has floats outside 0..1; scale them or give uint8 from 0 to 255."
            )
        return np.round(array * 255).astype(np.uint8)
    raise InputError(f"The {what} array is of type {array.dtype}; give uint8, or floats from 0 to 1.")
