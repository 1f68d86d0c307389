"""Files and configurations from strangers: nothing in them may run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]

from faults.lab import Lab, Outcome, fault, said


class _Stranger:
    """Runs a command when it is unpickled by whoever trusts it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def _refused(lab: Lab, mark: Path, command: list[str]) -> Outcome:
    done = lab.call(command)
    ran = mark.exists()
    mark.unlink(missing_ok=True)
    words = said(done.stderr or done.stdout)
    assert done.returncode in (1, 2), f"{command}: {done.stdout[-800:]} {done.stderr[-800:]}"
    return Outcome("the code ran" if ran else "nothing", words, done.returncode)


@fault("pickled code as checkpoint (2 formats), adapter (2), base model, SENT cache, data set (3)", tries=9)
def pickled_code(lab: Lab, number: int) -> Outcome:
    """Whatever reads the file, the command in it is not run."""
    mark, folder = lab.folder / "ran", lab.fresh("pickled")
    folder.mkdir()
    evil = _Stranger(mark)
    raw = pickle.dumps(evil)
    model = Path(str(files("grpo_lit") / "assets" / "tiny_arithmetic"))
    fit = lab.command(folder / "run")
    if number == 0:
        torch.save({"state_dict": evil, "grpo_lit": {"rollout_step": 1}}, folder / "evil.ckpt")
        return _refused(lab, mark, [*fit, f"--ckpt_path={folder / 'evil.ckpt'}"])
    if number == 1:
        (folder / "evil.ckpt").write_bytes(raw)
        return _refused(lab, mark, [*fit, f"--ckpt_path={folder / 'evil.ckpt'}"])
    if number in (2, 3):
        adapter = Path(shutil.copytree(lab.reference() / "adapter", folder / "adapter"))
        (adapter / "adapter_model.safetensors").unlink()
        if number == 2:
            torch.save(evil, adapter / "adapter_model.bin")
        else:
            (adapter / "adapter_model.safetensors").write_bytes(raw)
        command = [*fit[:3], "generate", f"--policy.path={model}", f"--adapter={adapter}", "--prompt=1+1="]
        return _refused(lab, mark, command)
    if number == 4:
        base = Path(shutil.copytree(model, folder / "base"))
        (base / "model.safetensors").unlink()
        torch.save({"model.embed_tokens.weight": evil}, base / "pytorch_model.bin")
        return _refused(lab, mark, [*fit, f"--model.policy.path={base}"])
    name = ("sent.jsonl", "rows.jsonl", "rows.parquet", "rows.pkl")[number - 5]
    (folder / name).write_bytes(raw)
    custom = ["--data.dataset=custom", "--data.dataset_options=null", f"--data.path={folder / name}"]
    return _refused(lab, mark, [*fit, *([f"--data.sent_cache={folder / name}"] if number == 5 else custom)])


@fault(
    "configuration that names code: optimizer, callback, data, logger, profiler, strategy, plugin, rewards (2), "
    "YAML tag, code of a model",
    tries=11,
)
def code_by_name(lab: Lab, number: int) -> Outcome:
    """What is no optimizer, callback, ... is not called, and a model's own Python is not imported."""
    mark, folder = lab.folder / "ran", lab.fresh("by_name")
    folder.mkdir()
    shell = f"touch '{mark}'"
    popen = {"class_path": "subprocess.Popen", "init_args": {"args": shell, "shell": True}}
    system = {"class_path": "os.system", "init_args": {"command": shell}}
    sections = (
        {"model": {"optimizer": system}},
        {"trainer": {"callbacks": [popen]}},
        {"data": popen},
        {"trainer": {"logger": popen}},
        {"model": {"rewards": [f"subprocess.Popen(args={shell!r}, shell=True)"]}},
        {"model": {"rewards": [f"os.system(command={shell!r})"]}},
        {},
        {},
        {"trainer": {"profiler": popen}},
        {"trainer": {"strategy": popen}},
        {"trainer": {"plugins": popen}},
    )
    config, more = folder / "config.yaml", [f"--config={folder / 'config.yaml'}"]
    config.write_text(yaml.safe_dump(sections[number]))
    if number == 6:
        config.write_text(f'trainer: !!python/object/apply:os.system ["{shell}"]\n')
    if number == 7:
        base = Path(shutil.copytree(str(files("grpo_lit") / "assets" / "tiny_arithmetic"), folder / "base"))
        (base / "modeling_evil.py").write_text(f"import os\nos.system({shell!r})\nclass EvilForCausalLM: pass\n")
        entry = json.loads((base / "config.json").read_text())
        entry |= {
            "model_type": "evil",
            "auto_map": {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.E"},
        }
        (base / "config.json").write_text(json.dumps(entry))
        more = [f"--model.policy.path={base}"]
    command = [part for part in lab.command(folder / "run") if number not in (4, 5) or "--model.rewards" not in part]
    return _refused(lab, mark, [*command, *more])


@fault("run folders, files and questions with shell characters, quotes and ../ in them", tries=3)
def names(lab: Lab, number: int) -> Outcome:
    """They are names and nothing else."""
    mark = lab.folder / "ran"
    name = ("$(touch ran);`touch ran` & touch ran #", "a'b\"c <b>&amp;|*? {x}", "up/../names")[number]
    root = lab.fresh("names") / name
    if number == 2:
        (root.parent.parent / "up").mkdir(parents=True, exist_ok=True)
    done = lab.run(root)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = lab.call([*lab.command(root)[:3], "compare", str(root), str(lab.reference())])
    assert shown.returncode == 0, shown.stderr[-2000:]
    lost = "the code ran" if mark.exists() else lab.difference(root)
    return Outcome(lost, "(nothing)", 0)
