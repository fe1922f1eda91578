"""Limits of images and videos, and downloads from web addresses within them."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import NamedTuple
from urllib.parse import urlsplit

from saccade.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are accepted by default, under Pillow's names."""
PROGRAMS = frozenset({"EPS", "WMF", "FPX", "MIC"})
"""Formats of Pillow that run another program or read a file inside the file; never accepted."""
CONTAINERS = ("mov", "matroska", "gif", "avi", "mpegts", "mpeg", "ogg")
"""Video containers that are accepted by default, under FFmpeg's names of their demuxers; ``mov`` includes MP4."""
CODECS = (
    *("h264", "hevc", "libdav1d", "libaom-av1", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4"),
    *("mpeg1video", "mpeg2video", "h263", "mjpeg", "theora", "gif"),
)
"""Video decoders that are accepted by default, under FFmpeg's names."""
_LOCAL_CODECS = (
    *("ffv1", "rawvideo", "png", "prores", "dnxhd", "huffyuv", "ffvhuff", "utvideo", "qtrle", "cfhd", "vc1"),
    *("flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3", "dvvideo", "cinepak", "msvideo1", "svq3"),
)
_DOMAIN = re.compile(r"(\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of the reader of images and videos; the defaults are those for untrusted input (`SERVER`).

    >>> saccade.load("pocket").generate("Hello", images=["photo.png"], limits=MediaLimits())
    Traceback (most recent call last):
    saccade.errors.InputError: ...
    """

    paths: bool = False  # whether paths and `file://` addresses are read
    domains: tuple[str, ...] = ()  # hosts that http(s) addresses may name
    private_addresses: bool = False  # whether those hosts may be this machine or in a private network
    fetch_seconds: float = 10.0  # seconds of one download, name resolution and handshakes included
    formats: tuple[str, ...] = FORMATS  # image formats, under Pillow's names
    image_bytes: int = 20 << 20  # bytes of an image file
    image_pixels: int = 50_000_000  # width times height of an image, which takes 4 bytes per pixel once decoded
    longest_side: int = 65_535  # pixels along a side of an image or of a video's frames
    aspect_ratio: float = 200.0  # how many times longer than wide these may be, or wider than long
    containers: tuple[str, ...] = CONTAINERS  # video containers, under FFmpeg's names of their demuxers
    codecs: tuple[str, ...] = CODECS  # video decoders, under FFmpeg's names
    own_process: bool = True  # whether videos are decoded in a process of their own
    video_bytes: int = 100 << 20  # bytes of a video file
    video_pixels: int = 4096 * 2304  # width times height of a video's frames
    video_frames: int = 20_000  # frames of a whole video
    video_seconds: float = 600.0  # seconds of a whole video
    decode_seconds: float = 30.0  # seconds until a video must be decoded
    decode_memory: int = 1 << 30  # bytes that this process may allocate
    media: int = 32  # images and videos of one conversation
    total_pixels: int = 250_000_000  # pixels of all images and sampled frames of one conversation

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
"""Limits for untrusted media: bytes and ``data:`` URIs alone."""

LOCAL = MediaLimits(
    paths=True,
    image_bytes=1 << 30,
    image_pixels=178_956_970,
    longest_side=250_000,
    aspect_ratio=1000.0,
    containers=(*CONTAINERS, "flv", "asf"),
    codecs=(*CODECS, *_LOCAL_CODECS),
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


_PORTS = {"http": 80, "https": 443}
_TUNNELS = tuple(
    ipaddress.IPv6Network(network)
    for network in ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10")
)
"""IPv6 networks whose addresses contain or hide another one: compatible, NAT64, Teredo, 6to4, site-local."""


class _Address(NamedTuple):
    """One parsed address, used for the check and for the request."""

    scheme: str
    host: str
    port: int
    target: str


def fetch(url: str, what: str, limits: MediaLimits, most: int) -> bytes:
    """Download a file from one listed host: one resolved public address, no redirect, bounded.

    The host is resolved once, every one of its addresses must be public, and the connection goes to one of these.
    Proxies of the environment are not used, because they would resolve the host again.
    """
    address = _parse(url, what)
    if not any(_is_listed(address, entry) for entry in limits.domains):
        raise InputError(
            f"The host of the {what}'s address is not one of those that are fetched; send its content as a data: URI."
        )
    deadline = time.monotonic() + limits.fetch_seconds
    late = InputError(
        f"The {what}'s address took longer than {limits.fetch_seconds:g} seconds; send its content as a data: URI."
    )
    ips = _resolve(address, deadline)
    if ips is None:
        raise late
    if not ips:
        raise InputError(f"The host of the {what}'s address cannot be found; check the address.")
    if not limits.private_addresses and not all(is_public(ip) for ip in ips):
        raise InputError(
            f"The host of the {what}'s address is not in the public network; send its content as a data: URI."
        )
    try:
        return _download(address, ips, what, most, deadline)
    except InputError:
        raise
    except (OSError, http.client.HTTPException, ValueError):
        if time.monotonic() >= deadline:
            raise late from None
        raise InputError(f"The {what}'s address cannot be read; check it, or send it as a data: URI.") from None


def is_public(ip: str) -> bool:
    """Whether an IP address is a unicast address of the public internet and no other one in disguise."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:  # with a zone, which only link-local addresses have
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if any(address in network for network in _TUNNELS):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _parse(url: str, what: str) -> _Address:
    malformed = InputError(f"The {what}'s address is malformed; give https://host/path in ASCII without user name.")
    if not url.isascii() or not url.isprintable() or any(sign in url for sign in ' \\"<>^`{|}'):
        raise malformed
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise malformed from None
    host = (parts.hostname or "").removesuffix(".")
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not host or "@" in parts.netloc or "%" in host or port == 0:
        raise malformed
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Address(scheme, host, port or _PORTS[scheme], target)


def _is_listed(address: _Address, entry: str) -> bool:
    name, _, port = entry.lower().partition(":")
    if address.port != (int(port) if port else _PORTS[address.scheme]):
        return False
    inside = name.startswith(".") and (address.host.endswith(name) or address.host == name[1:])
    return inside or name in ("*", address.host)


def _resolve(address: _Address, deadline: float) -> list[str] | None:
    """IP addresses of the host; None when the resolver, which has no limit of its own, took too long."""
    ips: list[str] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            ips.extend(str(entry[4][0]) for entry in entries)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    return None if thread.is_alive() else ips


def _download(address: _Address, ips: list[str], what: str, most: int, deadline: float) -> bytes:
    raw = _connect(ips, address.port, deadline)
    # The socket's own timeout starts again with every byte; this ends a dripping answer, too. TLS takes over the
    # socket, so its end is reached through a second descriptor.
    second = raw.dup()
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [second])
    watchdog.daemon = True
    watchdog.start()
    connection = http.client.HTTPConnection(address.host, address.port)
    try:
        if address.scheme == "https":
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=address.host)
        connection.sock = raw
        connection.request("GET", address.target, headers={"Accept-Encoding": "identity", "User-Agent": "saccade"})
        response = connection.getresponse()
        if 300 <= response.status < 400:
            raise InputError(
                f"The {what}'s address redirects, which is not followed; give the address of the file itself."
            )
        if response.status != 200:
            raise InputError(f"The {what}'s address answers with status {response.status}; check the address.")
        content = bytearray()
        is_larger = (response.length or 0) > most
        while not is_larger and (part := response.read(1 << 16)):
            content += part
            is_larger = len(content) > most
        if is_larger:
            raise InputError(f"The {what} at the address has more than {most:,} bytes; give a smaller file.")
        if time.monotonic() >= deadline or response.length:
            raise OSError("cut off")
        return bytes(content)
    finally:
        watchdog.cancel()
        for opened in (connection, raw, second):
            opened.close()


def _connect(ips: list[str], port: int, deadline: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for ip in ips:
        try:
            return socket.create_connection((ip, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            failure = error
    raise failure


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
