"""Images and films as the bytes of files, and as addresses of their content."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image


def encoded(kind: str, image: Image.Image, **options: Any) -> bytes:
    """An image file; options as of Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def film(
    frames: Sequence[np.ndarray[Any, Any]],
    kind: str = "mp4",
    codec: str = "mpeg4",
    rate: int = 10,
    times: Sequence[int] | None = None,
) -> bytes:
    """A film file of frames ``[H, W, 3]``, shown at a constant rate or at times in milliseconds."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts = times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """Content as an address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
