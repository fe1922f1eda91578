"""Videos: files decoded to frames, and frames with their times."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from saccade.errors import InputError
from saccade.inputs.media import decoder
from saccade.inputs.media.decoder import Decoder, Refused, accepted_container, receive, send
from saccade.inputs.media.images import load_image, to_uint8
from saccade.inputs.media.sources import LOCAL, MediaLimits, read_source

ASSUMED_FPS = 24.0
"""Frames per second of videos of unknown rate (the value that transformers assumes)."""

Frames = np.ndarray[Any, np.dtype[np.uint8]]
Choose = Callable[[int, float], Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames of a video and their times."""

    frames: Frames  # `[T, H, W, 3]` uint8
    indices: tuple[int, ...]  # for every frame, its number in the whole video
    total: int  # number of frames of the whole video
    fps: float | None  # frames per second of the whole video; None when unknown

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds from the start, one per frame."""
        return tuple(i / (self.fps or ASSUMED_FPS) for i in self.indices)

    @property
    def duration(self) -> float:
        """Seconds of the whole video."""
        return self.total / (self.fps or ASSUMED_FPS)

    @property
    def sampled_fps(self) -> float:
        """Kept frames per second; the assumed rate when the video's own is unknown."""
        return len(self.indices) / self.total * self.fps if self.fps else ASSUMED_FPS


def load_video(source: Any, choose: Choose | None = None, limits: MediaLimits = LOCAL) -> Video:
    """Load the frames of a video; an array is ``[T, H, W, 3]``."""
    if isinstance(source, Video):
        return source
    if not isinstance(source, (np.ndarray, list, tuple)):
        return _decode(*read_source(source, "video", limits), choose, limits)
    frames = _array_frames(source) if isinstance(source, np.ndarray) else _list_frames(source, limits)
    return Video(frames, tuple(range(len(frames))), len(frames), None)


def _array_frames(array: np.ndarray[Any, Any]) -> Frames:
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise InputError(
            f"A video array of shape {array.shape} is not usable; expected [T, H, W, 3], channels last, T at least 1."
        )
    array = to_uint8(array, "video")
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:3], 3)))


def _list_frames(source: Sequence[Any], limits: MediaLimits) -> Frames:
    if not source:
        raise InputError("The list of video frames is empty; give at least one frame.")
    if len(source) > limits.video_frames:
        raise InputError(f"The list has {len(source)} video frames; at most {limits.video_frames} are accepted.")
    frames = []
    pixels = 0
    for entry in source:
        frames.append(np.asarray(load_image(entry, limits)))
        pixels += frames[-1].size // 3
        if pixels > limits.total_pixels:
            raise InputError(
                f"The video's frames have more than {limits.total_pixels} pixels together; send fewer or smaller ones."
            )
    shapes = {frame.shape[:2] for frame in frames}
    if len(shapes) > 1:
        raise InputError(
            f"The video's frames differ in size ({sorted(shapes)} as height, width); resize them to one size."
        )
    return np.stack(frames)


def _decode(name: str, data: bytes, choose: Choose | None, limits: MediaLimits) -> Video:
    """Decode once for the frames that ``choose`` wants, and again if the file's own count was wrong."""
    if find_spec("av") is None:
        raise InputError("Video files need PyAV, which is not installed; run `pip install saccade[video]`.")
    try:
        with DecoderProcess(data, limits) if limits.own_process else nullcontext(Decoder(data, limits)) as decoder:
            total, fps, pixels = decoder.probe()
            if not total:
                total = _scan(decoder, (), limits)[1]
            for _ in range(2):
                if total < 1:
                    break
                if total > limits.video_frames:
                    raise Refused("frames")
                if total / (fps or ASSUMED_FPS) > limits.video_seconds:
                    raise Refused("seconds")
                wanted = list(range(total)) if choose is None else list(choose(total, fps or ASSUMED_FPS))
                if len(wanted) * pixels > limits.total_pixels:
                    raise Refused("total")
                kept, seen = _scan(decoder, set(wanted), limits)
                if all(i in kept for i in wanted):
                    if len({frame.shape for frame in kept.values()}) > 1:
                        raise Refused("film")
                    return Video(np.stack([kept[i] for i in wanted]), tuple(wanted), total, fps)
                total = seen
        raise Refused("empty")
    except Refused as refusal:
        raise InputError(f"{name} {_REFUSALS.get(str(refusal), _REFUSALS['film']).format(limits)}.") from None


_REFUSALS = {
    "film": "is not a video that PyAV can decode; give an MP4, WebM or GIF file",
    "stream": "has no video stream; give a file with moving pictures",
    "codec": "has a codec that is not accepted; give H.264, H.265, VP9, AV1 or MPEG-4",
    "pixels": "has no frame size from 1 to {0.video_pixels} pixels; scale it down first",
    "sides": "has frames with sides of more than {0.longest_side} pixels, or one more than {0.aspect_ratio:g} times as "
    "long as the other; crop it",
    "frames": "has more than {0.video_frames} frames; cut it",
    "seconds": "is longer than {0.video_seconds:g} seconds; cut it",
    "total": "has sampled frames of more than {0.total_pixels} pixels together; take fewer or scale it down",
    "time": "takes longer than {0.decode_seconds:g} seconds to decode; cut it or scale it down",
    "memory": "needs more than {0.decode_memory} bytes to decode; scale it down",
    "empty": "has no frames that can be decoded; give a complete video file",
}


def _scan(
    decoder: Decoder | DecoderProcess, wanted: Collection[int], limits: MediaLimits
) -> tuple[dict[int, Frames], int]:
    """The wanted frames by number, and how many frames were passed."""
    kept: dict[int, Frames] = {}
    count = pixels = 0
    for number, frame in decoder.scan(wanted):
        if frame is None:
            count = number
            continue
        kept[number] = frame
        pixels += frame.size // 3
        if pixels > limits.total_pixels:  # frames can be larger than the file says
            raise Refused("total")
    return kept, count


class DecoderProcess:
    """A `decoder.Decoder` in a separate process, which ends with it."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        accepted_container(data, limits)
        self._limits = limits
        self._is_late = False
        # Nothing of this process's environment is needed but where libraries lie; it may hold keys.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-I", decoder.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )
        self._watchdog = threading.Timer(limits.decode_seconds, self._stop_late)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._send({"path": sys.path, "limits": asdict(limits)}, data)

    def __enter__(self) -> DecoderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def probe(self) -> tuple[int, float | None, int]:
        """As of `Decoder.probe`."""
        with _as_damaged():
            (total, fps, pixels), _ = self._receive(0)
            return int(total), None if fps is None else float(fps), int(pixels)

    def scan(self, wanted: Collection[int]) -> Iterator[tuple[int, Any]]:
        """As of `Decoder.scan`."""
        self._send(sorted(wanted))
        while True:
            with _as_damaged():
                message, content = self._receive(3 * self._limits.video_pixels)
                is_last = "count" in message
                number = int(message["count" if is_last else "number"])
                frame = None if is_last else np.frombuffer(content, np.uint8).reshape(message["shape"])
            yield number, frame
            if is_last:
                return

    def _send(self, message: Any, content: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer says why it ended
            send(self._process.stdin, message, content)

    def _receive(self, most: int) -> tuple[Any, bytes]:
        assert self._process.stdout is not None
        try:
            message, content = receive(self._process.stdout, most)
        except (EOFError, ValueError):
            raise Refused("time" if self._is_late else "film") from None
        if isinstance(message, dict) and "refused" in message:
            raise Refused(message["refused"])
        return message, content

    def _stop_late(self) -> None:
        self._is_late = True
        self._process.kill()


@contextmanager
def _as_damaged() -> Iterator[None]:
    """Answers of another form than the program's, which a decoder that was taken over may give, count as damage."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("film") from None
