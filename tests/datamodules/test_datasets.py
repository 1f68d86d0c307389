"""Every dataset by its name, in its own schema; any other file by its columns."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from grpo_lit.cli import main
from grpo_lit.datamodules import DATASETS, MathDataModule, load_rows
from grpo_lit.datamodules.datasets import boxed_answer, dapo_question, dataset_spec
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.model_source import resolve_model_source
from grpo_lit.prompts import PromptEncoder, load_tokenizer

# file: (dataset, rows, question of the first begins with, its answer)
FILES = {
    "gsm8k_train.jsonl": ("gsm8k", 2000, "Natalia sold clips", "72"),
    "gsm8k_test.jsonl": ("gsm8k", 659, "Janet\u2019s ducks", "18"),
    "gsm_plus_testmini.jsonl": ("gsm-plus", 1208, "Martha is knitting", "140"),
    "math500.jsonl": ("math500", 250, "Convert the point", r"\left( 3, \frac{\pi}{2} \right)"),
    "aime24.jsonl": ("aime24", 15, "Every morning Aya", "204"),
    "amc23.jsonl": ("amc23", 20, "Cities $A$ and $B$", "27"),
    "minerva_math.jsonl": ("minerva_math", 136, "Each of the two Magellan", "1.6"),
    "olympiadbench.jsonl": ("olympiadbench", 338, "Xenia and Sergey", "2"),
    "dapo_math_17k.jsonl": ("DAPO-Math-17k", 9, "In triangle $ABC$, $\\sin", "34"),
    "deepscaler.jsonl": ("deepscaler", 300, "The operation $\\otimes$", r"-\frac{2}{3}"),
    "open_rs_schema_sample.jsonl": ("open_rs", 5, "A train travels", "72"),
}
Fit = Callable[..., Sequence[str]]


@pytest.mark.parametrize("name", list(FILES))
def test_file_loads_by_its_dataset_s_name(name: str, shared_data: Path) -> None:
    dataset, count, begin, answer = FILES[name]
    rows = load_rows(dataset, path=str(shared_data / name))
    assert len(rows) == count
    assert rows[0]["question"].startswith(begin)
    assert rows[0]["answer"] == answer
    original = json.loads((shared_data / name).read_text(encoding="utf-8").split("\n")[0])
    assert set(original) <= set(rows[0])


def test_files_are_all_there_is(shared_data: Path) -> None:
    assert {file.name for file in shared_data.glob("*.jsonl")} == {*FILES, "verifier_cases.jsonl"}


def test_unanswerable_questions_have_an_answer_that_says_so(shared_data: Path) -> None:
    rows = load_rows("gsm_plus", path=str(shared_data / "gsm_plus_testmini.jsonl"))
    assert {row["answer"] for row in rows if row["perturbation_type"] == "critical thinking"} == {"None"}


@pytest.fixture
def long_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model with positions enough for whole problems."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


@pytest.mark.parametrize("name", list(FILES))
def test_file_trains_a_step(name: str, shared_data: Path, long_llama: Path, tmp_path: Path, fit_arguments: Fit) -> None:
    root = tmp_path / "run"
    own = [
        f"--data.dataset={FILES[name][0]}",
        f"--data.path={shared_data / name}",
        "--data.prompts_per_step=2",
        "--data.val_prompts=0",
        "--data.max_prompt_length=1200",
        "--model.rollout.group_size=2",
        "--model.rewards=[math_accuracy, tests_helper_reward.letters]",
        "--trainer.max_steps=1",
        "--trainer.logger=false",
    ]
    (tmp_path / "tests_helper_reward.py").write_text(
        "def letters(prompts, completions):\n    return [sum(map(ord, text)) / 100 for text in completions]\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        assert main(fit_arguments(long_llama, root, *own)) == 0
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("tests_helper_reward", None)
    (record,) = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert record["step"] == 1
    assert record["train/grad_norm"] > 0
    lines = (root / "completions" / "step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 4


ROWS = [{"text": "1+1?", "meta": {"gold": 2.0}, "note": "a"}, {"text": "2,2?", "meta": {"gold": 3.5}, "note": ""}]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "meta.gold", "note"])
            writer.writerows([row["text"], int(row["meta"]["gold"] * 2) / 2, row["note"]] for row in ROWS)  # type: ignore[index,operator]
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_any_file_by_naming_its_columns(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{suffix}")
    rows = load_rows("custom", path=str(path), columns={"question": "text", "answer": "meta.gold", "context": "note"})
    assert [row["question"] for row in rows] == ["a\n\n1+1?", "2,2?"]
    assert [float(row["answer"]) for row in rows] == [2, 3.5]


def test_rows_without_answers_train_where_the_reward_needs_none(
    long_llama: Path, tmp_path: Path, fit_arguments: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    path, root = tmp_path / "prompts.jsonl", tmp_path / "run"
    path.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(6)))
    (tmp_path / "tests_helper_reward.py").write_text(
        "def letters(prompts, completions):\n    return [sum(map(ord, text)) / 100 for text in completions]\n"
    )
    own = ["--data.dataset=custom", f"--data.path={path}", "--data.val_prompts=2", "--trainer.max_steps=1"]
    own += ["--data.columns={question: prompt, answer: null}", "--trainer.logger=false"]
    sys.path.insert(0, str(tmp_path))
    try:
        assert main(fit_arguments(long_llama, root, *own, "--model.rewards=[tests_helper_reward.letters]")) == 0
        assert main(fit_arguments(long_llama, tmp_path / "no", *own, "--model.rewards=[math_accuracy]")) == 2
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("tests_helper_reward", None)
    assert "it needs 'answer', there are: prompts, completions, prompt" in capsys.readouterr().err
    with pytest.raises(UserError, match="a row with an answer"):
        load_rows("custom", path=str(path), columns={"question": "prompt"})


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1?", "answer": 1}\n{"question": "2?", "answer": 2}')
    (tmp_path / "test.csv").write_text("question,answer\n2?,2\n3?,3\n")
    data = MathDataModule("custom", path=str(tmp_path), val_split="test", val_prompts=5)
    train, val = data.load()
    assert [row["question"] for row in train] == ["1?"], "what is held out isn't trained on"
    assert [row["question"] for row in val] == ["2?", "3?"]
    with pytest.raises(UserError, match=r"dev\.jsonl"):
        load_rows("custom", path=str(tmp_path), split="dev")


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "both"))
    own: dict[str, Any] = {"columns": {"question": "text", "answer": "meta.gold"}}
    assert [row["answer"] for row in load_rows("custom", path=str(tmp_path / "one"), **own)] == ["2", "3.5"]
    for split, answers in (("train", ["2", "3.5"]), ("test", ["3.5"])):
        rows = load_rows("custom", path=str(tmp_path / "both"), split=split, **own)
        assert [row["answer"] for row in rows] == answers
    with pytest.raises(UserError, match="save_to_disk"):
        load_rows("custom", path=str(tmp_path / "both"), split="validation", **own)
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"cut off")
    with pytest.raises(UserError, match="a complete folder"):
        load_rows("custom", path=str(tmp_path / "one"), **own)


@pytest.mark.parametrize("place", [".", "data"])
def test_a_folder_with_the_shards_of_a_copy_from_the_hub(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    for number, rows in enumerate((ROWS[:1], ROWS[1:])):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / place / f"train-{number:05d}-of-00002.parquet"
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / place / "train-eval-00000-of-00001.parquet")
    own: dict[str, Any] = {"path": str(tmp_path), "columns": {"question": "text", "answer": "meta.gold"}}
    assert [row["answer"] for row in load_rows("custom", **own)] == ["2", "3.5"]
    (tmp_path / place / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="all 2 shards"):
        load_rows("custom", **own)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "gsm9k"}, ["data.dataset='gsm9k'", "gsm8k", "hub id"]),
        ({"name": "math500", "split": "train"}, ["data.split='train'", "test"]),
        ({"name": "custom"}, ["data.path", "a file"]),
        ({"name": "custom", "columns": {"text": "q"}}, ["data.columns", "question, answer and context"]),
        ({"name": "custom", "path": "{rows}"}, ["row 1", "'problem' or 'question'", "there are text, meta, note"]),
        ({"name": "custom", "path": "{rows}", "columns": {"question": "text"}}, ["row 1", "an answer in column"]),
        ({"name": "gsm8k", "path": "{rows}.txt"}, ["data.path", ".parquet"]),
        ({"name": "custom", "path": "{torn}"}, ["record 3", "2 named in the first line"]),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    torn = tmp_path / "torn.csv"
    torn.write_text("question,answer\n1?,1\n2?\n")
    paths = {"rows": str(write(tmp_path / "rows.jsonl")), "torn": str(torn)}
    given = {key: value.format(**paths) if key == "path" else value for key, value in arguments.items()}
    with pytest.raises(UserError) as caught:
        load_rows(**given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"question": ' * 50_000, '{"question": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.faults
def test_json_that_breaks_parsers_is_one_line(text: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_text(text)
    with pytest.raises(UserError, match="JSON object a line"):
        load_rows("custom", path=str(file))


@pytest.mark.faults
def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(r'{"question": "a\ud800b \ud83d\ude00", "answer": "1", "more": [{"x": "\udc00"}]}' + "\n")
    (row,) = load_rows("custom", path=str(file))
    assert row["question"] == "a\ufffdb \U0001f600"
    assert row["more"] == [{"x": "\ufffd"}]


def test_a_hub_id_is_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any, split: str) -> list[dict[str, str]]:
        asked.append((*arguments, split))
        return [{"q": "1+1?", "solution": r"so \boxed{2}"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (row,) = load_rows("org/some-set", split="validation", columns={"question": "q"})
    assert (row["question"], row["answer"]) == ("1+1?", "2")
    assert asked == [("org/some-set", None, "validation")]


def test_each_entry_names_a_place_and_a_split() -> None:
    for name, spec in DATASETS.items():
        assert (spec.hub is not None) + (spec.generate is not None) == (name != "custom"), name
        assert spec.splits, name
    assert dataset_spec("MATH-500").hub == DATASETS["math500"].hub


def test_repeated_rows_of_a_copy_are_kept_once(shared_data: Path, tmp_path: Path, caplog: Any) -> None:
    text = (shared_data / "dapo_math_17k.jsonl").read_text()
    (tmp_path / "thrice.jsonl").write_text(text * 3)
    rows = load_rows("dapo_math_17k", path=str(tmp_path / "thrice.jsonl"))
    assert rows == load_rows("dapo_math_17k", path=str(shared_data / "dapo_math_17k.jsonl"))
    assert "18 of 27 rows repeat a question" in caplog.text


def test_chat_prompts_are_kept_or_give_their_question_to_the_template(shared_data: Path, tiny_llama: Path) -> None:
    path = str(shared_data / "dapo_math_17k.jsonl")
    tokenizer = load_tokenizer(resolve_model_source(str(tiny_llama)))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    encoder = PromptEncoder(tokenizer)
    common = {"val_prompts": 0, "max_prompt_length": None, "shuffle": False, "prompt_template": "Q: {question}"}
    texts = {}
    for messages, system in (("as_is", None), ("as_is", "Think."), ("question", None)):
        data = MathDataModule("dapo_math_17k", path=path, messages=messages, system_prompt=system, **common)  # type: ignore[arg-type]
        data.connect(encoder)
        texts[messages, system] = data.train_batch(range(1)).prompts[0]
    original = json.loads(Path(path).read_text().split("\n")[0])["prompt"][0]["content"]
    assert texts["as_is", None] == f"<user>{original}<assistant>"
    assert texts["as_is", "Think."] == f"<system>Think.<user>{original}<assistant>"
    assert texts["question", None].startswith("<user>Q: In triangle $ABC$")
    assert texts["question", None].endswith("find $a + b + c$.<assistant>")


def test_a_chat_without_the_known_wrapper_is_left_alone() -> None:
    assert dapo_question("What is 1+1?") == "What is 1+1?"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} m", r"\frac{1}{2}"),
        (["$2$", "$3$"], "$2$, $3$"),
        (27.0, "27"),
        ("A solution.\nWithout a box.", None),
        (r"\boxed{ }", None),
        (None, None),
    ],
)
def test_boxed_answer(text: Any, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_reasoning_gym_rows_are_those_of_the_seed() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"task": "chain_sum", "size": 6, "seed": 5, "max_terms": 3}
    rows = load_rows("reasoning_gym", options=options)
    assert len({row["question"] for row in rows}) == 6
    assert [row["question"] for row in rows] == [r["question"] for r in load_rows("reasoning_gym", options=options)]
    assert rows[0]["question"] != load_rows("reasoning_gym", options={**options, "seed": 6})[0]["question"]
    for wrong, words in (({"task": "chain_some"}, "chain_sum"), ({"task": "chain_sum", "min_terms": 9}, "settings")):
        with pytest.raises(UserError, match=words):
            load_rows("reasoning_gym", options={"size": 2, **wrong})


def test_reasoning_gym_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemFault, match=r"pip install 'grpo-lit\[gym\]'"):
        load_rows("reasoning_gym")


def test_reasoning_gym_trains_with_its_own_scorer(tiny_llama: Path, tmp_path: Path, fit_arguments: Fit) -> None:
    pytest.importorskip("reasoning_gym")
    root = tmp_path / "run"
    own = [
        "--data.dataset=reasoning_gym",
        '--data.dataset_options={"task": "chain_sum", "size": 30, "min_terms": 2, "max_terms": 2}',
        "--model.rewards=[gym_score]",
        "--trainer.max_steps=2",
        "--trainer.logger=false",
    ]
    assert main(fit_arguments(tiny_llama, root, *own)) == 0
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "val/accuracy" in lines[0]
    assert all("rollout/reward_gym_score" in line for line in lines[1:])
