"""Disks that fill up, folders that can't be written, files that are torn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from faults.lab import STEPS, Lab, NotPossibleError, Outcome, fault, said


@contextmanager
def small_disk(lab: Lab, kib: int) -> Iterator[Path]:
    """A file system of this size."""
    folder = lab.fresh("disk")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        raise NotPossibleError("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@fault("disk full at some file of the run, space freed, resumed", tries=7)
def disk_full(lab: Lab, number: int) -> Outcome:
    """Sizes from nothing to nearly enough: configuration, metrics, completions, TensorBoard, checkpoints."""
    reference = lab.reference()
    kib = (4, 24, 64, 700, 1500, 1900, 2500)[number]
    with small_disk(lab, kib) as disk:
        done = lab.run(disk / "run")
        assert done.returncode == 1, f"{kib} KiB: exit {done.returncode} {done.stdout[-500:]} {done.stderr[-2000:]}"
        words = said(done.stderr)
        assert "No space left" in words, words
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        lab.resume(disk / "run")
        return Outcome(lab.difference(disk / "run", reference), words, 1)


@fault("disk full while a checkpoint is written, space freed, resumed", tries=2)
def disk_full_in_checkpoint(lab: Lab, number: int) -> Outcome:
    """Room for everything else; the file that fills the disk is taken away afterwards."""
    reference = lab.reference()
    with small_disk(lab, 16384) as disk:
        running = lab.start(disk / "run")
        running.wait_for_lines(2 + number)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
            file.write(b"x" * max(0, free - 300 * 1024))
        text = running.end()
        assert running.process.returncode == 1, text[-2000:]
        assert "the checkpoint" in said(text), text[-2000:]
        filler.unlink()
        lab.resume(disk / "run")
        return Outcome(lab.difference(disk / "run", reference), said(text), 1)


@fault("no space for metrics.jsonl alone, then space, resumed")
def disk_full_metrics(lab: Lab, number: int) -> Outcome:
    """metrics.jsonl is on a disk of its own: a link to a file there."""
    reference = lab.reference()
    root = lab.fresh("metrics_full")
    root.mkdir()
    with small_disk(lab, 8) as disk:
        (root / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
        done = lab.run(root)
        assert done.returncode == 1, done.stderr[-2000:]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        lab.resume(root)
        return Outcome(lab.difference(root, reference), said(done.stderr), 1)


@fault("checkpoint truncated", tries=4)
def checkpoint_truncated(lab: Lab, number: int) -> Outcome:
    """To nothing, to its first bytes, to a half, by one byte; refused, nothing touched, the best one still works."""
    root = Path(shutil.copytree(lab.reference(), lab.fresh("truncated")))
    last = root / "checkpoints" / "last.ckpt"
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != last}
    size = last.stat().st_size
    os.truncate(last, (0, 100, size // 2, size - 1)[number])
    done = lab.run(root, "--ckpt_path=last")
    assert done.returncode == 2, done.stdout + done.stderr
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path != last}
    best = next(path for path in (root / "checkpoints").glob("step=*.ckpt"))
    again = lab.run(root, f"--ckpt_path={best}")
    assert again.returncode == 0, again.stderr[-2000:]
    same = before == after
    return Outcome(lab.difference(root) if same else "files changed", said(done.stderr), 2)


@fault("checkpoint of another configuration", tries=4)
def checkpoint_of_another(lab: Lab, number: int) -> Outcome:
    """Other LoRA rank, targets, optimizer, base model."""
    root = Path(shutil.copytree(lab.reference(), lab.fresh("another")))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    other = (
        "--model.lora.rank=4",
        "--model.lora.targets=[q_proj]",
        "--model.optimizer=torch.optim.SGD",
        f"--model.policy.path={_another_base(lab)}",
    )[number]
    done = lab.run(root, "--ckpt_path=last", other)
    assert done.returncode == 2, done.stdout + done.stderr
    same = before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return Outcome("nothing" if same else "files changed", said(done.stderr), 2)


def _another_base(lab: Lab) -> Path:
    """The quick start's model with another number of layers in its configuration."""
    from importlib.resources import files

    folder = lab.folder / "another_base"
    if not folder.exists():
        shutil.copytree(str(files("grpo_lit") / "assets" / "tiny_arithmetic"), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


@fault("read-only folder", tries=3)
def read_only(lab: Lab, number: int) -> Outcome:
    """A read-only mount, new and with a run in it to resume; another user's folder, without root's power over it."""
    folder = lab.fresh("read_only")
    if number == 2:
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            raise NotPossibleError("needs root and setpriv, to give a folder away and its rights up")
        folder.mkdir(mode=0o755)
        os.chown(folder, 65534, 65534)
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *lab.command(folder / "run")]
        done = lab.call(command, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        return Outcome("nothing", said(done.stderr), 1)
    if number == 1:
        shutil.copytree(lab.reference(), folder / "run")
    folder.mkdir(exist_ok=True)
    bound = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True)
    if bound.returncode:
        raise NotPossibleError("needs the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        done = lab.run(folder / "run", *(["--ckpt_path=last", f"--trainer.max_steps={STEPS + 1}"] if number else []))
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert done.returncode == 1, done.stdout + done.stderr
    lost = lab.difference(folder / "run") if number else "nothing"
    return Outcome(lost, said(done.stderr), 1)


@fault("metrics.jsonl with a torn last line, resumed", tries=3)
def torn_metrics(lab: Lab, number: int) -> Outcome:
    """Half a line; a line without its end; zeros, as some file systems leave after a power cut."""
    # a line is on disk before its step's checkpoint
    running = lab.start(lab.fresh("torn"), "--checkpoint.every_n_rollout_steps=10")
    running.wait_for_lines(6)  # steps 0 to 5; the last checkpoint is of step 3
    running.process.send_signal(signal.SIGKILL)
    running.process.wait()
    file = running.root / "metrics.jsonl"
    whole = file.read_bytes()
    start = whole.rfind(b"\n", 0, -1) + 1
    torn = (whole[: (start + len(whole)) // 2], whole[:-1], whole[:start] + b"\0" * 400)[number]
    file.write_bytes(torn)
    done = lab.run(running.root, "--ckpt_path=last")
    assert done.returncode == 0, done.stderr[-2000:]
    words = [line for line in (done.stdout + done.stderr).splitlines() if "torn" in line]
    return Outcome(lab.difference(running.root), words[-1].strip() if words else "(nothing)", 0)


@fault("metrics.jsonl damaged in its middle")
def damaged_metrics(lab: Lab, number: int) -> Outcome:
    """A line that is no JSON is named, before anything is trained; nothing is overwritten."""
    root = Path(shutil.copytree(lab.reference(), lab.fresh("damaged")))
    file = root / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:2], b'{"step": 2, "train/lo\n', *lines[3:]])
    file.write_bytes(damaged)
    done = lab.run(root, "--ckpt_path=last", f"--trainer.max_steps={STEPS + 1}")
    assert done.returncode in (1, 2), done.stdout
    return Outcome(
        "nothing" if file.read_bytes() == damaged else "the file changed", said(done.stderr), done.returncode
    )


@fault("NaN in the weights of a checkpoint, resumed")
def nan_in_checkpoint(lab: Lab, number: int) -> Outcome:
    """Refused before a step is made; the checkpoint before it works."""
    root = Path(shutil.copytree(lab.reference(), lab.fresh("nan_checkpoint")))
    last = root / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    name = next(iter(content["state_dict"]))
    content["state_dict"][name].view(-1)[0] = float("nan")
    torch.save(content, last)
    done = lab.run(root, "--ckpt_path=last", f"--trainer.max_steps={STEPS + 2}")
    assert done.returncode in (1, 2), done.stdout
    return Outcome(lab.difference(root), said(done.stderr), done.returncode)


@fault("NaN in the weights during a run, resumed")
def nan_in_run(lab: Lab, number: int) -> Outcome:
    """A callback plants it after step 3; no checkpoint of it is kept, and the last good one goes on."""
    (lab.folder / "fault_callbacks.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Plant(Callback):\n"
        "    def on_train_batch_start(self, trainer, module, batch, batch_idx):\n"
        "        if module.rollout_step == 3:\n"
        "            name, weight = next(iter(module.live_policy.trainable_parameters()))\n"
        "            weight.data.view(-1)[0] = float('nan')\n"
    )
    root = lab.fresh("nan_run")
    done = lab.run(root, "--trainer.callbacks+=fault_callbacks.Plant")
    assert done.returncode == 1, done.stdout + done.stderr
    lab.resume(root)
    return Outcome(lab.difference(root), said(done.stderr), done.returncode)
