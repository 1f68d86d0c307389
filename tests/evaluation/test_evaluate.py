"""`grpo-lit evaluate`: what it writes, that it goes on exactly, and what it refuses."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from grpo_lit.cli import main
from grpo_lit.cli.config_files import shipped_configs
from grpo_lit.errors import UserError
from grpo_lit.evaluation.config import TIERS, DatasetEntry, EvaluateConfig, ModelEntry
from grpo_lit.evaluation.judging import answer_classes, judge_samples
from grpo_lit.evaluation.models import best_checkpoint, load_model, resolve_model
from grpo_lit.evaluation.store import ResultStore, SampleKey
from grpo_lit.evaluation.tasks import complete_config, load_tasks

CLOCKED = ("timings.jsonl", "speed.csv", "run_config.json", "report.md", "report.html", "evaluation.lock")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file whose content does not depend on the clock."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in CLOCKED}


def arguments(run: Path, output: Path | str, *extra: str) -> list[str]:
    common = ["--samples=3", "--limit=7", "--batch_size=6", "--temperature=1.0", "--top_p=1.0", "--device=cpu"]
    return ["evaluate", f"--run={run}", f"--output={output}", "--cpu_threads=1", *common, *extra]


def evaluate(*given: Any) -> int:
    return main(arguments(*given))


@pytest.fixture(scope="module")
def evaluated(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("evaluated") / "results"
    assert evaluate(finished_run, output) == 0
    return output


def test_results_hold_every_sample_and_tables_agree_with_them(evaluated: Path) -> None:
    verdicts, generations = lines_of(evaluated / "verdicts.jsonl"), lines_of(evaluated / "generations.jsonl")
    keys = [(v["model"], v["dataset"], v["protocol"], v["example"], v["sample"]) for v in verdicts]
    assert len(keys) == len(set(keys)) == 3 * 7 * (1 + 3)
    assert keys == [(g["model"], g["dataset"], g["protocol"], g["example"], g["sample"]) for g in generations]
    table = list(csv.DictReader((evaluated / "summary.csv").read_text().splitlines()))
    for model in ("base", "final", "best"):
        for protocol, samples in (("deterministic", 1), ("sampled", 3)):
            own = [v["correct"] for v in verdicts if (v["model"], v["protocol"]) == (model, protocol)]
            row = next(r for r in table if (r["model"], r["protocol"], r["metric"]) == (model, protocol, "pass@1"))
            assert float(row["value"]) == pytest.approx(sum(own) / len(own), abs=1e-6)
            assert (int(row["num_problems"]), int(row["samples"])) == (7, samples)
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
    assert {r["metric"] for r in table if r["protocol"] == "sampled"} >= {"pass@3", "maj@3", "avg@3", "unparsable_rate"}
    pairs = list(csv.DictReader((evaluated / "paired.csv").read_text().splitlines()))
    assert {(p["first"], p["second"]) for p in pairs} == {("final", "base"), ("best", "base"), ("best", "final")}
    config = json.loads((evaluated / "run_config.json").read_text())
    assert config["versions"]["torch"]
    assert config["models"]["best"]["selection_source"] == "in-training validation"
    assert {g["completion"] for g in generations if g["model"] == "base"} != {
        g["completion"] for g in generations if g["model"] == "final"
    }, "the adapter is in force"


def test_reports_stand_alone_and_show_every_model(evaluated: Path) -> None:
    page = (evaluated / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"<script|<link|src=[\"']?http|@import", page)
    assert page.count("<details>") == 2 * 7
    markdown = (evaluated / "report.md").read_text()
    for name in ("base", "final", "best"):
        assert f"| {name} | held_out | sampled | 7 | 3 |" in markdown
        assert f"{name} ✓" in page or f"{name} ✗" in page


def test_second_run_computes_nothing_and_changes_nothing(
    evaluated: Path, finished_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(evaluated)
    monkeypatch.setattr("grpo_lit.evaluation.runner.load_model", None)  # a model loaded for nothing would fail
    assert evaluate(finished_run, evaluated) == 0
    assert contents(evaluated) == before
    assert capsys.readouterr().out.count(": complete") == 3


def test_scores_ask_no_other_rank(
    evaluated: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has all records; and the scores lie on the CPU, where NCCL exchanges nothing."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No backend type associated with device type cpu")

    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "all_gather", refuse)
        assert evaluate(finished_run, evaluated) == 0
    finally:
        dist.destroy_process_group()


def test_cut_anywhere_the_files_come_out_the_same(evaluated: Path, finished_run: Path, tmp_path: Path) -> None:
    expected = contents(evaluated)
    generator = random.Random(4)
    for trial in range(6):
        output = tmp_path / str(trial)
        output.mkdir()
        generated, judged = expected["generations.jsonl"], expected["verdicts.jsonl"]
        cut = generator.randrange(len(generated))
        (output / "generations.jsonl").write_bytes(generated[:cut])
        whole = generated[:cut].count(b"\n")
        end = len(b"\n".join(judged.split(b"\n")[:whole])) + (whole > 0)
        (output / "verdicts.jsonl").write_bytes(judged[: generator.randrange(end + 1)])
        assert evaluate(finished_run, output) == 0
        assert contents(output) == expected, f"trial {trial}, cut at {cut}"


@pytest.mark.faults
def test_killed_at_ten_random_points_and_resumed(
    evaluated: Path, finished_run: Path, start_grpo_lit: Callable[..., Any], tmp_path: Path
) -> None:
    """Kills come after so many bytes of verdicts: by the work done, not by the clock, where other programs run too."""
    output, draw, kills, whole = tmp_path / "results", random.Random(7), [], 0
    verdicts = output / "verdicts.jsonl"

    def written() -> int:
        return verdicts.stat().st_size if verdicts.exists() else 0

    while len(kills) < 10:
        goal, delay = written() + draw.randrange(900), draw.uniform(0, 0.05)
        command = start_grpo_lit(*arguments(finished_run, output))
        while written() < goal and command.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
        command.send_signal(signal.SIGKILL)
        if command.wait() == 0:  # complete already: a result to compare as well, and the next kills hit a new one
            whole += 1
            output.rename(f"{output}.{whole}")
            continue
        assert command.wait() == -signal.SIGKILL, command.read()
        kills.append(written())
    assert evaluate(finished_run, output) == 0
    assert len(set(kills)) > 3, f"the kills came at different amounts of work: {kills}"
    finished = sorted(tmp_path.glob("results*"))
    assert all(contents(folder) == contents(evaluated) for folder in finished), finished


def test_other_settings_do_not_mix_with_earlier_results(
    evaluated: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(evaluated)
    assert evaluate(finished_run, evaluated, "--temperature=0.5") == 2
    error = capsys.readouterr().err
    assert "base/held_out/sampled was made with other sampling" in error
    assert len(error.strip().splitlines()) == 1
    assert contents(evaluated) == before


def test_a_cell_without_an_answer_binds_nobody(tmp_path: Path) -> None:
    with ResultStore(tmp_path).opened() as store:
        store.check_cell("base/held_out/sampled", {"engine": "vllm"})  # which then failed to start
        store.check_cell("base/held_out/sampled", {"engine": "hf"})
        store.generations.append(
            [{"model": "base", "dataset": "held_out", "protocol": "sampled", "example": 0, "sample": 0}]
        )
        store.check_cell("base/held_out/sampled", {"engine": "hf"})
        with pytest.raises(UserError, match="made with other engine"):
            store.check_cell("base/held_out/sampled", {"engine": "vllm"})


def test_overwrite_keeps_the_earlier_results_aside(finished_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    only = ["--protocol=deterministic", "--limit=2"]
    assert evaluate(finished_run, output, *only) == 0
    before = contents(output)
    assert evaluate(finished_run, output, *only, "--overwrite", "--seed=3") == 0
    assert contents(tmp_path / "results.1") == before
    assert contents(output).keys() == before.keys()


def final_test_file(folder: Path) -> Path:
    path = folder / "math500.jsonl"
    rows = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_final_test_set_may_not_select(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f'--datasets={{"math500": {{"path": "{final_test_file(tmp_path)}", "max_completion_length": 4}}}}'
    wanted = [data, "--prompt_template={question}=", "--select_by=math500/pass@1", "--protocol=deterministic"]
    with monkeypatch.context() as patch:
        patch.setattr("grpo_lit.evaluation.runner.load_model", None)
        assert evaluate(finished_run, tmp_path / "a", *wanted) == 2
    error = capsys.readouterr().err
    assert "final test set" in error
    assert "--allow-selection-on-test" in error
    assert not (tmp_path / "a").exists()
    assert evaluate(finished_run, tmp_path / "a", *wanted, "--allow-selection-on-test") == 0
    selection = json.loads((tmp_path / "a/selection.json").read_text())
    assert selection["selected_on_final_test"] is True
    assert evaluate(finished_run, tmp_path / "b", "--protocol=deterministic", "--select_by=held_out/pass@1") == 0
    selection = json.loads((tmp_path / "b/selection.json").read_text())
    assert selection["selected_on_final_test"] is False
    assert selection["scores"][selection["selected"]] == max(selection["scores"].values())
    assert evaluate(finished_run, tmp_path / "b", "--protocol=deterministic", "--select_by=held_out/mean_length") == 0
    selection = json.loads((tmp_path / "b/selection.json").read_text())
    assert selection["scores"][selection["selected"]] == min(selection["scores"].values())


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--run=missing"], ["error: run='missing'", "config.yaml"]),
        (["--samples=0"], ["samples=0"]),
        (["--temperature=0"], ["temperature=0.0", "deterministic"]),
        (["--select_by=nothing/pass@1"], ["select_by", "held_out"]),
        (["--select_by=held_out/pass@9"], ["select_by='held_out/pass@9'", "pass@2"]),
        (['--models={"x": {}}'], ["models.x"]),
        (['--models={"x": {"adapter": "missing"}}'], ["models.x.adapter", "adapter_config.json"]),
        (['--models={"a b": {"path": "p"}}'], ["models='a b'"]),
        (['--datasets={"x": {"name": "nothing"}}'], ["nothing"]),
        (['--models={"x": {"path": "p", "dtype": "float32"}}'], ["models.x.dtype: got float32"]),
        (['--models={"x": {"pth": "p"}}'], ["models.x.pth", "did you mean models.x.path?"]),
        (["--datasets.x.limit=many"], ["datasets.x.limit: got many"]),
        (['--datasets={"x": {"name": "custom", "path": "missing.jsonl"}}'], ["datasets.x.path", "missing.jsonl"]),
        (["--config=missing"], ["--config", "missing"]),
    ],
)
def test_mistakes_end_in_one_line_before_loading(
    extra: list[str], words: list[str], finished_run: Path, refused: Callable[..., None]
) -> None:
    refused(arguments(finished_run, "results", *extra), *words)


def test_what_lies_over_the_base_is_checked_without_its_weights(
    finished_run: Path, tiny_llama: Path, tiny_gpt2: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    adapter = Path(shutil.copytree(finished_run / "adapter", tmp_path / "adapter"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    last = str(finished_run / "checkpoints" / "last.ckpt")

    def refuse(changes: dict[str, Any], entry: dict[str, Any], *words: str) -> None:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
        refused(arguments(finished_run, "results", f"--models={json.dumps({'x': entry})}"), *words)

    refuse({"base_model_name_or_path": None}, {"adapter": str(adapter)}, "models.x.path=None", "the base model")
    refuse({"r": 7}, {"adapter": str(adapter), "path": str(tiny_llama)}, "models.x.adapter=", "tensors of its shapes")
    refuse({}, {"ckpt_path": last, "path": str(tiny_gpt2)}, "models.x.ckpt_path=", "gpt2")
    nothing = Path("~/no.ckpt").expanduser()
    refuse({}, {"ckpt_path": "~/no.ckpt", "path": str(tiny_llama)}, f"models.x.ckpt_path='{nothing}'")


def test_every_kind_of_model_loads_and_final_differs_from_base(finished_run: Path, tiny_llama: Path) -> None:
    import torch

    entries = {
        "base": ModelEntry(path=str(tiny_llama)),
        "run_base": ModelEntry(run=str(finished_run), which="base"),
        "final": ModelEntry(run=str(finished_run)),
        "folder": ModelEntry(adapter=str(finished_run / "adapter")),
        "last": ModelEntry(run=str(finished_run), which="last"),
        "ckpt": ModelEntry(path=str(tiny_llama), ckpt_path=str(best_checkpoint(finished_run, argument="run"))),
        "best": ModelEntry(run=str(finished_run), which="best"),
    }
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    logits = {}
    for name, entry in entries.items():
        policy, _ = load_model(resolve_model(name, entry, "cpu"), "cpu")
        with torch.no_grad():
            logits[name] = policy.model(ids).logits
    assert torch.equal(logits["base"], logits["run_base"])
    assert torch.equal(logits["final"], logits["folder"])
    assert torch.equal(logits["final"], logits["last"])
    assert torch.equal(logits["best"], logits["ckpt"])
    assert (logits["final"] - logits["base"]).abs().max() > 1e-3


def test_tiers_name_registered_datasets_and_read_local_files(tmp_path: Path) -> None:
    final_test_file(tmp_path)
    for name in ("gsm8k_test", "gsm_plus", "aime24", "amc23"):
        answer = "#### 3" if name == "gsm8k_test" else "3"
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "1 + 2", "answer": answer}) + "\n")
    config = EvaluateConfig(models={"m": ModelEntry(path="p")}, tier="minimal", data_dir=str(tmp_path))
    tasks = load_tasks(complete_config(config))
    assert [task.label for task in tasks] == list(TIERS["minimal"].datasets)
    assert all(task.final_test for task in tasks)
    assert config.protocols == ("deterministic",)
    assert config.sampling("gsm8k", "deterministic").max_completion_length == 8192
    large = EvaluateConfig(models={"m": ModelEntry(path="p")}, tier="maximal", datasets={"aime24": DatasetEntry()})
    assert large.num_samples("aime24", "sampled") == 32
    assert set(TIERS["minimal"].datasets) < set(TIERS["strong"].datasets) < set(TIERS["maximal"].datasets)
    by_hub_id = {"x": DatasetEntry(name="HuggingFaceH4/MATH-500", path=str(tmp_path / "math500.jsonl"))}
    assert load_tasks(EvaluateConfig(datasets=by_hub_id))[0].final_test
    with pytest.raises(UserError, match="tier"):
        complete_config(EvaluateConfig(models={"m": ModelEntry(path="p")}))


def test_answers_vote_by_equivalence_not_by_spelling() -> None:
    row = {"answer": "5", "index": 0}
    texts = [r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{5}", r"\boxed{5.0}", r"so \boxed{7", "7"]
    verdicts = judge_samples(texts, "p", row, judge="math_accuracy", format_judge="boxed_format")
    assert [v.answer_class for v in verdicts] == [1, 1, 1, 0, 0, None, 2]
    assert [v.kind for v in verdicts] == ["wrong"] * 3 + ["correct"] * 2 + ["unparsable", "wrong"]
    assert [v.formatted for v in verdicts] == [True] * 5 + [False, False]
    exact = judge_samples([" Paris", "Paris", "x"], "p", {"answer": " Paris"}, judge="exact_match", format_judge=None)
    assert [v.answer_class for v in exact] == [0, 1, 2]
    assert answer_classes(["timeout", "wrong"], ["1", "1"], lambda a, b: a == b) == [None, 1]


def test_a_judge_that_hangs_ends_the_command(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge_hangs.py").write_text("import time\ndef hangs(prompts, completions):\n    time.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    judged = f'--datasets={{"held_out": {{"run": "{finished_run}", "judge": "judge_hangs.hangs"}}}}'
    assert evaluate(finished_run, tmp_path / "e", judged, "--reward_timeout_s=0.3", "--limit=1") == 2
    assert "'hangs'" in (error := capsys.readouterr().err)
    assert "took more than 0.3 s" in error
    assert evaluate(finished_run, tmp_path / "e", "--reward_timeout_s=0") == 2
    assert "reward_timeout_s=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "damaged", "words"),
    [
        ("verdicts.jsonl", '{"model": "m", "dat', "verdicts.jsonl, line 2 is damaged: no JSON object with a model"),
        ("generations.jsonl", '{"model": "m"}', "generations.jsonl, line 2 is damaged: no JSON object with a model"),
        ("timings.jsonl", "[]", "timings.jsonl, line 2 is damaged: no JSON object with a model, seconds"),
        ("cells.json", "[]", "cells.json is damaged: no JSON object; restore it or take it out"),
        ("run_config.json", "{", "run_config.json is damaged: no JSON object; restore it or take it out"),
    ],
)
def test_a_damaged_file_is_named_and_kept(
    name: str, damaged: str, words: str, evaluated: Path, finished_run: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(evaluated, tmp_path / "e")
    file = tmp_path / "e" / name
    lines = file.read_text().splitlines()
    if name.endswith(".jsonl"):
        file.write_text("\n".join([lines[0], damaged, *lines[2:]]) + "\n")
    else:
        file.write_text(damaged)
    before = contents(tmp_path / "e")
    assert evaluate(finished_run, tmp_path / "e") == 1
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert contents(tmp_path / "e") == before
    if name.endswith(".jsonl"):  # as the message says: taken out, what was lost is made again
        file.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
        assert evaluate(finished_run, tmp_path / "e") == 0
        assert (tmp_path / "e" / "summary.csv").read_bytes() == (evaluated / "summary.csv").read_bytes()


def test_lines_separators_inside_answers_do_not_break_the_files(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    key = SampleKey("m", "d", "sampled", 0, 0)._asdict()
    record = {**key, "prompt": "p", "completion": "a\u2028b\x85c\nd \ud800"}
    with store.opened():
        store.generations.append([record])
    again = ResultStore(tmp_path)
    with again.opened():
        assert again.generations.records == [record]
        with pytest.raises(UserError, match="no other evaluation"), ResultStore(tmp_path).opened():
            pass


def test_shipped_evaluation_config_is_of_this_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = yaml.safe_load(shipped_configs()["evaluate"].read_text())
    assert main(["evaluate", "--config=evaluate", f"--run={tmp_path}"]) == 2
    assert f"error: run={str(tmp_path)!r}" in capsys.readouterr().err
    assert settings["run"] == "runs/quickstart"


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name in EvaluateConfig.__dataclass_fields__:
        assert f"--{name}" in out


def test_held_out_prompts_are_answered_as_in_the_run(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Callable[..., Any]
) -> None:
    """Chats as they are, and an end at the first box: the policy was never taught to stop behind it."""
    chats = [[{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": "so"}] for n in range(8)]
    rows = [{"prompt": chat, "answer": str(n + 1)} for n, chat in enumerate(chats)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--data.dataset=custom", f"--data.path={tmp_path / 'chats.jsonl'}", "--data.columns={question: prompt}"]
    own += ["--data.val_prompts=4", "--model.validation.sampling.stop_at=boxed", "--trainer.max_steps=1"]
    assert main(fit_arguments(tiny_llama, tmp_path / "run", *own)) == 0
    config = complete_config(EvaluateConfig(run=str(tmp_path / "run")))
    (task,) = load_tasks(config)
    policy, encoder = load_model(resolve_model("base", config.models["base"], "cpu"), "cpu")
    assert task.render(task.rows[0], encoder).endswith("+1=\n\nso")
    assert config.sampling("held_out", "sampled", task.sampling_of_run).stop_at == "boxed"
    config.datasets["held_out"].prompt_template = "Q: {question}"
    (task,) = load_tasks(config)
    assert task.render(task.rows[0], encoder) == f"Q: {task.rows[0]['question']}"
