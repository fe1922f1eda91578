"""Samples of the world as a folder: pictures, video files, text and facts, with one HTML page that shows them all."""

import json
from collections.abc import Sequence
from fractions import Fraction
from html import escape
from math import inf, log10
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import SaccadeError
from saccade.pocket.labels import IMAGE_SIZE
from saccade.pocket.sample import IMAGE_MARK, Sample
from saccade.pocket.scoring import chance

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
LEAST_PSNR = 27.0
"""Lower bound of the PSNR in decibels of frames read back from a file, which loses some of sharp coloured edges.

Measured over 30 videos: 34 on average, 28.2 at worst, because colour planes have half the resolution."""


def _encoder() -> str:
    import av

    for name in _ENCODERS:
        if name in av.codec.codecs_available:
            return name
    raise SaccadeError("This build of PyAV can write neither H.264 nor MPEG-4; install PyAV's own wheel.")


def write_video(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    """Write the frames as an MP4 file."""
    if not frames:
        raise SaccadeError("There are no frames to write; give at least one.")
    try:
        import av
    except ImportError:
        raise SaccadeError("Video files need PyAV; run `pip install saccade[video]`.") from None
    name = _encoder()
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(name, rate=Fraction(fps), options=_ENCODERS[name])
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))


def psnr(one: Image.Image, two: Any) -> float:
    """Peak signal-to-noise ratio of two pictures in decibels; infinite if they are equal."""
    error = float(np.mean((np.asarray(one, np.float64) - np.asarray(two, np.float64)) ** 2))
    return inf if error == 0 else 10 * log10(255**2 / error)


_SHOWN_FRAMES = 8
_GAP = 4  # pixels between frames

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Samples of the pocket world</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; }}
article {{ border-top: 1px solid #8886; padding: 1rem 0; display: flex; flex-wrap: wrap; gap: 0 1rem; }}
article > div:last-child {{ flex: 1 1 24rem; }}
img, video {{ image-rendering: pixelated; margin: 0 .4rem .4rem 0; }}
video {{ width: 240px; }}
p {{ margin: .3rem 0; }} .asked {{ font-weight: 600; }} .small {{ color: #777; font-size: .85rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .15rem .8rem .15rem 0; text-align: left; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; color: #e8e8e8; }} .small {{ color: #aaa; }} }}
</style></head><body>
<h1>Samples of the pocket world</h1>
<p class="small">{summary}</p>
{sections}
</body></html>
"""


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


def _show(name: str, scale: int) -> str:
    if name.endswith(".mp4"):
        return f'<video src="{name}" controls loop muted></video>'
    width = "" if name.endswith("-frames.png") else f' width="{IMAGE_SIZE * scale}"'
    return f'<img src="{name}" alt=""{width}>'


def _article(sample: Sample, seed: int, names: Sequence[str]) -> str:
    shown = "".join(_show(name, 2 if len(names) == 1 else 1) for name in names)
    parts = [f'<article id="{sample.task}-{seed}"><div>{shown}</div><div>']
    for question, answer in (*sample.turns, (sample.question, sample.answer)):
        first, *captions = escape(question).split(escape(IMAGE_MARK))
        asked = "".join([first, *(f"[{number}] {text}" for number, text in enumerate(captions, 1))])
        parts += [f'<p class="asked">{asked}</p>', f"<p>{escape(answer)}</p>"]
    return "\n".join([*parts, f'<p class="small">seed {seed}</p></div></article>'])


def _chances(samples: Sequence[Sample]) -> str:
    if len(samples) < 2:
        return ""
    rows = "".join(f"<tr><td>{fact}</td><td>{value:.2f}</td></tr>" for fact, value in chance(samples).items())
    return f"<table><tr><th>fact</th><th>chance</th></tr>{rows}</table>"


def write_sheet(
    folder: Path, drawn: dict[str, list[tuple[int, Sample]]], grammar: str, videos: bool = False
) -> list[Path]:
    """Write samples as `index.html`, `samples.jsonl` and pictures, with the same bytes for the same samples."""
    folder.mkdir(parents=True, exist_ok=True)
    sections, records = [], []
    for task, numbered in drawn.items():
        sections.append(f"<h2>{task}</h2>{_chances([sample for _, sample in numbered])}")
        for seed, sample in numbered:
            names = _pictures(sample, f"{task}-{seed}", folder, videos)
            sections.append(_article(sample, seed, names))
            records.append(_record(sample, seed, grammar, names))
    count = sum(len(numbered) for numbered in drawn.values())
    summary = f"{count} samples, grammar “{grammar}”. Chance: what true answers score against another sample’s facts."
    page, facts = folder / "index.html", folder / "samples.jsonl"
    page.write_text(_PAGE.format(summary=summary, sections="\n".join(sections)), encoding="utf-8")
    facts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return [page, facts]


def _record(sample: Sample, seed: int, grammar: str, names: Sequence[str]) -> dict[str, Any]:
    return {
        "task": sample.task,
        "seed": seed,
        "grammar": grammar,
        "media": list(names),
        **({"fps": sample.fps} if sample.fps else {}),
        "turns": [list(turn) for turn in sample.turns],
        "question": sample.question,
        "answer": sample.answer,
        "facts": sample.facts,
    }
