"""What is too much alike, what can't be judged, and how ``grpo-lit check`` says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grpo_lit.cli import main
from grpo_lit.datamodules import load_rows
from grpo_lit.datamodules.gold import gold_problems
from grpo_lit.datamodules.overlap import find_duplicates, find_overlap

Fit = Callable[..., Sequence[str]]
STORY = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
OTHER = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"


def test_equal_alike_and_different() -> None:
    changed = STORY.replace("48", "52")
    dressed = "  " + STORY.upper().replace(",", "") + "!"
    pairs = find_duplicates([STORY, OTHER, dressed, changed, "1+2", "1+3", "1+2"])
    assert [(pair.first, pair.second, pair.equal) for pair in pairs] == [
        (0, 2, True),
        (0, 3, False),
        (4, 6, True),
    ]
    assert pairs[1].share == 1, "numbers are alike to the n-grams"
    assert [pair.second for pair in find_duplicates([STORY, changed, STORY], near=False)] == [2]


def test_a_question_within_a_longer_one_is_a_copy() -> None:
    longer = OTHER + " " + STORY + " Give the sum of both answers, and of nothing else that stands in this long text."
    assert [(p.first, p.second, p.equal) for p in find_overlap([longer], [STORY])] == [(0, 0, False)]
    assert [(p.first, p.second, p.equal) for p in find_overlap([STORY], [longer])] == [(0, 0, False)]


def test_sums_of_other_numbers_are_other_questions() -> None:
    assert find_duplicates(["1+2+3+4+5+6", "7+8+9+1+2+3", "1+2+3+4+5+7"]) == []


def test_boilerplate_is_no_resemblance() -> None:
    frame = "Please solve the following problem step by step and give a number: {} times {}"
    names = [f"{first}{second}" for first in "abcdefghi" for second in "klmnopqrs"]
    assert find_duplicates([frame.format(name, name[::-1]) for name in names]) == []
    assert len(find_duplicates([frame.format(name, name[::-1]) for name in names[:20]])) == 19


def test_perturbed_copies_of_held_out_questions_are_found(shared_data: Path) -> None:
    rows = load_rows("gsm_plus", path=str(shared_data / "gsm_plus_testmini.jsonl"))
    seeds = list(dict.fromkeys(row["seed_question"] for row in rows))
    changed = [row for row in rows if row["perturbation_type"] == "numerical substitution"]
    pairs = find_overlap(seeds, [row["question"] for row in changed])
    right = [pair for pair in pairs if seeds[pair.first] == changed[pair.second]["seed_question"]]
    assert len(right) == len(pairs), "none is taken for a copy of another"
    assert len(pairs) >= 0.85 * len(changed)
    unrelated = [row["question"] for row in load_rows("gsm8k", path=str(shared_data / "gsm8k_train.jsonl"))]
    assert len(find_overlap(unrelated, seeds)) <= 2


# file, row: what is wrong with the gold answer there
BAD_GOLD = {("olympiadbench", "$t(0,4]$"): "an interval that lost its relation sign"}


def test_every_gold_answer_of_the_shared_files_can_be_judged_or_is_listed(shared_data: Path) -> None:
    names = {"gsm_plus_testmini": "gsm_plus", "minerva_math": "minerva_math", "olympiadbench": "olympiadbench"}
    names |= {"math500": "math500", "aime24": "aime24", "amc23": "amc23", "deepscaler": "deepscaler"}
    names |= {"dapo_math_17k": "dapo_math_17k", "open_rs_schema_sample": "open_rs", "gsm8k_test": "gsm8k"}
    for file, name in names.items():
        rows = load_rows(name, path=str(shared_data / f"{file}.jsonl"))
        problems = gold_problems([row["answer"] for row in rows])
        bad = {(file, row["answer"]) for row, problem in zip(rows, problems, strict=True) if problem}
        assert bad == {key for key in BAD_GOLD if key[0] == file}


def test_what_can_t_be_judged_is_named() -> None:
    good = ["4", "None", "an ellipse", "2:30 PM", "7.31", r"\frac{\sqrt{3}}{2}", "(0,1]", r"x \le 2"]
    bad = ["", r"10^{10^{10}} + (", r"\frac{1}{", "????", "10!!!!!!"]
    problems = gold_problems(good + bad)
    assert problems[: len(good)] == [None] * len(good)
    assert all(problems[len(good) :])
    assert problems[len(good)] == "no answer in it"
    assert "refused to evaluate" in str(problems[len(good) + 1])


def test_check_reports_length_gold_duplicates_and_overlap(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["many words"] * 20)
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(20)]
    rows += [{"question": STORY, "answer": "72"}, {"question": STORY.replace("48", "52"), "answer": "78"}]
    rows += [{"question": "3 + 1", "answer": "4"}, {"question": long, "answer": "10^{10^{10}} + ("}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": STORY.replace("48", "50"), "answer": "75"}))
    own = ["--data.dataset=custom", f"--data.path={tmp_path / 'train.jsonl'}", "--data.max_prompt_length=180"]
    own += [f"--data.val_path={tmp_path / 'val.jsonl'}", "--model.rollout.sampling.max_completion_length=4"]
    own += ["--model.validation.sampling.max_completion_length=4"]
    shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    arguments = list(fit_arguments(tmp_path / "model", tmp_path / "run", *own))[1:]
    assert main(["check", *arguments]) == 0
    out = capsys.readouterr().out
    assert "ok    data custom: 24 training prompts, 1 held out" in out
    assert "prompts too long: 1 of 24 exceed data.max_prompt_length=180 tokens and are left out (rows 23)" in out
    assert "gold answers: 1 of 24 can't be judged (row 23 '10^{10^{10}} + (': refused" in out
    assert "duplicates in training: 1 equal, 1 alike by n-grams, of 24" in out
    assert "held-out questions in training: 0 equal, 1 alike by n-grams, of 1" in out
