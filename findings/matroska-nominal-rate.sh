#!/usr/bin/env bash
# Version: PyAV 18.1.0 (FFmpeg 8)
# Behaviour: the `average_rate` of a Matroska stream is nominal. Of a film of variable rate it can be many times the rate of its
#   frames, and seconds that are computed as number / average_rate are wrong; of the same film in MP4 the rate is the mean.
#   Each frame's own `time` is right in both.
# Seen: matroska: average_rate 30, 21 frames, the last one at 10.0 s, 0.7 s by the rate
#       mp4: average_rate 2.0915..., 21 frames, the last one at 10.0 s, 9.6 s by the rate
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==18.1.0 numpy
"$folder/venv/bin/python" - <<'PROGRAM'
import io
from fractions import Fraction

import av
import numpy as np

rates = {}
for kind in ("matroska", "mp4"):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=30)  # what the encoder is told, and Matroska writes
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(21):  # two frames a second
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * number, np.uint8), format="rgb24")
            frame.pts = 500 * number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(io.BytesIO(buffer.getvalue())) as container:
        rate = rates[kind] = float(container.streams.video[0].average_rate)
        times = [frame.time for frame in container.decode(video=0)]
    by_rate = (len(times) - 1) / rate
    print(f"{kind}: average_rate {rate:g}, {len(times)} frames, the last one at {times[-1]} s, {by_rate:.1f} s by the rate")
    assert len(times) == 21 and times[-1] == 10.0, "the frames' own times are no longer right"
assert rates["matroska"] == 30, "the rate is no longer nominal"
assert abs(rates["mp4"] - 2) < 0.2, "the rate is no longer the mean"
PROGRAM
