"""Samples of the world as a folder: pictures, video files, text and facts."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.errors import SaccadeError
from saccade.pocket.sample import Sample

# One thread and no version strings, so that every run writes the same file; high quality, because shapes are small.
_ENCODERS = {
    "libx264": {
        "crf": "8",
        "preset": "medium",
        "threads": "1",
        "x264-params": "threads=1:lookahead_threads=1",
    },
    "mpeg4": {"qmin": "1", "qmax": "3", "threads": "1"},
}


def write_video(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    """Write the frames as an MP4 file."""
    if not frames:
        raise SaccadeError("There are no frames to write; give at least one.")
    try:
        import av
    except ImportError:
        raise SaccadeError("Video files need PyAV; run `pip install saccade[video]`.") from None
    name = next((name for name in _ENCODERS if name in av.codec.codecs_available), None)
    if name is None:
        raise SaccadeError("This build of PyAV can write neither H.264 nor MPEG-4; install PyAV's own wheel.")
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(name, rate=Fraction(fps), options=_ENCODERS[name])
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


def write_samples(folder: Path, drawn: Mapping[str, Sequence[tuple[int, Sample]]], grammar: str) -> Path:
    """Write samples as pictures, videos and `samples.jsonl`, with the same bytes for the same samples."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for task, numbered in drawn.items():
        for seed, sample in numbered:
            record: dict[str, Any] = {"task": task, "seed": seed, "grammar": grammar}
            record["media"] = _write_media(sample, f"{task}-{seed}", folder)
            record |= {"fps": sample.fps} if sample.fps else {}
            record |= {"turns": [list(turn) for turn in sample.turns], "question": sample.question}
            record |= {"answer": sample.answer, "facts": sample.facts}
            lines.append(json.dumps(record) + "\n")
    file = folder / "samples.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def _write_media(sample: Sample, stem: str, folder: Path) -> list[str]:
    """Write a sample's pictures, or its video. Returns their names in the folder."""
    if sample.video is not None:
        write_video(folder / f"{stem}.mp4", sample.video, sample.fps or 1.0)
        return [f"{stem}.mp4"]
    names = [f"{stem}{f'-{number}' if number else ''}.png" for number in range(len(sample.images))]
    for name, image in zip(names, sample.images, strict=True):
        image.save(folder / name)
    return names
