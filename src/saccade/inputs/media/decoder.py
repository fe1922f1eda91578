"""Frames of a video file through PyAV, in this process or as a program in a separate process.

The program reads the file and the wanted frames from its standard input and writes frames to its standard output. It
imports nothing of Saccade, so that it starts fast; before it opens the file it gives up the right to open any other.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import pkgutil
import re
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.options import MediaLimits

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_STARTS = {
    b"\x1aE\xdf\xa3": "matroska",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"OggS": "ogg",
    b"FLV\x01": "flv",
    b"\0\0\x01\xba": "mpeg",
    bytes.fromhex("3026b2758e66cf11"): "asf",
}
_FULL_NAMES = {"mov": "mov,mp4,m4a,3gp,3g2,mj2", "matroska": "matroska,webm"}  # names of demuxers of several containers
_NO_TIMESCALE = re.compile(rb"mdhd(\0.{11}|\x01.{19})\0{4}", re.DOTALL)
"""An MP4 track's header without ticks per second, for which FFmpeg takes one."""


class Refused(Exception):
    """A video that is not decoded, with a key of the reason's sentence."""


def container_of(data: bytes) -> str | None:
    """FFmpeg's demuxer by the first bytes of a file; None for text, playlists and whatever else is no container.

    FFmpeg's own search is not used: it also finds formats that open other files or ports.
    """
    if data[4:8] in _BOXES:
        return "mov"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if any(data[n : n + 3 * size : size] == b"GGG" for n, size in ((0, 188), (4, 192), (0, 204))):
        return "mpegts"
    return next((name for start, name in _STARTS.items() if data.startswith(start)), None)


def accepted_container(data: bytes, limits: MediaLimits) -> str:
    """As of `container_of`; raises `Refused` for containers that are not accepted."""
    container = container_of(data)
    if container is None or container not in limits.containers:
        raise Refused("film")
    return container


@dataclass(slots=True)
class Timeline:
    """Times of frames in seconds."""

    stamps: list[float] = field(default_factory=list)  # in the order of the file; NaN where it does not say
    last: float = 0.0  # how long the frame is shown that comes last; 0 where the file does not say
    latest: float = -math.inf  # when it begins

    def add(self, stamp: int | None, duration: int | None, tick: float) -> None:
        start = math.nan if stamp is None else stamp * tick
        self.stamps.append(start)
        if start >= self.latest:
            self.latest, self.last = start, (duration or 0) * tick

    def message(self) -> list[Any]:
        return [self.stamps, self.last]


class Decoder:
    """A video file of which the first video stream is decoded."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        self._data = data
        self._limits = limits
        self._container = accepted_container(data, limits)
        self._deadline = time.monotonic() + limits.decode_seconds

    def probe(self) -> tuple[Timeline, float, float, int]:
        """What the file says of its frames, whose packets are read and not decoded: their times, the seconds that these
        are multiples of, frames per second (0: unknown), which may be no more than nominal, and pixels of one.
        """
        seen = Timeline()
        with self._open() as (container, stream):
            if self._container == "mov" and stream.time_base == 1 and _NO_TIMESCALE.search(self._data):
                raise Refused("timescale")
            tick, rate, pixels = float(stream.time_base), stream.average_rate, self._pixels(stream)
            with self._up_to_damage(seen):
                for packet in container.demux(stream):
                    if packet.size and not packet.is_discard:
                        seen.add(packet.dts if packet.pts is None else packet.pts, packet.duration, tick)
                        self._check(seen)
        return seen, tick, float(rate or 0), pixels

    def scan(self, wanted: Collection[int]) -> Iterator[tuple[int, Any] | Timeline]:
        """Decode in order up to the last wanted frame, all without any, or up to damage: the wanted ones by number,
        ``[H, W, 3]`` each, then the times of all that were passed.
        """
        from av.video.reformatter import VideoReformatter

        wanted = frozenset(wanted)
        last = max(wanted, default=None)
        seen, reformatter = Timeline(), VideoReformatter()  # a frame's own one may stay as long as its thread
        with self._open() as (container, stream):
            stream.codec_context.options = {"max_pixels": str(self._limits.video_pixels)}
            tick = float(stream.time_base)
            with self._up_to_damage(seen):
                for number, frame in enumerate(container.decode(stream)):
                    seen.add(frame.pts, frame.duration, tick)
                    self._check(seen)
                    self._pixels(frame)
                    if number in wanted:
                        yield number, _upright(reformatter.reformat(frame, format="rgb24"), frame.rotation)
                    if number == last:
                        break
        yield seen

    def _check(self, seen: Timeline) -> None:
        if len(seen.stamps) > self._limits.video_frames:
            raise Refused("frames")
        if time.monotonic() > self._deadline:
            raise Refused("time")

    @contextmanager
    def _up_to_damage(self, seen: Timeline) -> Iterator[None]:
        """End at an error after the first frame."""
        import av

        try:
            yield
        except av.FFmpegError as error:
            if isinstance(error, MemoryError) or not seen.stamps:
                raise

    def _pixels(self, frame: Any) -> int:
        """Pixels of a frame, or of the frames of a stream; raises `Refused` beyond the limits."""
        short, long = sorted((int(frame.width), int(frame.height)))
        if not 0 < short * long <= self._limits.video_pixels:
            raise Refused("pixels")
        if long > min(self._limits.longest_side, self._limits.aspect_ratio * short):  # a short file can name any
            raise Refused("sides")
        return short * long

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """The open container with its first video stream; every error of PyAV becomes `Refused`."""
        import av

        limits = self._limits
        options = {
            "format_whitelist": _FULL_NAMES.get(self._container, self._container),
            "protocol_whitelist": "",
            "codec_whitelist": ",".join(limits.codecs),
            "max_pixels": str(limits.video_pixels),
        }
        try:
            file = io.BytesIO(self._data)
            lenient = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}  # 19: always
            with av.open(file, format=self._container, options=options, **lenient) as opened:
                if not opened.streams.video:
                    raise Refused("stream")
                codec = opened.streams.video[0].codec_context
                if codec is None or codec.name not in limits.codecs:
                    raise Refused("film" if codec is None else "codec")  # None where the file is cut, too
                yield opened, opened.streams.video[0]
        except Refused:
            raise
        except Exception as error:  # of a damaged file, anything
            raise Refused("memory" if isinstance(error, MemoryError) else "film") from None


def _upright(frame: Any, rotation: int) -> Any:
    """Pixels ``[H, W, 3]`` of a frame, turned by quarters as its file says: telephones store upright films lying."""
    import numpy as np

    pixels, turns = frame.to_ndarray(), round(rotation / 90) % 4  # counterclockwise
    return np.ascontiguousarray(np.rot90(pixels, turns))  # lines may be padded


def send(pipe: IO[bytes], message: Any, content: Any = b"") -> None:
    """Write a message: two lengths, JSON, bytes."""
    head = json.dumps(message).encode()
    view = memoryview(content).cast("B")
    for part in (struct.pack("<QQ", len(head), len(view)), head, view):
        pipe.write(part)
    pipe.flush()


def receive(pipe: IO[bytes], most: int) -> tuple[Any, bytes]:
    """Read a message."""
    lengths = pipe.read(16)
    if len(lengths) < 16:
        raise EOFError("the other process has ended")
    head, size = struct.unpack("<QQ", lengths)
    if head > 1 << 26 or size > most:
        raise ValueError("the message is too large")
    message = json.loads(pipe.read(head))
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError("the other process has ended")
    return message, content


def _import_all() -> None:
    """Import what PyAV imports late, before the right to open its files is given up."""
    import av
    import numpy  # noqa: F401  (for frames)

    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.endswith(("__main__", "datasets")):
            importlib.import_module(module.name)


def confine(memory: int, seconds: float, files: bool) -> None:
    """Give up more memory and time than the limits, and new files, sockets and programs, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            memory += int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        memory += 1 << 30
    cpu = 16 * int(seconds + 1)  # of all threads; the other process has a clock
    limits = {"RLIMIT_AS": memory, "RLIMIT_CPU": cpu, "RLIMIT_CORE": 0}
    for name, value in (limits if files else {**limits, "RLIMIT_NOFILE": 0}).items():
        _, hard = resource.getrlimit(getattr(resource, name))
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # a second before the system kills it, SIGXCPU says why
        resource.setrlimit(getattr(resource, name), (value - (name == "RLIMIT_CPU"), value))


def _main() -> None:
    """Answer one probe, then scans until the input ends."""
    reader = sys.stdin.buffer
    writer = sys.stdout.buffer
    request, data = receive(reader, 1 << 62)
    sys.path[:] = request["path"]
    limits: Any = SimpleNamespace(**request["limits"])
    try:
        _import_all()
        confine(limits.decode_memory, limits.decode_seconds, files=False)
        decoder = Decoder(data, limits)
        seen, *facts = decoder.probe()
        send(writer, [*seen.message(), *facts])
        while True:
            wanted, _ = receive(reader, 0)
            for passed in decoder.scan(wanted):
                if isinstance(passed, Timeline):
                    send(writer, passed.message())
                else:
                    number, frame = passed
                    send(writer, {"number": number, "shape": frame.shape}, frame)
    except EOFError:
        return
    except MemoryError:
        send(writer, {"refused": "memory"})
    except Refused as refusal:
        send(writer, {"refused": str(refusal)})


if __name__ == "__main__":
    _main()
