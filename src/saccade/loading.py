"""Loading of models and input processors from checkpoints on disk or the hub; incomplete ones are refused."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import constants, get_session
from safetensors import SafetensorError, safe_open

from saccade import cpu
from saccade.errors import ModelError, SaccadeWarning
from saccade.files import is_gguf, source_of
from saccade.inputs.families import family_of
from saccade.inputs.processor import InputProcessor
from saccade.options import STORED
from saccade.target_model.adapter import Target
from saccade.target_model.sharding import SHARDED, TENSOR_PARALLEL, check_processes, processes, sharded
from saccade.wording import first_line

SMALL = 50_000_000  # parameters below which a drafter runs faster in float32 on a CPU, measured for layers 128-256 wide

DTYPES = ("float32", "bfloat16", "float16")
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")  # values of device_map that accelerate knows


def load_model(path: str | Path, *, dtype: str | torch.dtype = "auto", device_map: Any = None) -> Any:
    """Load a language model or an image-text-to-text model with all its weights; arguments as of `saccade.load`."""
    config = check_checkpoint(path)
    stored = config.dtype or config.get_text_config(decoder=True).dtype
    dtype, device_map = check_dtype(dtype), check_device(device_map)
    splitting = {}
    check_processes(device_map, config)
    if device_map == SHARDED:
        if processes() != 1:
            kept = stored if dtype == "auto" and stored and torch.cuda.is_available() else dtype
            return sharded(lambda: load_model(path, dtype=kept, device_map="cpu"))
        device_map = check_device(default_device())
    if device_map == TENSOR_PARALLEL:
        device_map = default_device() if processes() == 1 else None
        from transformers.distributed.configuration_utils import DistributedConfig

        splitting = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=processes())}
    on_cpu = not torch.cuda.is_available() if splitting else device_map in (None, torch.device("cpu"))
    if dtype == "auto" and on_cpu:
        dtype = _cpu_dtype(path, config, stored)
    moved = device_map if isinstance(device_map, torch.device) and not find_spec("accelerate") else None
    place, file = source_of(path)
    with _refusing(path), _unreported():
        model, info = _auto_class(config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            device_map=None if moved else device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name below
            trust_remote_code=False,
            **file,
            **splitting,
        )
        if moved:
            model = model.to(moved)
    misshapen = sorted(str(name) for name, *_ in info.get("mismatched_keys", ()))
    missing = sorted(set(info["missing_keys"]) - set(misshapen))
    for names, what in ((missing, "lacks"), (misshapen, "has the wrong shape for")):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"The checkpoint {path} {what} the weight {names[0]}{others}; download it again, or check that its "
                "config.json belongs to it."
            )
    return model


def _cpu_dtype(path: str | Path, config: Any, stored: torch.dtype | None) -> str | torch.dtype:
    """Return ``auto`` or, where it fits, float32 for a CPU, and warn of either where the stored format is slow."""
    if Path(path).is_relative_to(Path(__file__).parent):  # the built-in pair
        return torch.float32
    if stored is None or cpu.suitable_dtype(stored) == stored:
        return "auto"
    weights = sum(p.numel() for p in empty_model(config).parameters())
    name, size, free = str(stored).removeprefix("torch."), 4 * weights, cpu.available_memory()
    fits = free is None or size < 0.9 * free
    if fits:
        outcome = f"it runs in float32; dtype={name!r} forces the stored format"
    else:
        outcome = f"it runs in {name} all the same, since float32 needs {size >> 30} GiB of memory"
    warnings.warn(
        f"{path} is stored in {name}, in which this processor is slow: {outcome}.", SaccadeWarning, stacklevel=4
    )
    return torch.float32 if fits else "auto"


def empty_model(config: Any) -> Any:
    """Return a configuration's model on torch's meta device: shapes without memory."""
    with torch.device("meta"):
        return _auto_class(config).from_config(config)


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that loads models of a configuration; None for one that generates no text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    both = (AutoModelForImageTextToText, AutoModelForCausalLM)
    return next((auto for auto in both if type(config) in auto._model_mapping), None)


def check_checkpoint(path: str | Path, *, weights: bool = True) -> Any:
    """Check a checkpoint, whose weights a folder may lack without ``weights``, and return its configuration."""
    from transformers import AutoConfig

    folder = Path(path)
    if not str(path):
        raise ModelError("The name of the checkpoint is empty; give a checkpoint folder or a hub id.")
    if folder.is_dir():
        _check_files(folder, weights)
    elif folder.exists() and not is_gguf(folder):
        raise ModelError(
            f"{path} is a file, but no GGUF file; give one, or the folder that holds the checkpoint's config.json."
        )
    elif is_gguf(folder) and not folder.exists():
        raise ModelError(f"There is no file {path}; give a GGUF file that exists, or a checkpoint folder.")
    elif not folder.exists() and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise ModelError(f"There is no folder {str(path)!r}; give one that exists, or a hub id such as OWNER/NAME.")
    place, file = source_of(path)
    with _refusing(path):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **file)
    config._name_or_path = str(path)
    if _auto_class(config) is None:
        raise ModelError(
            f"{path} holds a {config.model_type} model, which does not generate text from text and images; "
            "give a language model or a vision-language model."
        )
    if is_assistant(config):
        share_every_layer(config)
    return config


def file_of(place: str | Path, name: str) -> Path | None:
    """Return a file of a folder or, without such a folder, of a repository on the hub; None if it has no such file."""
    if is_on_hub(place):
        return _file_on_hub(str(place), name)
    file = Path(path_of(place)) / name
    return file if file.is_file() else None


def is_on_hub(place: str | Path) -> bool:
    """Whether a folder or hub id is of the form of an id, without such a path here."""
    return not Path(path_of(place)).exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(place)) is not None


@cache
def _file_on_hub(repository: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _refusing(repository):
        try:
            return Path(hf_hub_download(repository, name))
        except EntryNotFoundError as problem:
            if isinstance(problem, LocalEntryNotFoundError) and name == "config.json":
                raise  # the hub is unreachable; a cached repository would have this file
            return None


def _check_files(folder: Path, weights: bool) -> None:
    """Raise `ModelError` unless a folder has a configuration and, if wanted, complete weight files."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"The folder {folder} has no config.json, so it holds no checkpoint; give the folder that has one."
        )
    again = "download the checkpoint again"
    shards: set[str] = set()
    try:
        json.loads(config.read_text(encoding="utf-8"))
        for index in folder.glob("*.safetensors.index.json") if weights else ():
            shards.update(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ModelError(f"A JSON file of {folder} is damaged ({problem}); {again}.") from None
    if not weights:
        return
    files = [folder / shard for shard in sorted(shards)] or sorted(folder.glob("model*.safetensors"))
    if not files and not any(folder.glob("pytorch_model*")):
        raise ModelError(f"The checkpoint {folder} has no weights (model.safetensors); {again}.")
    for file in files:
        if not file.is_file():
            raise ModelError(f"The checkpoint {folder} lacks {file.name}, one of its weight files; {again}.")
        try:
            with safe_open(file, "pt"):  # which compares its length with its header
                pass
        except SafetensorError:
            raise ModelError(f"The weight file {file} is damaged or only partly downloaded; {again}.") from None


_TEMPLATE_FILE = "chat_template.jinja"
_VIDEO_FILE = "video_preprocessor_config.json"


def load_processor(path: str | os.PathLike[str]) -> InputProcessor:
    """Read tokenizer, image and video settings and chat template of a checkpoint."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    path = os.fspath(path)
    if not path:
        raise ModelError("The model does not say which checkpoint it is from; make its InputProcessor from parts.")
    config = _part(AutoConfig, path, "configuration")
    tokenizer = _part(AutoTokenizer, path, "tokenizer")
    family = family_of(config)
    images = composite = None
    if not family.is_known:
        composite = _part(AutoProcessor, path, f"processor of the family {family.name}, which is not built in,")
    elif family.reads_images:
        images = _part(family.image_loader, path, "image processor", config=config)
    settings = _json(path, "processor_config.json")
    files = (_VIDEO_FILE, "preprocessor_config.json") if family.video_defaults is not None else ()
    video = settings.get("video_processor") if files else None
    for name in files:
        video = video or _json(path, name)
    file = _file(path, _TEMPLATE_FILE)  # the processor's template may differ from the tokenizer's
    if file is not None:
        template: Any = file.read_text(encoding="utf-8")
    else:
        template = _json(path, "chat_template.json").get("chat_template") or settings.get("chat_template")
    template = template if isinstance(template, str) else None
    eos = _json(path, "generation_config.json").get("eos_token_id")
    return InputProcessor(config, tokenizer, images, video, template, eos, composite)


def save_processor(processor: InputProcessor, folder: str | os.PathLike[str]) -> None:
    """Write all files that `load_processor` reads except the two configurations, for a model with the same inputs."""
    processor.tokenizer.save_pretrained(folder)
    if processor.image_processor is not None:
        processor.image_processor.save_pretrained(folder)
    if processor.video_settings:
        (Path(folder) / _VIDEO_FILE).write_text(json.dumps(processor.video_settings, indent=2), encoding="utf-8")
    if processor.chat_template is not None:
        (Path(folder) / _TEMPLATE_FILE).write_text(processor.chat_template, encoding="utf-8")


def _part(auto: Any, path: str, part: str, **options: Any) -> Any:
    """Return what a class of transformers loads of a checkpoint; ``part`` names it in the error."""
    folder, file = source_of(path)
    try:
        return auto.from_pretrained(folder, trust_remote_code=False, **file, **options)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        reason = first_line(error).split(". ")[0].rstrip(".: ")[:300]
        if part == "tokenizer" and Path(path).is_dir() and not any(Path(path).glob("tokenizer.*")):
            reason = "it has no tokenizer.json"
        raise ModelError(
            f"The {part} of {path} cannot be loaded ({reason}); give a complete checkpoint directory "
            "or a model id that can be reached."
        ) from error


def _file(path: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    if is_gguf(path):  # which has it all, and not what lies next to it
        return None
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(file) if file else None


def _json(path: str, name: str) -> dict[str, Any]:
    file = _file(path, name)
    try:
        content = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ModelError(f"{name} of {path} is not valid JSON; download the checkpoint again.") from None
    return content if isinstance(content, dict) else {}


def check_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return a torch dtype, by name or as given; ``auto`` stays."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return name
    if name not in DTYPES:
        raise ModelError(f"The dtype {name!r} is not one of auto, {', '.join(DTYPES)}; choose one of these.")
    return getattr(torch, name)  # type: ignore[no-any-return]


def check_device(device_map: Any) -> Any:
    """Return a `device_map` as given, a single device as a torch device."""
    if device_map in (None, TENSOR_PARALLEL, SHARDED):
        return device_map
    if isinstance(device_map, dict) or device_map in SPREADING:
        if not find_spec("accelerate"):
            raise ModelError(
                f"The device map {device_map!r} needs accelerate, which is not installed; run `pip install accelerate`."
            )
        return device_map
    try:
        if isinstance(device_map, str) and not re.match(r"(cpu|cuda|mps|xpu|hpu|npu)\b", device_map):
            raise ValueError("unknown kind of device")
        device = torch.device(device_map)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as problem:  # by backend
        raise ModelError(
            f"The device {device_map!r} cannot be used here ({_first_sentence(problem)}); choose cpu, one that "
            "`saccade doctor` lists, or auto."
        ) from None
    return device


def default_device() -> str | None:
    """Return the device of models whose place is not given: a CUDA GPU if there is one, else None, the CPU."""
    return "cuda" if torch.cuda.is_available() else None


def is_assistant(config: Any) -> bool:
    """Whether a configuration is that of an assistant, a drafter that attends to its target's entries (Gemma 4)."""
    return str(config.model_type).endswith("_assistant")


def refuse_assistant(config: Any, name: str) -> None:
    """Raise `ModelError` for an assistant in the place of a target."""
    if is_assistant(config):
        raise ModelError(
            f"{name} is an assistant, which drafts for another model and cannot answer alone; give the model that it "
            "was made for as the target, and the assistant as the drafter."
        )


def share_every_layer(config: Any) -> None:
    """Let a configuration's class describe decoders without entries, as transformers 5.23 refuses to (assistants)."""
    text = type(config.get_text_config())
    try:
        getattr(config.get_text_config(), "kv_sharing_modes", None)  # absent from 5.17, which refuses none
    except ValueError:
        usual: Any = text.kv_sharing_modes

        def modes(self: Any) -> Any:
            layers = self.num_hidden_layers
            return ["reuse"] * layers if self.num_kv_shared_layers == layers else usual.fget(self)

        text.kv_sharing_modes = property(modes)


def adapt(
    model: Any,
    exact: bool = False,
    drafts: bool = False,
    base: Target | None = None,
    executor: str = "auto",
    weights: str = STORED,
) -> Target:
    """Return the `Target` of a loaded model, checked where the conformance suite does not cover it."""
    if not drafts:
        refuse_assistant(model.config, name_of(model))
    target = Target(model, executor, exact, base, weights)
    if not target.traits.tested and not is_assistant(model.config):
        from saccade.target_model.selfcheck import self_check

        self_check(target)
        target.use_fast()
    return target


def fastest_dtype(model: Any, usual: torch.dtype | None = None) -> torch.dtype:
    """Return a drafter's fastest dtype: float32 for a small one on a CPU, else the usual one, by default its own."""
    weight = next(model.parameters())
    small = sum(p.numel() for p in model.parameters()) < SMALL
    return torch.float32 if weight.device.type == "cpu" and small else usual or weight.dtype


def path_of(place: str | Path) -> str:
    """Return a folder or hub id as text, with the home folder expanded."""
    return str(Path(place).expanduser()) if str(place).startswith("~") else str(place)


def name_of(model: Any) -> str:
    """Return the name of a model, a head or a folder for messages."""
    if isinstance(model, (str, Path)):
        return str(model)
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


_IS_OFFLINE = constants.HF_HUB_OFFLINE  # whether the user works offline


@cache
def _see_hub() -> None:
    get_session().head(constants.ENDPOINT, timeout=5)  # a success is kept, an exception is not


def _reach_hub() -> None:
    """Work offline where the hub cannot be reached: its client would try for half a minute, for every file."""
    constants.HF_HUB_OFFLINE = False
    try:
        _see_hub()
    except Exception:  # of the HTTP library of the hub's client
        constants.HF_HUB_OFFLINE = True


@contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    """Turn every error while a checkpoint is read into a `ModelError`."""
    if not (_IS_OFFLINE or Path(path_of(path)).exists()):
        _reach_hub()
    try:
        yield
    except ModelError:
        raise
    except Exception as problem:  # transformers, safetensors and hub raise many kinds
        refuse_code(problem, path)
        if "trust_remote_code" in str(problem):
            raise ModelError(
                f"The checkpoint {path} needs code of its own, which is never run; give a model whose architecture "
                "transformers has built in."
            ) from None
        if isinstance(problem, ImportError):  # a quantised checkpoint's kernels
            raise ModelError(
                f"The checkpoint {path} needs a package that is not installed ({_first_sentence(problem)}); install "
                "it, or give a checkpoint that is not quantised."
            ) from problem
        is_fetching = isinstance(problem, OSError) or type(problem).__module__.startswith(("huggingface_hub", "httpx"))
        if is_fetching and not Path(path).exists():
            mode, reason = ", with HF_HUB_OFFLINE set" if _IS_OFFLINE else "", _first_sentence(problem)
            if not _IS_OFFLINE and constants.HF_HUB_OFFLINE:
                reason = f"{constants.ENDPOINT} cannot be reached, so that offline mode is on, and the cache lacks it"
            owner = "" if "/" in str(path) else f"give the owner, too, as in OWNER/{path}, or "
            raise ModelError(
                f"There is no folder {path} here, and the hub could not give it{mode} ({reason}); {owner}check the "
                "spelling, the connection, or your access (hf auth login)."
            ) from problem
        advice = "give a complete checkpoint that this version of transformers supports"
        if is_gguf(path):
            advice = "transformers reads GGUF files of some text models alone, so give the folder that it was made of"
        raise ModelError(f"The checkpoint {path} cannot be loaded ({_first_sentence(problem)}); {advice}.") from problem


def refuse_code(problem: Exception, place: str | Path) -> None:
    """Raise `ModelError` where a weight file could not be read because its pickle calls code."""
    if isinstance(problem, UnpicklingError) and (called := re.search(r"GLOBAL ([\w.]+)", str(problem))):
        raise ModelError(
            f"The weight file of {place} carries code ({called[1]}), which is never run; give weights as safetensors, "
            "or where you trust the file, save its tensors alone with safetensors.torch.save_file."
        ) from None


@contextmanager
def _unreported() -> Iterator[None]:
    """Silence transformers' report on missing weights, which are an error here, and on superfluous ones."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_sentence(problem: Exception) -> str:
    """Return the first sentence of another library's error message, without its full stop."""
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return re.split(r"\.\s+(?=[A-Z])", lines[0])[0].rstrip(".!:")
