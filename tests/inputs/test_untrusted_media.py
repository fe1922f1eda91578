"""Untrusted images and videos: every known trick is refused with one sentence, honest files stay as they are."""

from __future__ import annotations

import base64
import io
import os
import re
import socket
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from kits import VIDEO, kit
from PIL import Image
from test_same_as_transformers import user

import media_files
from media_files import data_uri
from saccade.errors import InputError, KilledError
from saccade.inputs.media import LOCAL, SERVER, MediaLimits, decoder, load_image, load_video, videos
from saccade.inputs.processor import MediaOptions

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
ONE_SENTENCE = r"^[A-Z][^\n]*[^.\n]\.$"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
IN_PROCESS = replace(SERVER, own_process=False)


def encoded(kind: str, image: Image.Image = PICTURE, **options: Any) -> bytes:
    return media_files.encoded(kind, image, **options)


def refused(source: Any, says: str, limits: MediaLimits = SERVER, load: Any = load_image) -> str:
    with pytest.raises(InputError, match=ONE_SENTENCE) as error:
        load(source, limits=limits)
    assert says in str(error.value)
    return str(error.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG, without any pixels."""
    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + chunk(b"IDAT", b"")


# Images


def test_postscript_never_reaches_ghostscript(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(POSTSCRIPT)
    assert Image.open(path).format == "EPS"  # whose load() starts gs
    for source, limits in ((POSTSCRIPT, SERVER), (POSTSCRIPT, LOCAL), (path, LOCAL)):
        refused(source, "not an image in an accepted format", limits)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "DDS"])
def test_formats_that_are_not_listed_are_refused(kind: str) -> None:
    data = encoded(kind)
    assert Image.open(io.BytesIO(data)).size
    refused(data, "give one of PNG, JPEG, WEBP, GIF, BMP, TIFF")
    assert load_image(data, replace(SERVER, formats=(kind,))).size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_listed_formats_have_the_pixels_that_pillow_reads(kind: str) -> None:
    data = encoded(kind)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    for limits in (SERVER, LOCAL):
        assert np.array_equal(np.asarray(load_image(data, limits)), expected)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("pixels are decoded")


def webp(kind: bytes, size: bytes) -> bytes:
    return b"RIFF\x40\0\0\0WEBP" + kind + b"\x0a\0\0\0" + size + bytes(40)


BOMBS = {
    "png": png_header(13_000, 13_000),
    "webp canvas": webp(b"VP8X", b"\x02\0\0\0" + (16_382).to_bytes(3, "little") * 2),
    "webp lossless": webp(b"VP8L", b"\x2f" + ((16_382 << 14) | 16_382).to_bytes(4, "little")),
    "webp lossy": webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383)),
    "gif with a frame larger than its screen": b"GIF89a\x01\0\x01\0\0\0\0\x2c\0\0\0\0"
    + struct.pack("<HH", 60_000, 60_000)
    + b"\0\x02\0;",
    "bmp": b"BM" + bytes(8) + struct.pack("<IIiiHHIIiiII", 54, 40, 13_000, 13_000, 1, 24, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", BOMBS)
def test_pixels_are_counted_before_they_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never)
    if "webp" in name:
        monkeypatch.setattr("PIL.Image.open", never)
    refused(BOMBS[name], "more than 50000000 pixels")


def png(width: int, height: int, pixels: bytes, colour: int = 0, depth: int = 8, interlace: int = 0) -> bytes:
    size = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


@pytest.mark.parametrize("limits", [SERVER, LOCAL], ids=["server", "local"])
def test_a_short_file_with_an_absurd_side_is_refused_before_it_is_decoded(
    limits: MediaLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = int(limits.aspect_ratio)
    for size in ((1, 40_000_000), (40_000_000, 1), (1, most + 1), (2 * most + 1, 2), (limits.longest_side + 1, 700)):
        data = png(*size, bytes(100))
        assert len(data) < 120
        with monkeypatch.context() as patched:
            patched.setattr("PIL.ImageFile.ImageFile.load", never)
            refused(data, f"is {size[0]} pixels wide and {size[1]} high; give sides of at most", limits)
    refused(Image.new("L", (1, most + 1)), "times as long as the other", limits)
    refused(np.zeros((1, most + 1, 3), np.uint8), "times as long as the other", limits)
    assert load_image(Image.new("L", (most, 1)), limits).size == (most, 1)


@pytest.mark.parametrize("size", [(301, 60_000), (16_382, 800), (8160, 6120)], ids=str)
def test_long_screenshots_panoramas_receipts_and_large_photographs_are_accepted(size: tuple[int, int]) -> None:
    assert load_image(encoded("PNG", Image.new("1", size)), SERVER).size == size


FORMATS: list[tuple[str, dict[str, Any]]] = [
    *(("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})),
    *(("GIF", {}), ("GIF", {"interlace": 0}), ("BMP", {})),
    *(("TIFF", {"compression": kind}) for kind in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
]


@pytest.mark.parametrize(("kind", "options"), FORMATS, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about what is missing
def test_a_file_that_ends_inside_its_pixels_is_refused(kind: str, options: dict[str, Any]) -> None:
    data = encoded(kind, PICTURE.resize((150, 100)), **options)
    for limits in (SERVER, LOCAL):
        assert load_image(data, limits).size == (150, 100)
        for part in (0.2, 0.5, 0.8, 0.95):
            refused(data[: int(part * len(data))], "The image given as bytes is", limits)


@pytest.mark.parametrize("colour", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("interlace", [0, 1], ids=["", "interlaced"])
def test_a_png_whose_compressed_pixels_end_early_is_refused(colour: int, interlace: int) -> None:
    """Its chunks are whole, so that Pillow leaves what is missing black."""
    row = 1 + 20 * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    for rows in (1, 5, 19):
        refused(png(20, 20, bytes(rows * row), colour, interlace=interlace), "is damaged; give a complete image file")
    if colour != 3:  # which needs a palette
        whole = bytes(20 * row + 100 * interlace)  # passes have more rows together, each with a byte for its filter
        assert load_image(png(20, 20, whole, colour, interlace=interlace)).size == (20, 20), "all black, and complete"


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_jpeg_whose_compressed_pixels_end_early_is_refused(mode: str) -> None:
    """It has its end marker, so that Pillow leaves what is missing grey."""
    data = encoded("JPEG", PICTURE.resize((300, 200)).convert(mode))
    start = data.index(b"\xff\xda") + 20
    for part in (0.0, 0.5, 0.97):
        cut = data[: start + int(part * (len(data) - start))].rstrip(b"\xff") + b"\xff\xd9"
        refused(cut, "is damaged; give a complete image file")
    grey = Image.new(mode, (300, 200), 128 if mode == "L" else (128,) * len(mode))
    assert load_image(encoded("JPEG", grey)).size == (300, 200), "all grey, and complete"


def test_a_jpeg_that_is_too_short_for_its_size_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded("JPEG", Image.new("L", (16, 16)))
    place = data.index(b"\xff\xc0") + 5
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never)
    refused(data[:place] + struct.pack(">HH", 7000, 7000) + data[place + 4 :], "is damaged; give a complete image file")


def test_tiles_of_a_tiff_are_bounded_like_a_picture() -> None:
    pixels = zlib.compress(bytes(100))
    tags = [(256, 10), (257, 10), (258, 8), (259, 8), (262, 1), (277, 1), (322, 40_000), (323, 40_000), (324, 8)]
    tags.append((325, len(pixels)))
    data = b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags))
    data += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags) + bytes(4)
    refused(data, "more than 50000000 pixels")


def test_a_picture_beyond_the_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    refused(encoded("PNG"), "needs more memory than there is")


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan is repeated; each costs a pass over all pixels."""
    data = encoded("JPEG", Image.new("L", (2000, 2000), 128), progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:-2] + data[start:-2] * (scans - data.count(b"\xff\xda")) + data[-2:]


def strips(count: int, order: str = "<", big: bool = False, width: int = 200) -> bytes:
    """A TIFF of one row a strip, whose strips are all the same bytes."""
    number, header = ("Q", 16) if big else ("I", 8)
    start = header + 8 * count
    tags = [(256, 1, width), (257, 1, count), (258, 1, 8), (259, 1, 1), (262, 1, 1), (273, count, header)]
    tags += [(277, 1, 1), (278, 1, 1), (279, count, header + 4 * count)]
    data = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    data += struct.pack(order + "HHQ", 8, 0, start) if big else struct.pack(order + "I", start)
    data += struct.pack(f"{order}{count}I", *[header] * count) + struct.pack(f"{order}{count}I", *[width] * count)
    data += struct.pack(order + ("Q" if big else "H"), len(tags))
    for tag, values, value in tags:
        data += struct.pack(f"{order}HH{number}{number}", tag, 4, values, value)
    return data + bytes(8)


def flooded(kind: str, piece: bytes, count: int) -> bytes:
    data = encoded(kind)
    place = 2 if kind == "JPEG" else data.index(b"IDAT") - 4
    return data[:place] + piece * count + data[place:]


LABORIOUS = {
    "scans": lambda n: progressive(n // 1000),
    "markers": lambda n: flooded("JPEG", b"\xff\xfe\0\x02", n),
    "chunks": lambda n: flooded("PNG", chunk(b"aaAa", b""), n),
    "strips": strips,
    "strips, big-endian": lambda n: strips(n, ">"),
    "strips, BigTIFF": lambda n: strips(n, big=True),
}


@pytest.mark.parametrize("name", LABORIOUS)
def test_small_files_that_take_long_are_refused_at_once(name: str) -> None:
    assert load_image(LABORIOUS[name](20_000), SERVER).size
    data, start = LABORIOUS[name](70_000), time.process_time()
    refused(data, "far more parts than a picture needs")
    assert time.process_time() - start < 1
    assert Image.open(io.BytesIO(data)).size, "Pillow would read it"


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"progressive": True, "restart_marker_rows": 1}])
def test_pictures_of_cameras_have_few_parts(options: dict[str, Any]) -> None:
    noise = Image.fromarray(np.random.default_rng(3).integers(0, 256, (600, 800, 3), dtype=np.uint8))
    data = encoded("JPEG", noise, quality=95, **options)
    assert np.array_equal(np.asarray(load_image(data)), np.asarray(Image.open(io.BytesIO(data))))
    followed = data + b"\xff\xda\0\2" * 100  # as a phone's film after the end of the picture
    assert np.array_equal(np.asarray(load_image(followed)), np.asarray(load_image(data)))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_picture(kind: str) -> None:
    pictures = [Image.new("RGB", (30, 20), (n % 256, 255 - n, 0)) for n in range(200)]
    data = encoded(kind, pictures[0], save_all=True, append_images=pictures[1:])
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(load_image(data, SERVER)), expected)


def assert_damage_is_one_sentence(data: bytes, tries: int, load: Any, cut: bool = False) -> None:
    noise, says = np.random.default_rng(1), set()
    for _ in range(tries):
        broken = bytearray(data)
        for place in noise.integers(0, len(data), noise.integers(1, 9)):
            broken[place] = noise.integers(256)
        try:
            load(bytes(broken[: noise.integers(1, len(data) + 1)] if cut else broken), limits=IN_PROCESS)
        except InputError as error:
            says.add(str(error))
    assert all(re.fullmatch(ONE_SENTENCE, sentence) for sentence in says)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_are_refused_or_read_but_nothing_else(kind: str) -> None:
    assert_damage_is_one_sentence(encoded(kind), 150, load_image, cut=True)


# Places


def test_untrusted_sources_name_no_files(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded("PNG"))
    assert load_image(path).size
    for source in (path, str(path), path.as_uri(), f"FILE://{path}", "/etc/passwd", "\0", "", "x"):
        assert "secret" not in refused(source, "here; send its content as a data: URI")
    for source in ("http://127.0.0.1/a.png", "https://example.com/a.png", "ftp://h/a", "gopher://h"):
        assert "send its content as a data: URI" in refused(source, "an address, and none is fetched")


def test_pipes_devices_and_sockets_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "socket", tmp_path / "link", Path("/dev/zero"), Path("/dev/null")):
        refused(path, "is a pipe, socket or device", LOCAL)
        refused(path, "is a pipe, socket or device", LOCAL, load_video)
    refused(tmp_path, "is a directory", LOCAL)
    listener.close()


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(LOCAL.image_bytes + 1)  # without blocks on the disk
    refused(path, "more than 1,073,741,824 bytes", LOCAL)
    few = replace(LOCAL, image_bytes=100, video_bytes=100)
    path.write_bytes(bytes(101))
    refused(path, "more than 100 bytes", few)
    refused(bytes(101), "more than 100 bytes", few)
    refused(path, "more than 100 bytes", few, load_video)
    monkeypatch.setattr(base64, "b64decode", never)
    refused("data:image/png;base64," + "A" * 10_000, "more than 100 bytes", few)


def test_limits_are_above_zero_hosts_well_formed_and_formats_no_programs() -> None:
    with pytest.raises(InputError, match="EPS can run other programs"):
        MediaLimits(formats=("PNG", "EPS"))
    for name in ("image_bytes", "decode_seconds", "media"):
        with pytest.raises(InputError, match=f"media limit {name} is 0"):
            MediaLimits(**{name: 0})
    for domain in ("https://example.com", "a b", "example.com:x", ""):
        with pytest.raises(InputError, match="is no host"):
            MediaLimits(domains=(domain,))


# Videos


def film(kind: str = "mp4", codec: str = "mpeg4", frames: int = 12, size: tuple[int, int] = (64, 48)) -> bytes:
    pixels = [np.full((size[1], size[0], 3), (9 * n) % 256, np.uint8) for n in range(frames)]
    for frame in pixels:
        frame[: size[1] // 2, : size[0] // 4] = 255 - frame[0, 0]  # up and down, left and right differ
    return media_files.film(pixels, kind, codec, 25 if codec == "mpeg1video" else 10)


FILMS = [
    ("mp4", "mpeg4"),
    ("mov", "mjpeg"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("gif", "gif"),
    ("avi", "mpeg4"),
    ("mpegts", "mpeg2video"),
    ("mpeg", "mpeg1video"),
]


@pytest.mark.parametrize(("kind", "codec"), FILMS)
def test_listed_containers_have_the_frames_that_pyav_decodes(kind: str, codec: str) -> None:
    data = film(kind, codec)
    with av.open(io.BytesIO(data)) as container:
        expected = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    for limits in (IN_PROCESS, LOCAL):
        assert np.array_equal(load_video(data, limits=limits).frames, expected)


def test_a_separate_process_decodes_the_same_frames() -> None:
    # The second does not say how many, and the third has lines that are padded.
    for kind, codec, size in (("mp4", "mpeg4", (64, 48)), ("mpegts", "mpeg2video", (64, 48)), ("gif", "gif", (60, 40))):
        apart, here = (
            load_video(film(kind, codec, size=size), lambda total, fps: [0, 2, total - 1], limits)
            for limits in (SERVER, LOCAL)
        )
        assert np.array_equal(apart.frames, here.frames)
        assert (apart.times, apart.duration) == (here.times, here.duration)


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_films_that_a_telephone_stored_lying_stand_upright(matrix: tuple[int, ...], turns: int) -> None:
    data = bytearray(film())
    at = data.index(b"tkhd") + 44  # the track header's matrix of nine fixed-point numbers
    a, b, c, d = (part * 0x10000 for part in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000)
    assert np.array_equal(load_video(bytes(data)).frames, np.rot90(load_video(film()).frames, turns, axes=(1, 2)))


SDP = (
    b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
    b"m=video 45678 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
)
PLAYLISTS = {
    "ffconcat": b"ffconcat version 1.0\nfile film.mp4\n",
    "sdp": SDP,
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfilm.mp4\n#EXT-X-ENDLIST\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
    b"<Representation><BaseURL>film.mp4</BaseURL></Representation></AdaptationSet></Period></MPD>",
    "imf": b'<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/2016">',
    "rtsp": b"rtsp://127.0.0.1/film",
    "subtitles": b"1\n00:00:01,000 --> 00:00:02,000\nhello\n",
    "lrc": b"[00:00.00]hello\n",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='film.mp4'/></svg>",
    "png": encoded("PNG"),
}


@pytest.mark.parametrize("name", PLAYLISTS)
@pytest.mark.parametrize("limits", [SERVER, IN_PROCESS, LOCAL], ids=["server", "in process", "local"])
def test_texts_and_playlists_never_reach_a_demuxer(
    name: str, limits: MediaLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "film.mp4").write_bytes(film())
    monkeypatch.chdir(tmp_path)
    if name == "ffconcat":  # it does read the other file
        with av.open(io.BytesIO(PLAYLISTS[name])) as container:
            assert sum(1 for _ in container.decode(video=0)) == 12
    opened = []
    monkeypatch.setattr(av, "open", lambda *given, **options: opened.append(given))
    monkeypatch.setattr(videos.subprocess, "Popen", never)
    refused(PLAYLISTS[name], "not a video that PyAV can decode", limits, load_video)
    assert not opened


def test_the_demuxer_is_the_named_one_whatever_follows_the_first_bytes() -> None:
    for start in (b"\0\0\0\x08ftyp", b"OggS", b"\x1aE\xdf\xa3", b"\0\0\x01\xba"):
        refused(start + PLAYLISTS["ffconcat"] + SDP, "not a video that PyAV can decode", IN_PROCESS, load_video)


def test_whitelists_hold_even_if_the_first_bytes_lied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wall: FFmpeg itself refuses what is not on its lists."""
    (tmp_path / "film.mp4").write_bytes(film())
    monkeypatch.chdir(tmp_path)
    real = av.open
    for name in ("ffconcat", "sdp"):
        monkeypatch.setattr(decoder, "container_of", lambda _: "mov")
        monkeypatch.setattr(av, "open", lambda file, format, options: real(file, options=options, timeout=5))
        refused(PLAYLISTS[name], "not a video that PyAV can decode", IN_PROCESS, load_video)


def test_the_third_wall_is_a_process_that_can_open_nothing(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(film())
    program = f"""
import io, os, runpy, socket
program = runpy.run_path({decoder.__file__!r})
program["_import_all"]()
program["confine"](2 << 30, 5, files=False)
import av
def read(data):
    with av.open(io.BytesIO(data), timeout=5) as container:
        return sum(1 for _ in container.decode(video=0))
assert read({film()!r}) == 12
for attempt in (
    lambda: open("film.mp4"),
    lambda: socket.socket(),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: os.pipe(),
    lambda: read({PLAYLISTS["ffconcat"]!r}),
    lambda: read({SDP!r}),
    lambda: bytearray(3 << 30),
):
    try:
        attempt()
    except (OSError, MemoryError, ValueError):
        continue
    print("not confined")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "not confined" not in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"video_frames": 11}, "more than 11 frames"),
        ({"video_seconds": 1.1}, "longer than 1.1 seconds"),
        ({"video_pixels": 64 * 48 - 1}, "no frame size from 1 to 3071 pixels"),
        ({"total_pixels": 12 * 64 * 48 - 1}, "sampled frames of more than 36863 pixels"),
        ({"longest_side": 63}, "sides of more than 63 pixels"),
        ({"aspect_ratio": 1.3}, "more than 1.3 times as long as the other"),
        ({"video_bytes": 500}, "more than 500 bytes"),
        ({"codecs": ("h264",)}, "a codec that is not accepted"),
        ({"containers": ("matroska",)}, "not a video that PyAV can decode"),
        ({"decode_seconds": 1e-9}, "longer than 1e-09 seconds to decode"),
    ],
    ids=str,
)
def test_every_limit_of_videos_holds(change: dict[str, Any], says: str) -> None:
    for kind, codec in (("mp4", "mpeg4"), ("mpegts", "mpeg2video")):  # the second does not say how many frames
        data = film(kind, codec)
        load_video(data, limits=IN_PROCESS)
        refused(data, says, replace(IN_PROCESS, **change), load_video)


def test_a_film_that_needs_too_much_memory_ends_its_own_process_alone() -> None:
    data = film("matroska", "libx264", 2, (2048, 2048))
    assert len(load_video(data, limits=SERVER).frames) == 2
    few = replace(SERVER, decode_memory=16 << 20)  # less than its frames, which decoders report in several ways
    refused(data, "The video given as bytes", few, load_video)


def test_a_decoder_that_hangs_or_crashes_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, crash = tmp_path / "stuck.py", tmp_path / "crash.py"
    stuck.write_text("import time\ntime.sleep(600)")
    crash.write_text("import os\nos.abort()")
    for program, limits, says in (
        (stuck, replace(SERVER, decode_seconds=0.5), "takes longer than 0.5 seconds"),
        (crash, SERVER, "not a video that PyAV can decode"),
    ):
        monkeypatch.setattr(videos.decoder, "__file__", str(program))
        refused(film(), says, limits, load_video)


def test_a_decoder_that_the_system_kills_is_no_fault_of_the_film(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, slow = tmp_path / "killed.py", tmp_path / "slow.py"
    killed.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    slow.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)")
    monkeypatch.setattr(videos.decoder, "__file__", str(killed))
    with pytest.raises(KilledError, match=ONE_SENTENCE):
        load_video(film(), limits=SERVER)
    monkeypatch.setattr(videos.decoder, "__file__", str(slow))
    refused(film(), "longer than 30 seconds to decode", SERVER, load_video)


@pytest.mark.parametrize(
    ("head", "content"),
    [('{"refused": "no such reason"}', b""), ("[1, 2]", b""), ("[1, 10.0, 3072]", b"x"), ('[1e400, "x", null]', b"")],
)
def test_a_captured_decoder_can_say_nothing_harmful(
    head: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "captured.py"
    data = struct.pack("<QQ", len(head), len(content)) + head.encode() + content
    program.write_text(f"import sys\nsys.stdout.buffer.write({data!r})")
    monkeypatch.setattr(videos.decoder, "__file__", str(program))
    refused(film(), "not a video that PyAV can decode", SERVER, load_video)


def test_the_decoder_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    given: dict[str, Any] = {}
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        given.update(options)
        return real(*arguments, **options)

    monkeypatch.setattr(videos.subprocess, "Popen", popen)
    assert len(load_video(film(), limits=SERVER).frames) == 12
    assert "HF_TOKEN" not in given["env"]


@pytest.mark.parametrize(("kind", "codec"), FILMS)
def test_damaged_films_are_refused_or_read_but_nothing_else(kind: str, codec: str) -> None:
    assert_damage_is_one_sentence(film(kind, codec), 25, load_video)


def test_a_film_cut_inside_its_index_is_not_said_to_have_another_codec() -> None:
    data = film()
    begin, index = data[: int.from_bytes(data[:4], "big")], data[data.index(b"moov") - 4 :]
    for length in range(320, 480, 10):
        with pytest.raises(InputError) as refusal:
            load_video(begin + index[:length], limits=IN_PROCESS)
        assert "is not accepted" not in str(refusal.value)


def test_frames_given_one_by_one_are_bounded() -> None:
    refused([PICTURE] * 3, "has 3 video frames; at most 2", replace(SERVER, video_frames=2), load_video)
    few = replace(SERVER, total_pixels=2 * 40 * 50)
    assert len(load_video([PICTURE] * 2, limits=few).frames) == 2
    refused([PICTURE] * 3, "more than 4000 pixels together", few, load_video)


# Whole conversations


@pytest.mark.parametrize("name", VIDEO)
def test_loaded_messages_make_the_prompt_of_their_files(name: str) -> None:
    processor = kit(name).ours
    messages = user(
        {"type": "image_url", "image_url": {"url": data_uri(encoded("PNG"))}},
        {"type": "video_url", "video_url": {"url": data_uri(film(), "video/mp4")}},
        "What?",
    )
    loaded = processor.load_media(messages, MediaOptions(num_frames=4, limits=IN_PROCESS))
    kinds = [part["type"] for part in loaded[0]["content"]]
    assert kinds == ["image", "video", "text"]
    assert processor.prompt(loaded, options=MediaOptions(limits=SERVER, num_frames=4)) == processor.prompt(
        messages, options=MediaOptions(num_frames=4)
    )


def test_a_conversation_has_a_limit_of_media_and_of_pixels() -> None:
    processor = kit("llava").ours
    picture = {"type": "image_url", "image_url": data_uri(encoded("PNG"))}
    for call in (processor.load_media, processor.prompt):
        with pytest.raises(InputError, match="has 3 images and videos; at most 2 are accepted"):
            call(user(*[picture] * 3, "What?"), options=MediaOptions(limits=replace(SERVER, media=2)))
        with pytest.raises(InputError, match="more than 5999 pixels together"):
            call(user(*[picture] * 3, "What?"), options=MediaOptions(limits=replace(SERVER, total_pixels=5999)))
        call(user(*[picture] * 3, "What?"), options=MediaOptions(limits=replace(SERVER, total_pixels=6000)))
        with pytest.raises(InputError, match="given as a path, and no files are read here"):
            call(user({"type": "image", "path": "/etc/passwd"}, "What?"), options=MediaOptions(limits=SERVER))
