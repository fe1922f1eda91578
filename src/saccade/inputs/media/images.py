"""RGB images from paths, bytes, URIs, PIL images and arrays, within limits."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import InputError
from saccade.inputs.media.bounds import LOCAL, MediaLimits
from saccade.inputs.media.decoder import is_fitting
from saccade.inputs.media.headers import is_cut_png, is_laborious, jpeg_end, webp_size
from saccade.inputs.media.sources import read_source


def load_image(source: Any, limits: MediaLimits = LOCAL) -> Image.Image:
    """Load an upright RGB image.

    Transparent images are laid over white, as the Hugging Face image processors do.
    Shapes: source ``[H, W]``.
    """
    if isinstance(source, Image.Image):
        return _rgb(source, f"The PIL image of size {source.size}", limits)
    if isinstance(source, np.ndarray):
        return _rgb(Image.fromarray(_pixels(source)), "The image array", limits)
    name, data = read_source(source, "image", limits)
    if size := webp_size(data):
        _check_size(size, name, limits)
    if is_laborious(data):
        raise InputError(f"{name} has far more parts than a picture needs; save it anew.")
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


def _too_many(name: str, limits: MediaLimits) -> InputError:
    return InputError(f"{name} has more than {limits.image_pixels} pixels; scale it down first.")


def _check_size(size: tuple[int, int], name: str, limits: MediaLimits) -> None:
    width, height = size
    if not width or not height:
        raise InputError(f"{name} has no pixels; give one of at least 1x1.")
    if width * height > limits.image_pixels:
        raise _too_many(name, limits)
    if not is_fitting(width, height, limits):
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
        if is_jpeg and image.width * image.height > _MOST_PIXELS * len(data):
            raise ValueError
        image.load()
        if image.format == "PNG" and is_cut_png(data, np.asarray(image.crop((0, image.height - 1, *image.size)))):
            raise ValueError
        if is_jpeg and _is_cut_jpeg(data, image):
            raise ValueError
        image = _upright(image)
        if image.mode.startswith("I;16") or image.mode == "I":  # 16-bit grey, which convert() would clip
            image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return image if data and image.mode == "RGB" else image.convert("RGB")  # without a copy of its pixels
    except MemoryError:
        raise InputError(f"{name} needs more memory than there is; scale it down first.") from None
    except Exception:  # decoders of damaged files raise anything
        raise InputError(f"{name} is damaged; give a complete image file.") from None


_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # of TIFF
_MOST_PIXELS = 512
"""Pixels of a JPEG by a byte of the file: 64 by every bit."""
_OTHER_BITS = bytes.fromhex("5a3c91b7e4260f68") * 8


def _is_cut_jpeg(data: bytes, image: Image.Image) -> bool:
    """Whether the compressed pixels of a JPEG end before its last block, which is then grey.

    Where the last pixel is grey, further bits are put behind the compressed pixels: a decoder of whole ones leaves
    them unread.
    """
    last = np.asarray(image.crop((image.width - 1, image.height - 1, *image.size)), np.int16)
    if (abs(last - 128) > 1).any():
        return False
    end = jpeg_end(data)
    other = Image.open(io.BytesIO(data[:end] + _OTHER_BITS + data[end:]), formats=("JPEG",))
    return other.tobytes() != image.tobytes()


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


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; Pillow's own function also writes all other tags anew, and fails at odd ones."""
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
    if array.shape[2] == 4:
        return array
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


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
