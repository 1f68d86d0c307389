"""Versions of the live adapter as folders in RAM, each with a name and number of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from torch import nn

from grpo_lit.errors import SystemFault
from grpo_lit.lora import save_adapter
from grpo_lit.rollout.vllm_backend import Adapter

_PREFIX = f"grpo-lit-vllm-{socket.gethostname()}"
_OWNED = re.compile(rf"^{re.escape(_PREFIX)}-(\d+)-")


class AdapterFolders:
    """Writes each version of a model's adapters into a folder of its own, and takes old ones away.

    Folders that a killed process left are swept when the next one starts.

    Args:
        root: where the folders lie; None takes RAM (/dev/shm) where there is some, else the temporary folder.

    Raises:
        SystemFault: nothing can be written there.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        where = Path(root) if root is not None else ram_folder()
        _sweep(where)
        try:
            where.mkdir(parents=True, exist_ok=True)
            self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-", dir=where))
        except OSError as error:
            raise SystemFault(
                f"model.rollout.vllm.adapter_folder={str(where)!r}: can't be written ({error})"
            ) from error
        self.root.chmod(0o755)  # a server may run as another user
        self.version = 0
        self._removal = weakref.finalize(self, shutil.rmtree, str(self.root), True)

    def write(self, model: nn.Module, *, base_model: str) -> Adapter:
        """Write the model's adapters as they are now, as the next version."""
        self.version += 1
        name = f"{self.root.name}-v{self.version}"
        try:
            save_adapter(model, self.root / name, base_model=base_model)
        except OSError as error:
            raise SystemFault(f"the adapter for vLLM can't be written to {self.root}: {error}") from error
        return Adapter(name, self.version, self.root / name)

    def remove(self, adapter: Adapter) -> None:
        """Delete a version."""
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete all."""
        self._removal()


def ram_folder() -> Path:
    """A folder in memory, or the temporary one where the system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _sweep(where: Path) -> None:
    for folder in where.glob(f"{_PREFIX}-*"):
        owner = _OWNED.match(folder.name)
        if owner and not _alive(int(owner.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
