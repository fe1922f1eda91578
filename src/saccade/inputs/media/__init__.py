"""Guarded reader of images and videos: the one place where files of strangers are opened and decoded."""

from saccade.inputs.media.images import load_image
from saccade.inputs.media.sources import LOCAL, SERVER, MediaLimits, read_source
from saccade.inputs.media.videos import ASSUMED_FPS, Frames, Video, load_video, wanted_frames

__all__ = [
    "ASSUMED_FPS",
    "LOCAL",
    "SERVER",
    "Frames",
    "MediaLimits",
    "Video",
    "load_image",
    "load_video",
    "read_source",
    "wanted_frames",
]
