"""Samples of the world as a folder: pictures, video files, text and facts, with one HTML page that shows them all."""

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from saccade.errors import SaccadeError
from saccade.pocket.labels import IMAGE_SIZE
from saccade.pocket.sample import IMAGE_MARK, Sample, score

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


def chance(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean score of true answers against the facts of the next sample, by kind of fact."""
    ring = [*samples, samples[0]]
    totals = Counter[str]()
    for one, other in pairwise(ring):
        totals.update(score(one.task, one.answer, other.facts))
    return {fact: total / len(samples) for fact, total in totals.items()}


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


_SHOWN_FRAMES = 8
_GAP = 4  # pixels between frames


def _pictures(sample: Sample, stem: str, folder: Path, videos: bool) -> list[str]:
    """Write a sample's pictures, or its video. Returns their names in the folder."""
    if sample.video is not None:
        frames = sample.video
        count = min(_SHOWN_FRAMES, len(frames))
        picked = [frames[round(i * (len(frames) - 1) / (count - 1))] for i in range(count)]
        pitch = IMAGE_SIZE + _GAP
        strip = Image.new("RGB", (pitch * count - _GAP, IMAGE_SIZE), (255, 255, 255))
        for i, frame in enumerate(picked):
            strip.paste(frame, (i * pitch, 0))
        strip.save(folder / f"{stem}-frames.png")
        if videos:
            write_video(folder / f"{stem}.mp4", frames, sample.fps or 1.0)
        return [f"{stem}-frames.png", *([f"{stem}.mp4"] if videos else [])]
    names = [f"{stem}{f'-{number}' if number else ''}.png" for number in range(len(sample.images))]
    for name, image in zip(names, sample.images, strict=True):
        image.save(folder / name)
    return names


def write_sheet(
    folder: Path, drawn: dict[str, list[tuple[int, Sample]]], grammar: str, videos: bool = False
) -> list[Path]:
    """Write samples as `index.html`, `samples.jsonl` and pictures, with the same bytes for the same samples."""
    from jinja2 import Template

    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "task": task,
            "seed": seed,
            "grammar": grammar,
            "media": _pictures(sample, f"{task}-{seed}", folder, videos),
            **({"fps": sample.fps} if sample.fps else {}),
            "turns": [list(turn) for turn in sample.turns],
            "question": sample.question,
            "answer": sample.answer,
            "facts": sample.facts,
        }
        for task, numbered in drawn.items()
        for seed, sample in numbered
    ]
    by_task = {task: [sample for _, sample in numbered] for task, numbered in drawn.items()}
    chances = {task: chance(samples) if len(samples) > 1 else {} for task, samples in by_task.items()}
    template = Template(Path(__file__).with_name("sheet.html").read_text(encoding="utf-8"), autoescape=True)
    page, facts = folder / "index.html", folder / "samples.jsonl"
    html = template.render(samples=records, tasks=chances, grammar=grammar, size=IMAGE_SIZE, mark=IMAGE_MARK)
    page.write_text(html, encoding="utf-8")
    facts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [page, facts]
