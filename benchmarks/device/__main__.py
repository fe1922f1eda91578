"""Measure a device: `python -m benchmarks.device --minutes 8 --out FOLDER`.

Four parts, ordered by worth: *sound* (the machine and its kernels), *exact* (tokens against transformers), *cost*
(steps at real sizes, on random weights) and *load* (a server's batch with many clients). Every finding is printed and
appended to FOLDER/records.jsonl at once; FOLDER/page.md is written from these at the end, when the run is stopped,
and by `python -m benchmarks.device --page FOLDER`. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from benchmarks.device.page import page
from benchmarks.device.records import SHARES, Records

GRACE = 45.0  # seconds that a piece may outlast its part before its process is ended


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts together (default: 8)")
    parser.add_argument("--out", type=Path, help="folder of the records and the page")
    parser.add_argument("--device", choices=("cuda", "cpu", "pretend"), help="default: cuda if there is one, else cpu")
    parser.add_argument("--small", action="store_true", help="tiny models and few sizes: under a minute on a CPU")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="some of sound, exact, cost and load (default: all)")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the page of records that are there, and end")
    parser.add_argument("--worker", type=float, metavar="END", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Supervise: another process measures, and a new one goes on where one broke."""
    options = options_of()
    if options.worker is not None:
        return work(options)
    if options.page is not None:
        write_page(options.page)
        return 0
    if options.out is None:
        raise SystemExit("Give the folder for the records with --out FOLDER.")
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.out)
    records.path.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ends = time.time() + 60 * options.minutes
    command = [sys.executable, "-m", "benchmarks.device", *sys.argv[1:], "--worker", str(ends)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process, begun = None, -1
    try:
        while begun < len(records.begun) and time.time() < ends:  # every process begins at least one more piece
            begun = len(records.begun)
            process = subprocess.Popen(command, env=environment)
            if (code := process.wait()) == 0:
                break
            records.close_open(code)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        write_page(options.out)
        print(f"page: {options.out / 'page.md'}", flush=True)
    return 0


def work(options: argparse.Namespace) -> int:
    """Run the pieces that no process has begun yet; 3 where the device broke."""
    import torch

    from benchmarks.device.kit import Kit, device_of
    from benchmarks.pocket_pair import quiet

    quiet()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.small and name != "cuda":
        torch.set_num_threads(1)
    with device_of(name) as (device, pretend):
        records = Records(options.out)
        kit, begun = Kit(records, device, options.small, options.worker, pretend), records.begun
        for part in options.parts or SHARES:
            kit.begin(part)
            for piece, call in import_module(f"benchmarks.device.{part}").pieces(kit):
                if (part, piece) in begun:
                    continue
                faulthandler.dump_traceback_later(max(kit.left, 0.0) + GRACE, exit=True)
                usable = kit.run(piece, call)
                faulthandler.cancel_dump_traceback_later()
                if not usable:
                    return 3
    return 0


def write_page(folder: Path) -> None:
    (folder / "page.md").write_text(page(Records(folder).read()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
