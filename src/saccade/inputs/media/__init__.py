"""Guarded reader of images and videos: the one place where untrusted files are opened and decoded."""

from saccade.inputs.media.images import load_image, read_source
from saccade.inputs.media.sources import LOCAL, SERVER, MediaLimits
from saccade.inputs.media.videos import Frames, Video, load_video

__all__ = ["LOCAL", "SERVER", "Frames", "MediaLimits", "Video", "load_image", "load_video", "read_source"]
