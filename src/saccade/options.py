"""Options as dataclasses, checked and made from tables, without torch; those of tree policies and rules among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from saccade.errors import InputError, MethodError, SaccadeError
from saccade.wording import meant

EXECUTORS = ("auto", "stock", "lean", "graphs", "openvino")
"""What may run a model's decoder (`saccade.target_model.executor`); auto is the fastest of those that fit."""
WEIGHTS = STORED, INT8 = "stored", "int8"
"""What a target's weights may be: as they are, or rounded (`saccade.target_model.int8`)."""
PREFILL_CHUNK = 512  # default number of prompt tokens per step
LONGEST_STEP = 3.0  # default length of a step with a part of a prompt, over one without
MEDIA_BYTES = 256 * 2**20  # default size limit of a cache of media

T = TypeVar("T")
_WORDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    dict: ((Mapping,), "a table"),
    Mapping: ((Mapping,), "a table"),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    default: Any  # its type is the option's
    meaning: str  # one line
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()  # of a word
    takes: Callable[[Any], bool] | None = None  # predicate of values of other types that are accepted too
    beyond_low: bool = False  # the lowest value itself is out of range

    @property
    def range(self) -> str:
        """The accepted values as text; empty for any value of the type."""
        if self.choices:
            return " | ".join(self.choices)
        if self.high is not None:
            return f"{'above ' * self.beyond_low}{self.low:g} to {self.high:g}"
        return "" if self.low is None else f"{self.low:g} or more"

    def check(self, name: str, owner: str, value: Any) -> None:
        """Raise `MethodError` unless a value is of the right type and in range."""
        if self.takes is not None and self.takes(value):
            return
        if expected := _mismatch(value, type(self.default)):
            raise MethodError(f"Option {name} of {owner} must be {expected}, not {value!r}.")
        if self.choices and value not in self.choices:
            hint = meant(value, self.choices)
            choices = ", ".join(self.choices)
            raise MethodError(f"Option {name} of {owner} must be one of {choices}, not {value!r}{hint}.")
        is_low = self.low is not None and (value < self.low or (self.beyond_low and value == self.low))
        if is_low or not (self.high is None or value <= self.high):
            words = f"in the range {self.range}" if self.high is not None else f"at least {self.low:g}"
            raise MethodError(f"Option {name} of {owner} must be {words}, not {value!r}.")


def _mismatch(value: Any, hint: Any) -> str:
    """Expected type in words when a value does not have it; empty when it does, or the hint is not checked."""
    hint, _ = in_tables(hint)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in options:
        return ""
    names = []
    for option in options:
        if option is NoneType:
            continue
        types, words = _WORDS.get(get_origin(option) or option, ((object,), ""))
        if isinstance(value, types) and (bool in types or object in types or not isinstance(value, bool)):
            return ""
        names.append(words)
    return " or ".join(names)


def in_tables(hint: Any) -> tuple[Any, str]:
    """Return the type and the help of a field: those that ``Annotated`` names, or the type alone."""
    if get_origin(hint) is not Annotated:
        return hint, ""
    usual, words, *limited = get_args(hint)
    return (limited or [usual])[0], words


def make(
    kind: type[T],
    table: Mapping[str, Any],
    where: str,
    *,
    prefix: str = "",
    error: type[SaccadeError] = SaccadeError,
) -> T:
    """Make a dataclass of the values of a table; fields of numbers, text, truths and tables are checked."""
    check_keys(table, (entry.name for entry in fields(kind)), where, prefix=prefix, error=error)  # type: ignore[arg-type]
    hints = get_type_hints(kind, include_extras=True)
    for name, value in table.items():
        expected = _mismatch(value, hints[name])
        if expected:
            raise error(f"{where}: {prefix}{name} must be {expected}, not {value!r}.")
    for entry in fields(kind):  # type: ignore[arg-type]
        if entry.name not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise error(f"{where}: {prefix}{entry.name} is missing.")
    try:
        return kind(**table)
    except SaccadeError as problem:  # of its own checks, which do not know the place
        raise error(f"{where}: {problem}") from problem


def check_keys(
    table: Mapping[str, Any],
    known: Iterable[str],
    where: str,
    *,
    prefix: str = "",
    error: type[SaccadeError] = SaccadeError,
) -> None:
    """Raise ``error`` for a key that is not known."""
    names = sorted(known)
    unknown = next((key for key in table if key not in names), None)
    if unknown is not None:
        expected = ", ".join(prefix + name for name in names)
        raise error(f"{where}: unknown key {prefix + unknown!r}{meant(unknown, names)}; expected one of {expected}.")


def check_whole(value: Any, least: int, name: str, where: str = "", error: type[SaccadeError] = SaccadeError) -> None:
    """Raise ``error`` unless a value is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        place = f"{where}: " if where else ""
        raise error(f"{place}{name} must be a whole number of at least {least}, not {value!r}.")


def option(default: Any, meaning: str, low: float | None = None, high: float | None = None, **limits: Any) -> Any:
    """Return a dataclass field with an `Option`."""
    return field(default=default, metadata={"option": Option(default, meaning, low, high, **limits)})


def options_of(group: Any) -> dict[str, Option]:
    """Return the options of a group by name."""
    return {entry.name: entry.metadata["option"] for entry in fields(group) if "option" in entry.metadata}


class Checked:
    """Base of options that are checked when they are set."""

    def __post_init__(self) -> None:
        for name, known in options_of(type(self)).items():
            known.check(name, type(self).__name__, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Frames that are read of a video: so many, or so many a second; by default as the checkpoint has it."""

    num_frames: Annotated[int | None, "Frames sampled from a video; by default the checkpoint's."] = None
    fps: Annotated[float | None, "Frames per second sampled from a video, likewise."] = None


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are accepted by default, under Pillow's names."""
PROGRAMS = frozenset({"EPS", "WMF", "FPX", "MIC"})
"""Formats of Pillow that run another program or read a file inside the file; never accepted."""
CONTAINERS = ("mov", "matroska", "gif", "avi", "mpegts", "mpeg", "ogg")
"""Video containers that are accepted by default, under FFmpeg's names of their demuxers; ``mov`` includes MP4."""
CODECS = (
    *("h264", "hevc", "libdav1d", "libaom-av1", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4"),
    *("mpeg1video", "mpeg2video", "h263", "mjpeg", "theora", "gif"),
)
"""Video decoders that are accepted by default, under FFmpeg's names."""
_LOCAL_CODECS = (
    *("ffv1", "rawvideo", "png", "prores", "dnxhd", "huffyuv", "ffvhuff", "utvideo", "qtrle", "cfhd", "vc1"),
    *("flv", "msmpeg4", "msmpeg4v2", "wmv1", "wmv2", "wmv3", "dvvideo", "cinepak", "msvideo1", "svq3"),
)
_DOMAIN = re.compile(r"(\*|\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of the reader of images and videos; the defaults are those for untrusted input (`SERVER`).

    >>> saccade.load("pocket").generate("Hello", images=["photo.png"], limits=MediaLimits())
    Traceback (most recent call last):
    saccade.errors.InputError: ...
    """

    paths: bool = False  # whether paths and `file://` addresses are read
    domains: tuple[str, ...] = ()  # hosts that http(s) addresses may name
    private_addresses: bool = False  # whether those hosts may be this machine or in a private network
    fetch_seconds: float = 10.0  # seconds of one download, name resolution and handshakes included
    formats: tuple[str, ...] = FORMATS  # image formats, under Pillow's names
    image_bytes: int = 20 << 20  # bytes of an image file
    image_pixels: int = 50_000_000  # width times height of an image, which takes 4 bytes per pixel once decoded
    longest_side: int = 65_535  # pixels along a side of an image or of a video's frames
    aspect_ratio: float = 200.0  # how many times longer than wide these may be, or wider than long
    containers: tuple[str, ...] = CONTAINERS  # video containers, under FFmpeg's names of their demuxers
    codecs: tuple[str, ...] = CODECS  # video decoders, under FFmpeg's names
    own_process: bool = True  # whether videos are decoded in a process of their own
    video_bytes: int = 100 << 20  # bytes of a video file
    video_pixels: int = 4096 * 2304  # width times height of a video's frames
    video_frames: int = 20_000  # frames of a whole video
    video_seconds: float = 600.0  # seconds of a whole video
    decode_seconds: float = 30.0  # seconds until a video must be decoded
    decode_memory: int = 1 << 30  # bytes that this process may allocate
    media: int = 32  # images and videos of one conversation
    total_pixels: int = 250_000_000  # pixels of all images and sampled frames of one conversation

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise InputError(f"The media limit {entry.name} is {value}; give a number above 0.")
        for domain in self.domains:
            if not _DOMAIN.fullmatch(domain):
                raise InputError(
                    f"The domain {domain!r} is no host; give example.com, .example.com or *, with :port if needed."
                )
        if unsafe := PROGRAMS.intersection(self.formats):
            raise InputError(f"The image format {min(unsafe)} can run other programs; leave it out of the formats.")


SERVER = MediaLimits()
"""Limits for untrusted media: bytes and ``data:`` URIs alone."""

LOCAL = MediaLimits(
    paths=True,
    image_bytes=1 << 30,
    image_pixels=178_956_970,
    longest_side=250_000,
    aspect_ratio=1000.0,
    containers=(*CONTAINERS, "flv", "asf"),
    codecs=(*CODECS, *_LOCAL_CODECS),
    own_process=False,
    video_bytes=8 << 30,
    video_pixels=8192 * 8192,
    video_frames=1_000_000,
    video_seconds=24 * 3600.0,
    decode_seconds=3600.0,
    decode_memory=64 << 30,
    media=4096,
    total_pixels=8_000_000_000,
)
"""Limits for a user's own media on the command line and in Python: paths are read, nothing is fetched."""


@dataclass(frozen=True)
class NoOptions:
    """Nothing to choose: the static tree, and the lossless rules."""


@dataclass(frozen=True)
class ChainOptions(Checked):
    """A chain of draft tokens."""

    gamma: int = option(5, "tokens of a chain", 1)


@dataclass(frozen=True)
class PacedOptions(Checked):
    """A chain of as many draft tokens as pay, by measured costs and acceptance; none where no number does."""

    gamma: int = option(8, "most tokens of a chain", 1)


@dataclass(frozen=True)
class SuffixOptions(Checked):
    """A tree of what followed the longest matches (Oliaro et al. 2024)."""

    gamma: int = option(24, "most tokens copied in a row", 1)
    max_ngram: int = option(3, "longest n-gram by which matches are found", 1)
    max_spec_factor: float = option(2.0, "most draft tokens per token of the longest match", 0.1)
    min_token_prob: float = option(0.1, "probability below which a token is not drafted", 0, 1, beyond_low=True)
    total: int = option(32, "most draft tokens of a step", 1)


@dataclass(frozen=True)
class BranchesOptions(Checked):
    """Chains that branch at the root (LVSpec, Appendix E)."""

    branches: int = option(2, "chains that branch at the root", 1)
    gamma: int = option(5, "tokens of a chain", 1)


@dataclass(frozen=True)
class ConfidentOptions(Checked):
    """A chain that ends at low draft probability (Kangaroo, Section 3)."""

    gamma: int = option(5, "tokens of a chain", 1)
    confidence: float = option(0.6, "least draft probability at which drafting continues; 0 never stops early", 0, 1)


@dataclass(frozen=True)
class DynamicOptions(Checked):
    """EAGLE-2's tree: expand the likeliest nodes, verify the likeliest of all (Section 4)."""

    top: int = option(10, "children of a node, and nodes expanded per level", 1)
    max_depth: int = option(6, "levels", 1)
    total: int = option(60, "verified nodes, without the root", 1)


@dataclass(frozen=True)
class WidthOptions(Checked):
    """TABED's token tree: the likeliest paths at each depth (Section 6.1)."""

    width: int = option(2, "nodes per depth, those of the likeliest paths", 1)
    max_depth: int = option(5, "levels", 1)


@dataclass(frozen=True)
class OneShotOptions(Checked):
    """The likeliest paths above a floor, for drafters that predict several tokens in one pass (best-first)."""

    total: int = option(25, "verified nodes, without the root", 1)
    floor: float = option(0.04, "least probability of a node's path; 0: none", 0, 1)
    max_depth: int = option(16, "levels", 1)


@dataclass(frozen=True)
class SageOptions(Checked):
    """SAGE's tree, shaped by the entropy of the draft distribution (Sections 3.1 to 3.3)."""

    d_min: int = option(3, "levels at confidence 0", 1)
    d_max: int = option(8, "levels at confidence 1, where the history starts", 1)
    ceiling: int = option(12, "largest d_max that the history may reach", 1)
    w_min: int = option(2, "children of the root at confidence 1", 1)
    w_max: int = option(10, "children of the root at confidence 0", 1)
    total: int = option(64, "verified nodes, without the root", 1)
    k: int = option(10, "number of most likely tokens whose entropy counts", 2)
    threshold: float = option(0.1, "a node of level l needs a probability above threshold * l / D", 0)
    probability: str = option("path", "of a node: of its path, or its own", choices=("path", "own"))
    signal: str = option("entropy", "confidence from entropy or the top token", choices=("entropy", "top"))
    alpha_of: str = option(
        "root",
        "draft distribution of the confidence: after the step's root or its last accepted node",
        choices=("root", "accepted"),
    )
    lookahead: bool = option(True, "a step's confidence shapes the next step's tree; false: its own")
    window: int = option(10, "steps over which accepted lengths are averaged; 0: d_max never moves", 0)
    low: float = option(2.0, "an average below it lowers d_max by one", 0)
    high: float = option(3.0, "an average above it raises d_max by one", 0)


@dataclass(frozen=True)
class PruningOptions(Checked):
    """The share of the visual tokens that the drafter keeps (SpecVLM)."""

    keep_images: float = option(1.0, "share of an image's visual tokens that the drafter keeps", 0, 1, beyond_low=True)
    keep_videos: float = option(1.0, "share of a video's visual tokens that the drafter keeps", 0, 1, beyond_low=True)
    keep_by: str = option("specvlm", "selection of the kept visual tokens", choices=("specvlm", "attention", "uniform"))
    attention_mass: float = option(0.4, "share of the attention covered by the first stage of specvlm", 0, 1)


RELEVANCES: dict[str, Callable[[Any], Any]] = {}
"""Relevances of one's own for LVSpec, by name: functions of a `DraftTree` that return a number per node, ``[B, N]``."""


@dataclass(frozen=True)
class LVSpecOptions(Checked):
    """LOSSY: loose acceptance of the least visual draft tokens (LVSpec, Section 3)."""

    loose_share: float = option(0.7, "share of the draft tokens that are accepted loosely (LVSpec's lambda)", 0, 1)
    nearest: int = option(10, "number of most similar visual tokens that are averaged (N)", 1)
    shift: bool = option(True, "accept a token if the target's token occurs elsewhere in the draft")
    space: str = option("hidden", "compared states", choices=("hidden", "embedding"))
    position: str = option(
        "verifying",
        "state that represents a draft token: its parent's or its own",
        choices=("verifying", "own"),
    )
    entropy: float = option(0.0, "least entropy of the target at a loosened token, as in fly; 0: none", 0, 1)
    min_probability_ratio: float = option(
        0.0, "least probability of a loosened token as a share of that of the target's own token; 0: none", 0, 1
    )
    loose_probability_ratio: float = option(
        0.0, "share of that probability from which a token is loose at any relevance; 0: none", 0, 1
    )
    relevance: str = option(
        "states",
        "similarity of states, or one's own by its name in saccade.options.RELEVANCES",
        choices=("states",),
        takes=lambda value: isinstance(value, str) and value in RELEVANCES,
    )


@dataclass(frozen=True)
class FLyOptions(Checked):
    """LOSSY: forgiven mismatches at high target entropy (FLy)."""

    entropy: float = option(0.2, "least entropy of the target at a forgiven mismatch, as a share of the largest", 0, 1)
    deferred: int = option(4, "following draft tokens that must match (FLy's window W)", 0)


@dataclass(frozen=True)
class RandomOptions(Checked):
    """LOSSY: a random share of the draft tokens is accepted loosely (LVSpec, Figure 7)."""

    loose_share: float = option(0.7, "share of the draft tokens that are accepted loosely (LVSpec's lambda)", 0, 1)
