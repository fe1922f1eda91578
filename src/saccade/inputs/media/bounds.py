"""Limits of images and videos: accepted places, formats and sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from saccade.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are accepted by default, under Pillow's names."""

PROGRAMS = frozenset({"EPS", "WMF", "FPX", "MIC"})
"""Formats of Pillow that run another program or read a file inside the file; never accepted."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of the reader of images and videos; the defaults are those for strangers (`SERVER`).

    Attributes:
        paths: whether paths and ``file://`` addresses are read.
        domains: hosts that http(s) addresses may name: ``example.com`` for itself, ``.example.com`` for it and its
            subdomains, ``*`` for all; with ``:port`` for another port than 80 and 443. Empty: no address is fetched.
        private_addresses: whether those hosts may be this machine or in a private network.
        fetch_seconds: seconds of one download, name resolution and handshakes included.
        formats: image formats, under Pillow's names.
        image_bytes: bytes of an image file.
        image_pixels: width times height of an image, checked before it is decoded.
        video_bytes: bytes of a video file.
        video_pixels: width times height of a video's frames.
        video_frames: frames of a whole video.
        video_seconds: seconds of a whole video.
        decode_seconds: seconds until a video must be decoded.
        decode_memory: bytes of address space for decoding a video.
        media: images and videos of one conversation.
        total_pixels: pixels of all images and sampled frames of one conversation.

    Raises:
        InputError: a number is not above 0, or a format runs other programs.
    """

    paths: bool = False
    domains: tuple[str, ...] = ()
    private_addresses: bool = False
    fetch_seconds: float = 10.0
    formats: tuple[str, ...] = FORMATS
    image_bytes: int = 20 << 20
    image_pixels: int = 50_000_000
    video_bytes: int = 100 << 20
    video_pixels: int = 4096 * 2304
    video_frames: int = 20_000
    video_seconds: float = 600.0
    decode_seconds: float = 30.0
    decode_memory: int = 2 << 30
    media: int = 32
    total_pixels: int = 250_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise InputError(f"The media limit {field.name} is {value}; give a number above 0.")
        if unsafe := PROGRAMS.intersection(self.formats):
            raise InputError(
                f"The image format {min(unsafe)} can run other programs; leave it out of the formats."
            )


SERVER = MediaLimits()
"""Limits for media of strangers: bytes and ``data:`` URIs alone."""

LOCAL = MediaLimits(
    paths=True,
    image_bytes=1 << 30,
    image_pixels=178_956_970,
    video_bytes=8 << 30,
    video_pixels=8192 * 8192,
    video_frames=1_000_000,
    video_seconds=24 * 3600.0,
    decode_seconds=3600.0,
    decode_memory=64 << 30,
    media=4096,
    total_pixels=8_000_000_000,
)
"""Limits for a user's own media on the command line and in Python: paths are read, nothing is fetched."""
