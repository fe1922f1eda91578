"""`saccade doctor`: installed packages, devices, built-in models and model families."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

from saccade.cli import screen
from saccade.cli.option_groups import option, spread

_SERVER = "saccade serve (pip install 'saccade[serve]')"
_GRAMMARS = "constrain answers to JSON or a grammar (pip install 'saccade[grammar]')"
_REPORTS = "draw reports (pip install 'saccade[report]')"
REQUIRED = ("saccade", "torch", "transformers", "safetensors", "pillow", "numpy")
OPTIONAL = {
    "accelerate": "spread a model over devices, and train (pip install 'saccade[train]')",
    "tensorboard": "curves of training (pip install 'saccade[train]')",
    "av": "read video files (pip install 'saccade[video]')",
    "matplotlib": _REPORTS,
    "jinja2": _REPORTS,
    "fastapi": _SERVER,
    "uvicorn": _SERVER,
    "prometheus-client": _SERVER,
    "llguidance": _GRAMMARS,
    "xgrammar": _GRAMMARS,
    "pyarrow": "Parquet files (pip install 'saccade[data]')",
    "datasets": "public data sets by name (pip install 'saccade[datasets]')",
    "ray": "several devices and machines (pip install 'saccade[ray]')",
}


@spread
def doctor(as_json: bool = option(False, "Print one JSON object.", "--json")) -> None:
    """Show installed packages, devices, built-in models, and the model families that work here.

    A family works when the installed transformers has it; `video` needs PyAV for files.
    """
    report = examine()
    if as_json:
        print(json.dumps(report))
        return
    screen.show(f"python {report['python']} on {report['platform']}")
    for name, version in report["packages"].items():
        why = f"  (optional: {OPTIONAL[name]})" if name in OPTIONAL else ""
        screen.show(f"  {name:<17} {version or 'not installed'}{why}")
    screen.show("devices", *(f"  {device}" for device in report["devices"]))
    screen.show("built-in models (`-t pocket`)", f"  {', '.join(report['pocket'])}")
    screen.show("families (any other decoder of transformers is checked at load)")
    for name, family in report["families"].items():
        state = "works" if family["works"] else "needs a newer transformers"
        screen.show(f"  {name:<16} {family['name']:<28} {state}")


def examine() -> dict[str, Any]:
    """Return everything that `saccade doctor` shows."""
    import torch
    from transformers import CONFIG_MAPPING

    from saccade.pocket import draft_path, head_paths, target_path
    from saccade.target_model.traits import TESTED

    devices = [_cpu()]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "devices": devices,
        "pocket": [
            *(path.name for path in (target_path(), draft_path()) if path.is_dir()),
            *(f"{kind} head" for kind in head_paths()),
        ],
        "families": {k: {"name": v, "works": k in CONFIG_MAPPING} for k, v in TESTED.items()},
    }


def _cpu() -> str:
    """The processor, and the formats of 16 bits in which it is faster than in float32."""
    import torch

    from saccade import cpu
    from saccade.wording import count

    fast = [str(kind).removeprefix("torch.") for kind in (torch.bfloat16, torch.float16) if cpu.computes_in(kind)]
    formats = " and ".join(fast) if fast else "no 16-bit format, so that dtype=auto is float32"
    cores = f"{count(cpu.usable_cores(), 'core')}, {cpu.idle_cores()} idle"
    threads = count(torch.get_num_threads(), "thread")
    return f"cpu, {cores}, {threads}, {torch.backends.cpu.get_cpu_capability()}, fast in {formats}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
