"""A batch job in one process and on Ray, through kills of the command and of its actors: the files must be equal.

    unshare --net sh -c 'ip link set lo up && python -m benchmarks.ray_jobs'

Pictures are generated; the model is the built-in draft model, so that thousands of them take minutes on a core. Every
kill is SIGKILL, at a share of the records. Exit code 1: records were lost, doubled or changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

COMMAND = [sys.executable, "-c", "from saccade.cli import main; main()", "batch"]


def draw(folder: Path, count: int) -> None:
    """Pictures of random rectangles, and a broken one in place of every hundredth."""
    folder.mkdir()
    for number in range(count):
        path, rng = folder / f"{number:06d}.png", random.Random(number)
        if number % 100 == 50:
            path.write_bytes(b"no picture")
            continue
        picture = Image.new("RGB", (56, 56), tuple(rng.randrange(256) for _ in range(3)))
        for _ in range(4):
            x, y = rng.randrange(40), rng.randrange(40)
            box = (x, y, x + rng.randrange(4, 16), y + rng.randrange(4, 16))
            picture.paste(tuple(rng.randrange(256) for _ in range(3)), box)
        picture.save(path)


def command(pictures: Path, out: Path, options: argparse.Namespace, *more: str) -> list[str]:
    """Command line of the job."""
    words = [*COMMAND, str(pictures), "-p", "Describe the picture.", "-t", options.target, "--dtype", "float32"]
    words += ["-n", str(options.max_new_tokens), "--rows", str(options.rows), "--workers", "1", "--threads", "1"]
    return [*words, "-o", str(out), *more]


def records(out: Path) -> int:
    """Whole lines of the journal."""
    path = out.with_name(f"{out.name}.journal") / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def below(process: int) -> Iterator[int]:
    """Processes that a process has started, and those that these have."""
    for folder in Path("/proc").glob(f"{process}/task/*/children"):
        for child in map(int, folder.read_text().split()):
            yield child
            yield from below(child)


def named_below(process: int, *names: bytes) -> list[int]:
    """Processes below a process whose names begin so, the oldest first."""
    found = []
    for child in below(process):
        try:
            name = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith(names):
            found.append(child)
    return sorted(found)


def actors(process: int) -> list[int]:
    """Actors of a command."""
    return named_below(process, b"ray::EngineActor")


def interrupted(words: Sequence[str], out: Path, count: int, kills: Sequence[tuple[float, str]]) -> int:
    """Run a command to its end, killed and begun again on the way."""
    met, left = 0, list(kills)
    while True:
        process = subprocess.Popen(words)
        while process.poll() is None:
            if left and records(out) >= left[0][0] * count:
                _, whom = left.pop(0)
                victims = actors(process.pid) if whom == "actor" else [process.pid]
                for victim in victims[:1]:
                    os.kill(victim, signal.SIGKILL)
                    met += 1
                print(f"killed {whom} {victims[:1]} at {records(out)} records", flush=True)
            time.sleep(0.02)
        if process.returncode == 0:
            return met
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"The job ended with {process.returncode}.")


def check(out: Path, whole: Path, count: int) -> None:
    """Compare an output with that of one process, and look for lost and doubled records."""
    keys = [json.loads(line)["key"] for line in (out.parent / f"{out.name}.journal" / "records.jsonl").open()]
    lost, doubled = count - len(set(keys)), len(keys) - len(set(keys))
    equal = out.read_bytes() == whole.read_bytes()
    print(f"{out.stem}: {len(keys)} records, {lost} lost, {doubled} doubled, file {'equal' if equal else 'DIFFERENT'}")
    if lost or doubled or not equal:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    weights = Path(__file__).parents[1] / "src" / "saccade" / "pocket" / "weights" / "draft"
    parser.add_argument("--target", default=str(weights), help="checkpoint (default: the built-in draft model)")
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3, help="of the command, and as many of an actor (default: 3)")
    options = parser.parse_args()
    count, kills = options.pictures, options.kills
    with TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder / "pictures", count)
        on_ray = ("--actors", str(options.actors), "--ray")
        ways = {
            "one-process": ([], ()),
            "ray": ([], on_ray),
            "ray-killed": (
                [((k + 0.5) / (2 * kills + 1), "actor" if k % 2 else "command") for k in range(2 * kills)],
                on_ray,
            ),
        }
        for way, (moments, more) in ways.items():
            out = folder / f"{way}.jsonl"
            begin = time.perf_counter()
            met = interrupted(command(folder / "pictures", out, options, *more), out, count, moments)
            print(f"{way}: {time.perf_counter() - begin:.0f} s, {met} kills", flush=True)
            if met != len(moments):
                raise SystemExit(f"Only {met} of {len(moments)} kills met the work.")
            check(out, folder / "one-process.jsonl", count)


if __name__ == "__main__":
    main()
