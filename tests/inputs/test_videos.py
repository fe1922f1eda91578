"""Videos are decoded, sampled as the family's own video processor does, and stamped with their times."""

from __future__ import annotations

import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits import VIDEO, kit
from PIL import Image
from torchvision_free import VIDEO_PROCESSORS
from transformers.video_utils import VideoMetadata

from media_files import film
from processes import forked
from saccade.errors import InputError, SaccadeWarning
from saccade.inputs.families import FAMILIES
from saccade.inputs.families.family import normalise as normalise_frames
from saccade.inputs.families.idefics import number_words
from saccade.inputs.media import LOCAL, SERVER, MediaLimits, Video, load_video
from saccade.inputs.media.decoder import Decoder
from saccade.inputs.processor import MediaOptions, normalise, with_sources


@pytest.fixture(scope="module")
def movie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seconds at 10 frames a second; frame i is a grey of 8 * i."""
    path = tmp_path_factory.mktemp("movie") / "film.mp4"
    path.write_bytes(film([np.full((48, 64, 3), 8 * i, np.uint8) for i in range(30)]))
    return path


def test_a_file_is_decoded_with_its_times(movie: Path) -> None:
    video = load_video(movie, lambda total, fps: [0, total // 2, total - 1])
    assert video.times == (0.0, 1.5, 2.9)
    assert video.duration == 3.0
    assert video.sampled_fps == pytest.approx(1.0)
    assert video.frames.shape == (3, 48, 64, 3)
    assert np.abs(video.frames.mean((1, 2, 3)) - [0, 120, 232]).max() < 4  # what mpeg4 loses


UNEVEN = [*range(0, 10_001, 500), *range(10_033, 10_331, 33)]
"""Milliseconds of 31 frames: two a second for ten seconds, then thirty a second."""
CONTAINERS = [
    *(("mp4", "libx264"), ("mov", "mjpeg"), ("matroska", "libx264"), ("webm", "libvpx")),
    *(("webm", "libvpx-vp9"), ("gif", "gif"), ("avi", "mjpeg"), ("mpegts", "libx264")),
]


@cache
def uneven(kind: str, codec: str) -> bytes:
    """A film whose frame i is a grey of 8 * i."""
    frames = [np.full((48, 64, 3), 8 * i, np.uint8) for i in range(len(UNEVEN))]
    return film(frames, kind, codec, 30, UNEVEN)


def numbers_of(video: Video) -> list[int]:
    return [round(grey / 8) for grey in video.frames.mean((1, 2, 3))]


@pytest.mark.parametrize(("kind", "codec"), CONTAINERS)
@pytest.mark.parametrize("limits", [SERVER, LOCAL], ids=["server", "local"])
def test_a_film_of_variable_rate_is_sampled_by_its_frames_own_times(kind: str, codec: str, limits: MediaLimits) -> None:
    """The average rate that FFmpeg names of Matroska, GIF and AVI is nominal, here 30, 3 or 1000 frames a second."""
    rates = []

    def one_a_second(total: int, fps: float) -> list[int]:
        rates.append(fps)
        return [round(second * fps) for second in range(10)]

    video = load_video(uneven(kind, codec), one_a_second, limits)
    assert rates[-1] == pytest.approx(3.0, abs=0.01)
    assert numbers_of(video) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert video.times == pytest.approx(range(10), abs=0.011)
    assert video.duration == pytest.approx(10.363, abs=0.01)
    whole = load_video(uneven(kind, codec), limits=limits)
    assert numbers_of(whole) == [*range(31)]
    assert whole.times == pytest.approx([time / 1000 for time in UNEVEN], abs=0.01)


def test_a_number_of_frames_is_kept_where_many_come_at_once() -> None:
    """Each frame stands once: where none is left near a time, the next ones do."""
    for count in (1, 5, 25, 30, 31):
        video = load_video(uneven("webm", "libvpx"), lambda total, _, n=count: [i * total // n for i in range(n)])
        numbers = numbers_of(video)
        assert len(numbers) == count
        assert numbers == sorted(set(numbers))
        assert video.times == pytest.approx([UNEVEN[n] / 1000 for n in numbers])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma4"])
def test_the_same_film_has_the_same_prompt_in_every_container(name: str) -> None:
    processor = kit(name).ours
    prompts = [
        processor.prompt("?", videos=[uneven(*container)], options=MediaOptions(fps=1))
        for container in (("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4"), ("gif", "gif"))
    ]
    assert len({prompt.ids for prompt in prompts}) == 1
    text = processor.tokenizer.decode(prompts[0].ids)
    if name == "qwen2_5_vl":
        seconds = [float(prompt.media[0].tensors["second_per_grid_ts"]) for prompt in prompts]
        assert seconds == pytest.approx([2 * 10.363 / 10] * 4, rel=1e-3)
    elif name == "qwen3_vl":
        stamps = [float(stamp) for stamp in re.findall(r"<([\d.]+) seconds>", text)]
        assert stamps == [0.5, 3.0, 5.0, 7.0, 9.5]
    else:
        assert set(re.findall(r"00:\d\d", text)) >= {
            "00:00",
            "00:04",
            "00:05",
            "00:10" if name == "smolvlm" else "00:09",
        }


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "libx264"), ("gif", "gif")])
def test_a_film_of_constant_rate_keeps_the_frames_of_its_video_processor(kind: str, codec: str) -> None:
    """Matroska's milliseconds and a GIF's hundredths are rounded: 0, 33, 67."""
    frames = [np.full((48, 64, 3), 8 * i, np.uint8) for i in range(30)]
    asked = []

    def choose(total: int, fps: float) -> list[int]:
        asked.append((total, fps))
        return [0, 7, 8, 29]

    video = load_video(film(frames, kind, codec, 30), choose)
    assert asked == [(30, 30.0)]
    assert numbers_of(video) == [0, 7, 8, 29]
    assert video.times == (0, 7 / 30, 8 / 30, 29 / 30)
    assert video.duration == 1


def test_packets_that_are_no_frames_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hidden frames and fields are in some files."""
    real = Decoder.probe

    def probe(self: Decoder) -> Any:
        seen, *facts = real(self)
        return replace(seen, stamps=[stamp for stamp in seen.stamps for _ in (0, 1)]), *facts

    monkeypatch.setattr(Decoder, "probe", probe)
    for choose, expected in ((lambda total, fps: [0, total // 2], [0, 10]), (None, [*range(31)])):
        video = load_video(uneven("webm", "libvpx"), choose, LOCAL)
        assert numbers_of(video) == expected
        assert video.times == pytest.approx([UNEVEN[n] / 1000 for n in expected])


def test_a_process_forks_beside_a_thread_that_has_decoded_a_film(movie: Path) -> None:
    """A child frees what other threads held; it cannot free a scaler whose own threads it does not have."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(load_video, movie, limits=replace(LOCAL, own_process=False)).result()
        child = forked(lambda: None)
        child.join(60)
        child.kill()
    assert child.exitcode == 0


def test_an_mp4_without_a_timescale_is_called_that() -> None:
    data = bytearray(uneven("mp4", "mpeg4"))
    for box in (b"mdhd", b"mvhd"):
        place = data.index(box) + 16
        data[place : place + 4] = bytes(4)
    with pytest.raises(InputError, match="is an MP4 without a timescale, which says how long its frames are shown"):
        load_video(bytes(data))


def test_bytes_and_uris_are_the_same_film(movie: Path) -> None:
    whole = load_video(movie)
    assert len(whole.frames) == 30
    for source in (movie.read_bytes(), movie.as_uri(), str(movie)):
        assert np.array_equal(load_video(source).frames, whole.frames)


@pytest.mark.parametrize(("kind", "codec"), [("mpegts", "mpeg2video"), ("avi", "mpeg4"), ("matroska", "mpeg4")])
def test_a_film_cut_short_gives_the_frames_that_are_there(kind: str, codec: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 64, 3), dtype=np.uint8)
    data = film([*noise], kind, codec)
    video = load_video(data[: len(data) * 2 // 3], lambda total, fps: [0, total - 1])
    assert 0.2 <= video.duration < 3
    assert video.times == (0.0, pytest.approx(video.duration - 0.1))


def test_given_frames_are_all_kept() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    for source in (array, list(array), [Image.fromarray(f) for f in array], array.astype(np.float64) / 255):
        video = load_video(source)
        assert np.array_equal(video.frames, array)
        assert video.times == (0, 1 / 24, 2 / 24, 3 / 24)
        assert video.duration == 4 / 24


FRAMES = [np.full((28, 28, 3), 5 * i, np.uint8) for i in range(48)]


@pytest.mark.parametrize("name", VIDEO)
@pytest.mark.filterwarnings("ignore::saccade.errors.SaccadeWarning")  # of the assumed rate
def test_frames_without_a_file_are_sampled_as_those_of_a_file(name: str) -> None:
    """What transformers' Qwen3-VL does: a list is taken for 24 frames a second."""
    processor = kit(name).ours
    data = film(FRAMES, "matroska", "ffv1", 24)
    for options in (MediaOptions(num_frames=6), MediaOptions(fps=4)):
        expected = processor.load_video(data, options)
        for source in (FRAMES, np.stack(FRAMES), Video(FRAMES, fps=24)):
            sampled = processor.load_video(source, options)
            assert name == "smolvlm" or len(sampled.frames) == (6 if options.num_frames else 8)
            assert len(sampled.frames) == len(expected.frames) < len(FRAMES)
            assert (sampled.times, sampled.duration) == (expected.times, expected.duration)
            assert np.abs(sampled.frames.astype(int) - expected.frames).max() < 6  # what yuv420p loses
            assert processor.load_video(sampled, options) is sampled, "which is sampled once"
        part = {"type": "video", "video": FRAMES, "num_frames": options.num_frames, "fps": options.fps}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
        for other in (MediaOptions(), MediaOptions(num_frames=12)):
            assert processor.prompt(messages, options=other) == processor.prompt("?", videos=[FRAMES], options=options)
        assert processor.prompt(processor.load_media(messages, MediaOptions())) == processor.prompt(messages)
        assert with_sources(*normalise(messages))[0]["content"][0] == part


def test_frames_have_their_own_times() -> None:
    video = Video(FRAMES[:4], times=[0, 1.5, 2, 9], duration=12)
    assert (load_video(video).times, load_video(video).duration) == ((0, 1.5, 2, 9), 12)
    assert Video(FRAMES[:2], times=[0, 3]).duration == 6, "the last is shown as long as the one before"
    assert numbers_of(load_video(video, lambda total, fps: [0, 1, 3])) == [0, 1, 2]
    processor = kit("qwen3_vl").ours
    text = processor.tokenizer.decode(processor.prompt("?", videos=[video]).ids)
    assert re.findall(r"<([\d.]+) seconds>", text) == ["0.8", "5.5"]
    seconds = kit("qwen2_5_vl").ours.prompt("?", videos=[Video(FRAMES[:4], fps=2)]).media[0].tensors
    assert seconds["second_per_grid_ts"].tolist() == [1.0]


def test_frames_that_cannot_be_written_are_taken_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = np.stack(FRAMES)
    frames.flags.writeable = False
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pixels = normalise_frames(load_video(Video(frames, fps=2)).frames, settings)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(pixels, normalise_frames(np.stack(FRAMES), settings))


def test_an_assumed_rate_is_said() -> None:
    for name, options in (("qwen3_vl", MediaOptions()), ("internvl", MediaOptions(fps=2))):
        with pytest.warns(SaccadeWarning, match="24 a second are assumed; give saccade.inputs.media.Video"):
            kit(name).ours.prompt("?", videos=[FRAMES], options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kit("internvl").ours.prompt("?", videos=[FRAMES])
        kit("qwen3_vl").ours.prompt("?", videos=[Video(FRAMES, fps=3)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "needs fps or times"),
        ({"fps": 2, "times": [0, 1]}, "give one of them"),
        ({"fps": 0}, "give a number above 0"),
        ({"fps": "2"}, "fps is '2'; give a number above 0"),
        ({"times": ["0", "1"]}, "give as many times"),
        ({"times": 1}, "give as many times"),
        ({"fps": 2, "duration": "9"}, "duration is '9'; its last frame comes at 0.5 s"),
        ({"times": [0, 1, 2]}, "has 2 frames; give as many times"),
        ({"times": [1, 0]}, "in order"),
        ({"times": [0, float("nan")]}, "in order"),
        ({"times": [0, 4], "duration": 3}, "duration is 3 s; its last frame comes at 4 s"),
        ({"frames": FRAMES[:3], "times": [0, float("nan"), 1]}, "in order"),
        ({"frames": "film.mp4", "fps": 2}, "frames of a Video are of type str; give a list of pictures"),
        ({"frames": torch.zeros(2, 8, 8, 3), "fps": 2}, "frames of a Video are of type Tensor"),
    ],
)
def test_times_that_fit_no_frames_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=r"^[A-Z][^\n]*\.$") as error:
        Video(**{"frames": FRAMES[:2], **given})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "empty"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], "differ in size"),
        (np.zeros((4, 4, 3), np.uint8), "expected [T, H, W, 3]"),
        (np.zeros((0, 4, 4, 3), np.uint8), "expected [T, H, W, 3]"),
        (b"not a film", "not a video that PyAV can decode"),
        ("https://example.com/film.mp4", "download it first"),
        ("no/such/film.mp4", "does not exist"),
        (3.5, "float"),
    ],
)
def test_what_is_no_video_is_refused_with_one_sentence(source: Any, says: str) -> None:
    with pytest.raises(InputError, match=r"^[A-Z][^\n]*\.$") as error:
        load_video(source)
    assert says in str(error.value)


def test_missing_pyav_names_the_extra_to_install(movie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"pip install saccade\[video\]"):
        load_video(movie)


PROCESSORS = {
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor",
}
REFUSED = {(name, *clip) for name in ("llava_onevision", "internvl") for clip in ((2, 8), (0.5, 31))}
"""Processors, rates and clips whose seconds hold fewer frames than are wished, or none of them."""


@pytest.mark.parametrize("wish", [{"fps": 2}, {"fps": 0.5}, {"num_frames": 4}, {"num_frames": 7}], ids=str)
@pytest.mark.parametrize(("total", "fps"), [(30, 10.0), (31, 29.97), (300, 25.0), (2000, 24.0), (8, 1.0)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_frames_are_sampled_as_the_video_processor_does(
    name: str, total: int, fps: float, wish: dict[str, Any]
) -> None:
    family = FAMILIES[name]
    assert family.video_defaults is not None
    if name == "smolvlm":
        wish = {"num_frames": 16, "fps": 1, **wish}
    processor = VIDEO_PROCESSORS[PROCESSORS[name]]()
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    if (name, wish.get("fps"), total) in REFUSED:
        pytest.skip("the processor refuses a clip that short; it is taken whole here")
    expected = processor.sample_frames(metadata=metadata, **wish)
    if len(expected) > wish.get("num_frames", total):
        pytest.skip("the processor rounds a step down, and takes more frames than it was asked for")
    settings = {**family.video_defaults, "num_frames": None, "fps": None, **wish}
    assert list(family.sample_frames(total, fps, settings)) == [int(i) for i in expected]


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_clip_of_a_few_frames_is_no_error(name: str, total: int) -> None:
    k = kit(name)
    frames = np.zeros((total, 48, 64, 3), np.uint8)
    family = FAMILIES[name]
    assert family.video_defaults is not None
    for wish in ({"num_frames": 8, "fps": 1}, {"num_frames": None, "fps": 0.1, **family.video_sampling}):
        kept = list(family.sample_frames(total, 10.0, {**family.video_defaults, **wish}))
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(total))
        assert kept
    assert k.ours.prompt("?", videos=[Video(frames, fps=10.0)]).media


@pytest.mark.parametrize("name", VIDEO)
def test_a_film_becomes_media_of_as_many_frames_as_asked_for(name: str, movie: Path) -> None:
    k = kit(name)
    few, many = (k.ours.prompt("What happens?", videos=[movie], options=MediaOptions(num_frames=n)) for n in (4, 8))
    assert sum(m.n_tokens for m in few.media) < sum(m.n_tokens for m in many.media)
    if name in ("internvl", "smolvlm"):
        assert {m.kind for m in few.media} == {"image"}
    else:
        assert [m.kind for m in few.media] == ["video"] * (4 if name == "gemma4" else 1)


def test_asking_for_frames_and_rate_at_once_is_refused() -> None:
    with pytest.raises(InputError, match="give one of them"):
        MediaOptions(num_frames=4, fps=2)
    wishes: list[dict[str, Any]] = [{"num_frames": 0}, {"fps": -1.0}, {"fps": float("nan")}, {"fps": "2"}]
    for wish in wishes:
        with pytest.raises(InputError, match="give a number above 0"):
            MediaOptions(**wish)


def test_frame_counts_are_spelled_as_smolvlm_reads_them() -> None:
    spelled = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    spelled |= {101: "one hundred and one", 768: "seven hundred and sixty-eight"}
    assert {n: number_words(n) for n in spelled} == spelled
