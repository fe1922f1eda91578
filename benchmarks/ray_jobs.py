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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from PIL import Image

from saccade.pocket import draft_path

SACCADE = [sys.executable, "-c", "from saccade.cli import main; main()"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of a trial on Ray, with the model that it runs."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", default=str(draft_path()), help="checkpoint (default: the built-in draft model)")
    return made


def picture(number: int) -> Image.Image:
    """A picture of random rectangles."""
    rng = random.Random(number)

    def colour() -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(3))

    drawn = Image.new("RGB", (56, 56), colour())
    for _ in range(4):
        x, y = rng.randrange(40), rng.randrange(40)
        drawn.paste(colour(), (x, y, x + rng.randrange(4, 16), y + rng.randrange(4, 16)))
    return drawn


def write_pictures(folder: Path, count: int) -> None:
    """Write pictures, and a broken one in place of every hundredth."""
    folder.mkdir()
    for number in range(count):
        path = folder / f"{number:06d}.png"
        if number % 100 == 50:
            path.write_bytes(b"no picture")
        else:
            picture(number).save(path)


def command(pictures: Path, out: Path, options: argparse.Namespace, *more: str) -> list[str]:
    """Command line of the job."""
    words = [
        *SACCADE,
        "batch",
        str(pictures),
        "-p",
        "Describe the picture.",
        "-t",
        options.target,
        "--dtype",
        "float32",
    ]
    words += ["-n", str(options.max_new_tokens), "--rows", str(options.rows), "--workers", "1", "--threads", "1"]
    return [*words, "-o", str(out), *more]


def records(out: Path) -> int:
    """Whole lines of the journal."""
    path = out.with_name(f"{out.name}.journal") / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def named_below(process: int, name: str) -> list[int]:
    """Processes below a process whose names begin so, the oldest first."""
    named = []
    for child in psutil.Process(process).children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(child.cmdline()).startswith(name):
                named.append(child.pid)
    return sorted(named)


def interrupted(words: Sequence[str], out: Path, count: int, kills: Sequence[tuple[float, str]]) -> int:
    """Run a command to its end, killed and begun again on the way."""
    met, left = 0, list(kills)
    while True:
        process = subprocess.Popen(words)
        while process.poll() is None:
            if left and records(out) >= left[0][0] * count:
                _, whom = left.pop(0)
                victims = [process.pid] if whom == "command" else named_below(process.pid, "ray::EngineActor")
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
    trial = parser(__doc__)
    trial.add_argument("--pictures", type=int, default=2000)
    trial.add_argument("--actors", type=int, default=2)
    trial.add_argument("--rows", type=int, default=8)
    trial.add_argument("--max-new-tokens", type=int, default=8)
    trial.add_argument("--kills", type=int, default=3, help="of the command, and as many of an actor (default: 3)")
    options = trial.parse_args()
    count, kills = options.pictures, options.kills
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pictures(folder / "pictures", count)
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
