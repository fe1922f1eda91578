"""Videos are decoded, sampled as the family's own video processor does, and stamped with their times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits import VIDEO, kit
from PIL import Image
from torchvision_free import VIDEO_PROCESSORS
from transformers.video_utils import VideoMetadata

from media_files import film
from saccade.errors import InputError
from saccade.inputs.families import FAMILIES
from saccade.inputs.families.idefics import number_words
from saccade.inputs.media import load_video
from saccade.inputs.processor import MediaOptions


@pytest.fixture(scope="module")
def movie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seconds at 10 frames a second; frame i is a grey of 8 * i."""
    path = tmp_path_factory.mktemp("movie") / "film.mp4"
    path.write_bytes(film([np.full((48, 64, 3), 8 * i, np.uint8) for i in range(30)]))
    return path


def test_a_file_is_decoded_with_its_times(movie: Path) -> None:
    video = load_video(movie, lambda total, fps: [0, total // 2, total - 1])
    assert (video.total, video.fps, video.indices) == (30, 10.0, (0, 15, 29))
    assert video.timestamps == (0.0, 1.5, 2.9)
    assert video.duration == 3.0
    assert video.sampled_fps == pytest.approx(1.0)
    assert video.frames.shape == (3, 48, 64, 3)
    assert np.abs(video.frames.mean((1, 2, 3)) - [0, 120, 232]).max() < 4  # what mpeg4 loses


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
    assert 2 <= video.total < 30
    assert video.indices == (0, video.total - 1)


def test_given_frames_are_all_kept() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    for source in (array, list(array), [Image.fromarray(f) for f in array], array.astype(np.float64) / 255):
        video = load_video(source, lambda total, fps: [0])
        assert np.array_equal(video.frames, array)
        assert (video.indices, video.total, video.fps) == ((0, 1, 2, 3), 4, None)


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
    try:
        expected = processor.sample_frames(metadata=metadata, **wish)
    except (ValueError, ZeroDivisionError):
        pytest.skip("the processor refuses a clip that short; it is taken whole here")
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
    assert k.ours.prompt("?", videos=[frames]).media


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
    wishes: list[dict[str, Any]] = [{"num_frames": 0}, {"fps": -1.0}]
    for wish in wishes:
        with pytest.raises(InputError, match="give a number above 0"):
            MediaOptions(**wish)


def test_frame_counts_are_spelled_as_smolvlm_reads_them() -> None:
    spelled = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    spelled |= {101: "one hundred and one", 768: "seven hundred and sixty-eight"}
    assert {n: number_words(n) for n in spelled} == spelled
