"""Where a model comes from: hub id, folder, GGUF file, or a path inside an installed package.

Resolved without loading any weight, so that a wrong path is reported before the long part starts.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.gguf_files import read_once
from grpo_lit.hub import offline_if_unreachable

PACKAGE_SCHEME = "package:"
_ON_DISK = "a folder with config.json, a .gguf file, or package:NAME[/path]"
_ACCEPTED = f"a hub id (org/name), {_ON_DISK}"
# 5.0 to 5.4 give SmolLM2 the tokenizer of CodeLlama, with tokens that the model has no rows for, or find no gguf.
_READS_GGUF = Version("5.17")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


@dataclass(frozen=True)
class ModelSource:
    """A resolved model location: the arguments of transformers' ``from_pretrained``."""

    spec: str
    """What the user wrote."""
    location: str
    """Folder on this machine, or hub id."""
    gguf_file: str | None = None
    """Name of the GGUF file inside ``location``."""
    is_local: bool = True

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments that every ``from_pretrained`` call of this source needs."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_model_source(spec: str, *, argument: str = "model.policy.path") -> ModelSource:
    """Find out what kind of model location a string names.

    Args:
        spec: hub id, folder, ``config.json`` or ``.gguf`` file, or ``package:NAME[/path]``, a path inside an
            installed Python package (which is found without being imported).
        argument: the name to use in error messages.

    Raises:
        UserError: no such package, folder or file, or the folder is not a model.
    """
    if not spec:
        raise UserError(argument, spec, _ACCEPTED)
    path = _package_path(spec, argument) if spec.startswith(PACKAGE_SCHEME) else Path(spec).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return _gguf_source(spec, path, argument)
        if path.name == "config.json":
            return ModelSource(spec, str(path.parent))
        raise UserError(argument, spec, _ACCEPTED)
    if path.is_dir():
        return _folder_source(spec, path, argument)
    if spec.startswith(PACKAGE_SCHEME) or spec.startswith((".", "/", "~")) or not _HUB_ID.match(spec):
        raise UserError(argument, spec, _ACCEPTED)
    return ModelSource(spec, spec, is_local=False)


def _package_path(spec: str, argument: str) -> Path:
    name, _, inside = spec.removeprefix(PACKAGE_SCHEME).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(argument, spec, f"package:NAME of an installed package (pip install {name}?)")
    root = Path(next(iter(found.submodule_search_locations)))
    return root / inside if inside else root


def _folder_source(spec: str, folder: Path, argument: str) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(spec, str(folder))
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _gguf_source(spec, ggufs[0], argument)
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise UserError(argument, spec, f"one GGUF file; the folder has {names}")
    raise UserError(argument, spec, _ACCEPTED)


def _gguf_source(spec: str, path: Path, argument: str) -> ModelSource:
    if Version(transformers.__version__) < _READS_GGUF:
        accepted = f"a GGUF file with transformers {_READS_GGUF} or newer ({transformers.__version__} is installed)"
        raise UserError(argument, spec, accepted)
    return ModelSource(spec, str(path.parent), gguf_file=path.name)


def load_model_config(source: ModelSource, *, argument: str = "model.policy.path") -> PretrainedConfig:
    """Read a model's configuration (architecture and sizes) without its weights.

    Raises:
        UserError: the location has no readable causal language model configuration.
        SystemFault: the hub can't be reached.
    """
    if not source.is_local:
        offline_if_unreachable()
    try:
        config: PretrainedConfig
        if source.gguf_file:
            state = Path(source.location, source.gguf_file).stat()
            config = copy.deepcopy(_gguf_config(source.location, source.gguf_file, state.st_mtime_ns, state.st_size))
        else:
            config = AutoConfig.from_pretrained(source.location)
    except (OSError, ValueError, KeyError, struct.error) as error:  # the last of a GGUF file that is cut off
        if (fault := unreachable(source, argument, error)) is not None:
            raise fault from error
        raise UserError(argument, source.spec, _ACCEPTED) from error
    return config


@functools.lru_cache(maxsize=4)  # transformers parses the whole vocabulary each time; a start asks three times
def _gguf_config(location: str, gguf_file: str, changed_ns: int, size: int) -> PretrainedConfig:
    with read_once(gguf_file):
        config: PretrainedConfig = AutoConfig.from_pretrained(location, gguf_file=gguf_file)
    return config


def unreachable(source: ModelSource, argument: str, error: BaseException) -> SystemFault | None:
    """The fault to raise where an error means that the hub can't be reached; None where it means something else."""
    text = str(error).lower()
    hints = ("connect", "offline", "resolve", "timed out", "internet")
    if source.is_local or not any(hint in text for hint in hints):
        return None
    return SystemFault(
        f"{argument}={source.spec!r}: the model hub can't be reached and the model is not cached; "
        f"download it first, or give {_ON_DISK}"
    )
