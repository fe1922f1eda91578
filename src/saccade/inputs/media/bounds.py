"""Limits of images and videos: accepted places, formats and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from saccade.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are accepted by default, under Pillow's names."""

PROGRAMS = frozenset({"EPS", "WMF", "FPX", "MIC"})
"""Formats of Pillow that run another program or read a file inside the file; never accepted."""


_DOMAIN = re.compile(r"(\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)(:[0-9]{1,5})?")

CONTAINERS = ("mov", "matroska", "gif", "avi", "mpegts", "mpeg", "ogg")
"""Video containers that are accepted by default, under FFmpeg's names of their demuxers; ``mov`` includes MP4."""

CODECS = (
    *("h264", "hevc", "libdav1d", "libaom-av1", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4"),
    *("mpeg1video", "mpeg2video", "h263", "mjpeg", "theora", "gif"),
)
"""Video decoders that are accepted by default, under FFmpeg's names."""


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
        image_pixels: width times height of an image, which takes 4 bytes per pixel once decoded.
        longest_side: pixels along a side of an image or of a video's frames.
        aspect_ratio: how many times longer than wide these may be, or wider than long.
        containers: video containers, under FFmpeg's names of their demuxers.
        codecs: video decoders, under FFmpeg's names.
        own_process: whether videos are decoded in a process of their own, which can open no other file and whose end
            harms no one; in a server, also whether workers decode and resize all media.
        video_bytes: bytes of a video file.
        video_pixels: width times height of a video's frames.
        video_frames: frames of a whole video.
        video_seconds: seconds of a whole video.
        decode_seconds: seconds until a video must be decoded.
        decode_memory: bytes that this process may allocate.
        media: images and videos of one conversation.
        total_pixels: pixels of all images and sampled frames of one conversation.

    Raises:
        InputError: a number is not above 0, a domain is no host, or a format runs other programs.
    """

    paths: bool = False
    domains: tuple[str, ...] = ()
    private_addresses: bool = False
    fetch_seconds: float = 10.0
    formats: tuple[str, ...] = FORMATS
    image_bytes: int = 20 << 20
    image_pixels: int = 50_000_000
    longest_side: int = 65_535
    aspect_ratio: float = 200.0
    containers: tuple[str, ...] = CONTAINERS
    codecs: tuple[str, ...] = CODECS
    own_process: bool = True
    video_bytes: int = 100 << 20
    video_pixels: int = 4096 * 2304
    video_frames: int = 20_000
    video_seconds: float = 600.0
    decode_seconds: float = 30.0
    decode_memory: int = 1 << 30
    media: int = 32
    total_pixels: int = 250_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise InputError(f"The media limit {field.name} is {value}; give a number above 0.")
        for domain in self.domains:
            if not _DOMAIN.fullmatch(domain):
                raise InputError(
                    f"The domain {domain!r} is no host; give example.com, .example.com or *, with :port if needed."
                )
        if unsafe := PROGRAMS.intersection(self.formats):
            raise InputError(f"The image format {min(unsafe)} can run other programs; leave it out of the formats.")


SERVER = MediaLimits()
"""Limits for media of strangers: bytes and ``data:`` URIs alone."""

LOCAL = MediaLimits(
    paths=True,
    image_bytes=1 << 30,
    image_pixels=178_956_970,
    longest_side=250_000,
    aspect_ratio=1000.0,
    containers=(*CONTAINERS, "flv", "asf"),
    codecs=(
        *CODECS,
        *(
            "ffv1",
            "rawvideo",
            "png",
            "prores",
            "dnxhd",
            "huffyuv",
            "ffvhuff",
            "utvideo",
            "qtrle",
            "cfhd",
            "vc1",
        ),
        *("flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3", "dvvideo", "cinepak", "msvideo1", "svq3"),
    ),
    own_process=False,
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
