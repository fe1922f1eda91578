"""Guarded reader of images and videos: the one place where untrusted files are opened and decoded."""

from saccade.inputs.media.images import load_image, read_source
from saccade.inputs.media.videos import Frames, Video, load_video
from saccade.options import LOCAL, SERVER, MediaLimits

__all__ = ["LOCAL", "SERVER", "Frames", "MediaLimits", "Video", "load_image", "load_video", "read_source"]
