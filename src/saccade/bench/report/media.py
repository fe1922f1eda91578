"""Pictures of a run as data URIs."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

LARGEST = 640
"""Longest side, in pixels, of a picture in the report; larger ones are scaled down."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture in the page; ``problem`` says why there is none."""

    name: str
    uri: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def embed(folder: Path, name: str) -> Medium:
    """The file ``name`` of a run's ``media/`` folder as a PNG or JPEG data URI.

    A file that is missing, is no picture or lies outside the folder gives a `Medium` that says so.
    """
    from PIL import Image, UnidentifiedImageError

    root = (folder / "media").resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        return Medium(name, problem="lies outside the run's media folder")
    try:
        with Image.open(path) as image:
            image.thumbnail((LARGEST, LARGEST))
            picture = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except FileNotFoundError:
        return Medium(name, problem="is not in the run's media folder")
    except UnidentifiedImageError:
        return Medium(name, problem="is no picture, so the report cannot show it")
    except (OSError, ValueError, Image.DecompressionBombError) as problem:
        return Medium(name, problem=f"cannot be read ({type(problem).__name__})")
    small, kind = io.BytesIO(), "png"
    picture.save(small, "PNG", optimize=True)
    if picture.mode == "RGB" and small.tell() > 60_000:  # a photograph: PNG would be several times larger
        small, kind = io.BytesIO(), "jpeg"
        picture.save(small, "JPEG", quality=80, optimize=True)
    data = base64.b64encode(small.getvalue()).decode("ascii")
    return Medium(name, f"data:image/{kind};base64,{data}", picture.width, picture.height)
