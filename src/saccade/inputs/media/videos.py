"""Videos: files decoded to frames, and frames with their times."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from saccade.errors import InputError, KilledError
from saccade.inputs.media import decoder
from saccade.inputs.media.decoder import Decoder, Refused, Timeline, accepted_container, receive, send
from saccade.inputs.media.images import load_image, read_source, to_uint8
from saccade.options import LOCAL, MediaLimits

ASSUMED_FPS = 24.0  # frames per second where nothing says the rate (the value that transformers assumes)

_SIGXCPU = getattr(signal, "SIGXCPU", 0)  # not on Windows

Frames = np.ndarray[Any, np.dtype[np.uint8]]
Choose = Callable[[int, float], Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames of a video and their times; one of ``fps`` and ``times`` is given.

    Attributes:
        frames: pictures as `VLM.generate` takes them, or an array ``[T, H, W, 3]``.
        fps: frames per second.
        times: seconds from the start, one per frame, in order.
        duration: seconds of the whole video; by default its last frame is shown as long as the one before.

    Raises:
        InputError: the numbers do not fit together.
    """

    frames: Any
    fps: float | None = None
    times: Sequence[float] = ()
    duration: float = 0.0
    is_sampled: bool = False  # whether these are the frames that a prompt uses, as `load_video` returns them

    def __post_init__(self) -> None:
        if isinstance(self.frames, np.ndarray):
            object.__setattr__(self, "frames", _array_frames(self.frames))
        elif not isinstance(self.frames, (list, tuple)):
            raise InputError(
                f"The frames of a Video are of type {type(self.frames).__name__}; give a list of pictures or a NumPy "
                "array [T, H, W, 3]."
            )
        elif not self.frames:
            raise InputError("The list of video frames is empty; give at least one frame.")
        total = len(self.frames)
        shown = self.times if isinstance(self.times, Iterable) else (self.times,)
        times, fps, length = tuple(map(_number, shown)), _number(self.fps), _number(self.duration)
        if bool(times) == (self.fps is not None):
            raise InputError("A Video needs fps or times, which say when its frames are shown; give one of them.")
        if self.fps is not None:
            if not 0 < fps < math.inf:
                raise InputError(f"The Video's fps is {self.fps!r}; give a number above 0.")
            times = tuple(n / fps for n in range(total))
        if len(times) != total or not all(a <= b for a, b in pairwise((0, *times))) or times[-1] == math.inf:
            raise InputError(f"The Video has {total} frames; give as many times, in seconds from 0 on and in order.")
        last = times[-1] - times[-2] if total > 1 else 1 / ASSUMED_FPS
        duration = length or (total / fps if self.fps is not None else times[-1] + last)
        if not duration or not times[-1] <= duration < math.inf:
            given = repr(self.duration) if math.isnan(length) else f"{duration:g} s"
            raise InputError(f"The Video's duration is {given}; its last frame comes at {times[-1]:g} s.")
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "duration", duration)

    @property
    def sampled_fps(self) -> float:
        """Kept frames per second."""
        return len(self.times) / self.duration


def _number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError):
        return math.nan


@dataclass(frozen=True, slots=True)
class _Timing:
    """When the frames of a video are shown."""

    times: np.ndarray[Any, Any]  # seconds from the first one on
    fps: float  # frames per second, the mean where they vary
    duration: float

    def pick(self, choose: Choose | None) -> list[int]:
        """The frames that come nearest to those chosen of as many at a constant rate; each once, in order."""
        total = len(self.times)
        if choose is None:
            return list(range(total))
        chosen = sorted(set(choose(total, self.fps)))
        nearest = [np.abs(self.times - number * self.duration / total).argmin() for number in chosen]
        order = np.arange(len(chosen))
        later = np.maximum.accumulate(nearest - order) + order
        return np.minimum(later, total - 1 - order[::-1]).tolist()  # type: ignore[no-any-return]

    def video(self, frames: Frames, picked: Sequence[int]) -> Video:
        return Video(frames, times=self.times[picked].tolist(), duration=self.duration, is_sampled=True)


def load_video(source: Any, choose: Choose | None = None, limits: MediaLimits = LOCAL) -> Video:
    """Load the chosen frames of a video, or all; an array is ``[T, H, W, 3]``.

    Frames without times are taken for `ASSUMED_FPS` a second.
    """
    if isinstance(source, (np.ndarray, list, tuple)):
        source = Video(source, fps=ASSUMED_FPS)
    if not isinstance(source, Video):
        return _decode(*read_source(source, "video", limits), choose, limits)
    if source.is_sampled:
        return source
    total = len(source.frames)
    if total > limits.video_frames:
        raise InputError(f"The list has {total} video frames; at most {limits.video_frames} are accepted.")
    timing = _Timing(np.array(source.times), source.fps or total / source.duration, source.duration)
    picked = timing.pick(choose)
    if isinstance(source.frames, np.ndarray):
        return timing.video(source.frames[picked] if choose else source.frames, picked)
    return timing.video(_list_frames([source.frames[n] for n in picked], limits), picked)


def _array_frames(array: np.ndarray[Any, Any]) -> Frames:
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise InputError(
            f"A video array of shape {array.shape} is not usable; expected [T, H, W, 3], channels last, T at least 1."
        )
    array = to_uint8(array, "video")
    return array if array.shape[3] == 3 else np.repeat(array, 3, axis=3)


def _list_frames(source: Sequence[Any], limits: MediaLimits) -> Frames:
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
    """Decode the frames that ``choose`` wants by the times of the packets, and again if these are not the frames'."""
    if find_spec("av") is None:
        raise InputError("Video files need PyAV, which is not installed; run `pip install saccade[video]`.")
    try:
        with DecoderProcess(data, limits) if limits.own_process else nullcontext(Decoder(data, limits)) as decoder:
            seen, tick, rate, pixels = decoder.probe()
            for is_sure in (False, True):
                if not seen.stamps:
                    break
                expected, timing = seen, _timing(seen, tick, rate)
                if not 0 < timing.duration <= limits.video_seconds:
                    raise Refused("seconds")
                picked = timing.pick(choose)
                if len(picked) * pixels > limits.total_pixels:
                    raise Refused("total")
                kept, seen = _scan(decoder, set(picked), limits)
                is_whole = all(number in kept for number in picked)
                if is_whole and (is_sure or _agree(expected, seen, tick)):
                    if len({frame.shape for frame in kept.values()}) > 1:
                        raise Refused("film")
                    return timing.video(np.stack([kept[number] for number in picked]), picked)
                if is_whole:
                    _, seen = _scan(decoder, (), limits)
        raise Refused("empty")
    except Refused as refusal:
        raise InputError(f"{name} {_REFUSALS.get(str(refusal), _REFUSALS['film']).format(limits)}.") from None


def _timing(seen: Timeline, tick: float, rate: float) -> _Timing:
    """Times of frames that are shown in the order of their stamps.

    Those of a constant rate are freed of the rounding to ticks. The rate that a file names comes first; in Matroska it
    is nominal. Without times the rate is all that is known.
    """
    times, numbers = np.sort(seen.stamps), np.arange(len(seen.stamps))
    times = times - times[0]
    fps = rate or ASSUMED_FPS
    if times[-1] > 0:  # not NaN
        mean = (len(times) - 1) / times[-1]
        nominal = (rate, np.round(mean), np.round(mean * 1.001) / 1.001)
        slack = 0.999 * max(tick, 0.001)
        constant = [r for r in nominal if r and (np.abs(times - numbers / r) < slack).all()]
        if not constant:
            duration = times[-1] + (seen.last or times[-1] - times[-2])
            return _Timing(times, len(times) / duration, duration)
        fps = constant[0]
    return _Timing(numbers / fps, fps, len(times) / fps)


def _agree(expected: Timeline, seen: Timeline, tick: float) -> bool:
    """Whether frames come at the times of the packets, as far as both are known."""
    packets, frames = np.sort(expected.stamps)[: len(seen.stamps)], np.array(seen.stamps)[: len(expected.stamps)]
    return not (np.abs((packets - packets[0]) - (frames - frames[0])) > tick / 2).any()


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
    "timescale": "is an MP4 without a timescale, which says how long its frames are shown; save it again",
    "time": "takes longer than {0.decode_seconds:g} seconds to decode; cut it or scale it down",
    "memory": "needs more than {0.decode_memory} bytes to decode; scale it down",
    "empty": "has no frames that can be decoded; give a complete video file",
}


def _scan(
    decoder: Decoder | DecoderProcess, wanted: Collection[int], limits: MediaLimits
) -> tuple[dict[int, Frames], Timeline]:
    """The wanted frames by number, and the times of all that were passed."""
    kept: dict[int, Frames] = {}
    pixels = 0
    for passed in decoder.scan(wanted):
        if isinstance(passed, Timeline):
            return kept, passed
        number, kept[passed[0]] = passed
        pixels += kept[number].size // 3
        if pixels > limits.total_pixels:  # frames can be larger than the file says
            raise Refused("total")
    raise Refused("film")


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

    def probe(self) -> tuple[Timeline, float, float, int]:
        """As of `Decoder.probe`."""
        with _as_damaged():
            (stamps, last, tick, rate, pixels), _ = self._receive(0)
            return _timeline(stamps, last), float(tick), float(rate), int(pixels)

    def scan(self, wanted: Collection[int]) -> Iterator[tuple[int, Any] | Timeline]:
        """As of `Decoder.scan`."""
        self._send(sorted(wanted))
        while True:
            with _as_damaged():
                message, content = self._receive(3 * self._limits.video_pixels)
                if isinstance(message, list):
                    passed = _timeline(*message)
                    break
                frame = int(message["number"]), np.frombuffer(content, np.uint8).reshape(message["shape"])
            yield frame
        yield passed

    def _send(self, message: Any, content: bytes = b"") -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer says why it ended
            send(self._process.stdin, message, content)

    def _receive(self, most: int) -> tuple[Any, bytes]:
        assert self._process.stdout is not None
        try:
            message, content = receive(self._process.stdout, most)
        except (EOFError, ValueError):
            with suppress(subprocess.TimeoutExpired):  # it may live on without its pipe
                self._process.wait(1)
            if self._process.returncode == -9 and not self._is_late:
                raise KilledError("The process that decodes a video was killed; try again.") from None
            raise Refused("time" if self._is_late or self._process.returncode == -_SIGXCPU else "film") from None
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


def _timeline(stamps: Iterable[Any], last: Any) -> Timeline:
    return Timeline([float(stamp) for stamp in stamps], float(last))
