"""Images from wherever they come, and one sentence when they cannot be used."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from media_files import encoded
from saccade.errors import InputError
from saccade.inputs.families.family import digest
from saccade.inputs.media import load_image

PICTURE = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))


def png(image: Image.Image = PICTURE, **options: Any) -> bytes:
    return encoded("PNG", image, **options)


def same(a: Image.Image, b: Image.Image) -> bool:
    return a.mode == b.mode == "RGB" and np.array_equal(np.asarray(a), np.asarray(b))


def test_every_source_of_the_same_picture_gives_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(png())
    data = base64.b64encode(png()).decode()
    for source in (
        path,
        str(path),
        path.as_uri(),
        png(),
        bytearray(png()),
        f"data:image/png;base64,{data}",
        f"data:;base64,{data[:40]}\n{data[40:]}",
        PICTURE,
        np.asarray(PICTURE),
        np.asarray(PICTURE).astype(np.float32) / 255,
    ):
        assert same(load_image(source), PICTURE), source


def test_grey_arrays_become_grey_rgb() -> None:
    grey = np.arange(35, dtype=np.uint8).reshape(5, 7)
    for source in (grey, grey[..., None], Image.fromarray(grey)):
        assert np.array_equal(np.asarray(load_image(source)), np.repeat(grey[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["uint16", ">u2", "int32", "float32"])
def test_wide_grey_is_neither_clipped_nor_black(kind: str) -> None:
    """Pillow's `convert` takes 0..255 as they are and makes all above white; floats of 0..1 become black."""
    cases = [([0, 5, 128, 255], [0, 5, 128, 255]), ([0, 256, 32768, 65535], [0, 1, 128, 255])]
    if kind == "float32":
        cases.append(([0, 0.25, 0.5, 1], [0, 64, 128, 255]))
    for values, expected in cases:
        image = Image.fromarray(np.array([values], dtype=kind))
        for source in (image, encoded("TIFF", image), *([png(image)] if image.mode == "I;16" else [])):
            assert np.asarray(load_image(source))[0].tolist() == [[value] * 3 for value in expected]


@pytest.mark.parametrize("values", [[-5, 70000], [0, 65536], [-1, 0], [0, np.nan]])
def test_grey_of_no_known_range_is_refused(values: list[float]) -> None:
    image = Image.fromarray(np.array([values], dtype=np.float32))
    with pytest.raises(InputError, match=r"has grey values from .*; scale them to 0\.\.255 or 0"):
        load_image(image)


def test_transparency_is_laid_over_white() -> None:
    clear = np.zeros((2, 2, 4), dtype=np.uint8)
    for source in (clear, Image.fromarray(clear), png(Image.fromarray(clear))):
        assert np.asarray(load_image(source)).min() == 255


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La", "PA"])
def test_every_form_of_transparency_is_laid_over_white(mode: str) -> None:
    """Those that Pillow marks with a small letter hold colours that are multiplied by their opacity."""
    straight = Image.new("RGBA", (1, 1), (100, 100, 100, 128))
    image = straight.convert("LA").convert("La") if mode == "La" else straight.convert(mode)
    colour = np.asarray(load_image(image))[0, 0]
    assert np.abs(colour.astype(int) - (100 * 128 + 255 * 127) // 255).max() <= 1


@pytest.mark.parametrize(
    ("image", "clear"),
    [
        (Image.new("L", (1, 1), 5), 5),
        (Image.fromarray(np.array([[5]], np.uint16)), 5),
        (Image.new("RGB", (1, 1), (1, 2, 3)), (1, 2, 3)),
        (Image.new("RGB", (1, 1), (1, 2, 3)).quantize(), 0),
        (Image.new("RGB", (1, 1), (1, 2, 3)).quantize(), b"\0"),
    ],
    ids=["grey", "16-bit grey", "colour", "one of a palette", "opacities of a palette"],
)
def test_a_png_with_a_clear_colour_shows_white_there(image: Image.Image, clear: Any) -> None:
    assert np.asarray(load_image(png(image, transparency=clear))).tolist() == [[[255] * 3]]


def test_the_second_axis_of_lab_is_no_opacity() -> None:
    """Its bands are L, A and B."""
    image = Image.fromarray(np.array([[[150, 128, 128]]], np.uint8), "LAB")
    assert same(load_image(encoded("TIFF", image)), image.convert("RGB"))


def test_a_name_with_a_tilde_is_a_home_folder_only_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for path in ("home/a.png", "~$a.png", "sub/~a.png"):
        Path(path).parent.mkdir(exist_ok=True)
        PICTURE.save(path)
    for path in ("~/a.png", "~$a.png", "./~$a.png", "sub/~a.png"):
        assert same(load_image(path), PICTURE)
    with pytest.raises(InputError, match="does not exist"):
        load_image("~nobody-of-this-name/a.png")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_odd_exif_tags_are_no_damage_of_the_picture(orientation: int) -> None:
    """A resolution written as text, as some programs do, beside any orientation."""
    entries = struct.pack("<HHIHHHHI4s", 0x0112, 3, 1, orientation, 0, 0x011A, 2, 3, b"72\0\0")
    odd = png(exif=b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4))
    plain = Image.Exif()
    plain[0x0112] = orientation
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(png(exif=plain))))
    assert same(load_image(odd), expected)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("https://example.com/cat.png", "download it first"),
        ("http://example.com/cat.png", "download it first"),
        ("s3://bucket/cat.png", "download it first"),
        ("no/such/file.png", "does not exist"),
        ("bad\0name", "does not exist"),
        ("", "path is empty"),
        (b"", "empty"),
        (b"not an image", "not an image in an accepted format"),
        (png(PICTURE.resize((99, 99)))[:200], "damaged"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "empty"),
        (None, "NoneType"),
        (7, "int"),
        ([PICTURE], "list"),
        (np.zeros((3, 5, 7), np.uint8), "channels last"),
        (np.zeros((0, 5, 3), np.uint8), "channels last"),
        (np.zeros((5, 7, 3), np.int64), "int64"),
        (np.full((5, 7, 3), 200.0), "outside 0..1"),
        (np.full((5, 7, 3), np.nan), "outside 0..1"),
    ],
    ids=lambda v: str(v)[:30].replace("\0", "NUL") if isinstance(v, str) else "",
)
def test_what_is_no_image_is_refused_with_one_sentence(source: Any, says: str) -> None:
    with pytest.raises(InputError, match=r"^[A-Z][^\n]*\.$") as error:
        load_image(source)
    assert says in str(error.value)


def test_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^The path {tmp_path} is a directory; "):
        load_image(tmp_path)


def test_a_digest_tells_names_types_shapes_and_values_apart() -> None:
    x = torch.arange(6.0)
    different = [{"a": x}, {"b": x}, {"a": x.double()}, {"a": x.view(2, 3)}, {"a": x + 1}, {"a": x.bfloat16()}, {}]
    assert len({digest(tensors) for tensors in different}) == len(different)
    assert digest({"a": x, "b": x.view(2, 3).T}) == digest({"b": x.view(2, 3).T.contiguous(), "a": x.clone()})
