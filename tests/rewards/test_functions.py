"""Built-in reward functions, user functions by path, and the sum of a step's rewards."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rewards import (
    BUILT_IN_REWARDS,
    MathAccuracy,
    RewardError,
    RewardResult,
    boxed_format,
    compute_rewards,
    from_messages,
    math_accuracy,
    resolve_reward,
    think_format,
)

PROMPTS = ["a", "b", "c"]
COMPLETIONS = [r"\boxed{1}", r"\boxed{2}", r"\boxed{3"]


# ---- built in -----------------------------------------------------------------------------------------------------


def test_math_accuracy_and_its_verdicts() -> None:
    result = math_accuracy(PROMPTS, COMPLETIONS, answer=["1", "3", "3"])
    assert result == [1.0, 0.0, 0.0]
    assert [v.kind for v in result.verdicts] == ["correct", "wrong", "unparsable"]


def test_math_accuracy_reads_golds_of_any_column_type() -> None:
    completions = [r"\boxed{27}", r"\boxed{(2,1),(1,2)}", "#### 1,234", r"\boxed{7}"]
    golds = [27.0, ["$(1,2)$", "$(2,1)$"], 1234, None]
    assert math_accuracy([""] * 4, completions, answer=golds) == [1.0, 1.0, 1.0, None]


def test_math_accuracy_with_other_values() -> None:
    function = MathAccuracy(right=2.0, wrong=-0.5, undecided=None, timeout_s=0.3)
    endless = r"\boxed{\int_0^9 \int_0^9 \int_0^9 \sin(t^9 u^9 v^9 x) dt du dv}"
    assert function(["", "", ""], [r"\boxed{1}", "none", endless], answer=["1", "1", r"\sin x"]) == [2.0, -0.5, None]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>\nFirst, 2 plus 2.\n</think>\nThe answer is 4.", 1.0),
        ("First, 2 plus 2.\n</think>\nThe answer is 4.", 1.0),  # the template had opened the tag
        ("\n<think>a</think>b", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think>  \n", 0.0),
        ("<think> </think>4", 0.0),
        ("</think>4", 0.0),
        ("<think>a 4", 0.0),
        ("The answer is 4.", 0.0),
        ("before <think>a</think>4", 0.0),
        ("<think>a</think>4</think>", 0.0),
        ("<think>a<think>b</think>4", 0.0),
        ("<think>a</think>4 <think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(completion: str, score: float) -> None:
    assert think_format([""], [completion]) == [score]


def test_boxed_format() -> None:
    completions = [r"so \boxed{4}", r"\boxed{4", "4", r"\boxed{ }", r"<think>\boxed{4}</think>4", r"a</think>\boxed{4}"]
    assert boxed_format([""] * 6, completions) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


# ---- by name ------------------------------------------------------------------------------------------------------


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards_x.py").write_text(
        "def short(prompts, completions):\n    return [-len(c) for c in completions]\n"
        "class Strict:\n    def __call__(self, prompts, completions):\n        return [0.5] * len(completions)\n"
        "async def slow(prompts, completions):\n    return []\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken_x.py").write_text("import no_such_package_x\n")
    (tmp_path / "my_crash_x.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return "my_rewards_x"


@pytest.mark.parametrize("separator", [".", ":"])
def test_functions_by_path_from_the_current_folder(my_rewards: str, separator: str) -> None:
    assert resolve_reward(f"{my_rewards}{separator}short")(["p"], ["abc"]) == [-3]  # type: ignore[comparison-overlap]
    assert resolve_reward(f"{my_rewards}{separator}Strict")(["p"], ["abc"]) == [0.5]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("math_acuracy", "math_accuracy, think_format"),
        ("my_rewards_x.absent", "has no 'absent'"),
        ("no_such_module_x.fn", "no module 'no_such_module_x'"),
        ("my_rewards_x.sub.fn", "no module 'my_rewards_x.sub'"),
        ("my_broken_x.fn", "needs 'no_such_package_x'"),
        ("my_crash_x.fn", "ZeroDivisionError"),
        ("my_rewards_x:number", "int, which can't be called"),
        ("my_rewards_x:slow", "async"),
        ("", "one of math_accuracy"),
        (":", "one of math_accuracy"),
        (3, "one of math_accuracy"),
    ],
)
def test_bad_names_say_what_is_accepted(my_rewards: str, name: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_reward(name)
    message = str(caught.value)
    assert message.startswith(f"model.rewards={name!r}: accepted is one of {', '.join(BUILT_IN_REWARDS)}")
    assert says in message
    assert "\n" not in message


# ---- together -----------------------------------------------------------------------------------------------------


def half(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [0.5] * len(completions)


def some(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    return [None, 1.0, 2.0][: len(completions)]


def none(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    return [None, None, 4.0]


def test_weighted_sum_leaves_out_who_abstains() -> None:
    output = compute_rewards([half, some], PROMPTS, COMPLETIONS, {}, weights=[2.0, 0.25])
    assert output.rewards.dtype == torch.float32
    assert output.rewards.tolist() == [1.0, 1.25, 1.5]
    assert output.per_function["half"].tolist() == [0.5, 0.5, 0.5]
    assert math.isnan(output.per_function["some"][0])
    assert output.verdict_counts == {}


def test_row_on_which_all_abstain_is_nan() -> None:
    rewards = compute_rewards([some, none], PROMPTS, COMPLETIONS, {}).rewards
    assert rewards.isnan().tolist() == [True, False, False]
    assert rewards[1:].tolist() == [1.0, 6.0]


def test_verdicts_are_counted_and_timed() -> None:
    output = compute_rewards(["math_accuracy", "boxed_format"], PROMPTS, COMPLETIONS, {"answer": ["1", "3", "3"]})
    assert output.rewards.tolist() == [2.0, 1.0, 0.0]
    assert output.verdict_counts == {"correct": 1, "wrong": 1, "unparsable": 1}
    assert len(output.latencies_s) == 3
    assert all(0 < seconds < 1 for seconds in output.latencies_s)


def test_functions_get_the_columns_they_name() -> None:
    seen: list[set[str]] = []

    def one(prompts: Any, completions: Any, level: Any) -> list[float]:
        seen.append({"level"})
        return list(level)

    def every(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append(set(columns))
        return [0.0] * len(completions)

    def optional(completions: Any, level: Any = None, other: int = 3) -> list[float]:
        seen.append({"level"} if level else set())
        return [float(other)] * len(completions)

    output = compute_rewards([one, every, optional], PROMPTS, COMPLETIONS, {"level": [1, 2, 3], "id": [7, 8, 9]})
    assert seen == [{"level"}, {"level", "id"}, {"level"}]
    assert output.rewards.tolist() == [4.0, 5.0, 6.0]


def test_function_that_changes_its_arguments_changes_them_for_nobody_else() -> None:
    def spoil(prompts: Any, completions: Any, answer: Any) -> list[float]:
        completions.clear()
        answer[:] = ["x"] * 3
        return [0.0] * 3

    columns = {"answer": ["1", "2", "3"]}
    output = compute_rewards([spoil, math_accuracy], PROMPTS, COMPLETIONS, columns)
    assert output.rewards.tolist() == [1.0, 1.0, 0.0]
    assert columns == {"answer": ["1", "2", "3"]}


def test_same_name_twice_keeps_both() -> None:
    output = compute_rewards([half, half], PROMPTS, COMPLETIONS, {})
    assert list(output.per_function) == ["half", "half_2"]


def test_tensors_and_numpy_are_numbers_too() -> None:
    def tensor(prompts: Any, completions: Any) -> Any:
        return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    def array(prompts: Any, completions: Any) -> Any:
        return torch.tensor([1, 2, 3]).numpy()

    def boolean(prompts: Any, completions: Any) -> Any:
        return [True, False, True]

    assert compute_rewards([tensor, array, boolean], PROMPTS, COMPLETIONS, {}).rewards.tolist() == [3.0, 4.0, 7.0]


def test_no_rows() -> None:
    output = compute_rewards([math_accuracy, half], [], [], {"answer": []})
    assert output.rewards.shape == (0,)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "returned 2 rewards for 3 completions"),
        ([1.0, math.nan, 0.0], "returned nan for row 1"),
        ([1.0, 0.0, math.inf], "returned inf for row 2"),
        ([1.0, "2", 0.0], "returned '2' for row 1"),
        ([1.0, [2.0], 0.0], "returned [2.0] for row 1"),
        ([1.0, 1e300, 0.0], "returned 1e+300 for row 1"),
        (None, "returned NoneType"),
        (1.0, "returned float"),
        ("abc", "returned str"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict"),
    ],
)
def test_what_is_no_reward_is_reported_with_the_functions_name(returned: Any, says: str) -> None:
    def my_function(prompts: Any, completions: Any) -> Any:
        return returned

    with pytest.raises(RewardError) as caught:
        compute_rewards([half, my_function], PROMPTS, COMPLETIONS, {})
    assert says in str(caught.value)
    assert "'my_function'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_exception_is_reported_with_its_cause() -> None:
    def my_function(prompts: Any, completions: Any) -> Any:
        raise KeyError("gone\naway")

    with pytest.raises(RewardError, match=r"'my_function'.*raised KeyError: 'gone") as caught:
        compute_rewards([my_function], PROMPTS, COMPLETIONS, {})
    assert isinstance(caught.value.__cause__, KeyError)


def test_system_faults_pass_through() -> None:
    def my_function(prompts: Any, completions: Any) -> Any:
        raise SystemFault("disk full")

    with pytest.raises(SystemFault, match="^disk full$"):
        compute_rewards([my_function], PROMPTS, COMPLETIONS, {})


def test_async_functions_are_refused() -> None:
    async def my_function(prompts: Any, completions: Any) -> Any:
        return [1.0] * 3

    with pytest.raises(RewardError, match="async"):
        compute_rewards([my_function], PROMPTS, COMPLETIONS, {})  # type: ignore[list-item]


def test_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"'math_accuracy'.*'answer'.*there are: prompts, completions, question, level"):
        compute_rewards([math_accuracy], PROMPTS, COMPLETIONS, {"question": PROMPTS, "level": PROMPTS})


@pytest.mark.parametrize(
    ("prompts", "columns", "weights", "named"),
    [
        (["a"], {}, None, "prompts="),
        (PROMPTS, {"answer": ["1"]}, None, "column answer="),
        (PROMPTS, {}, [1.0, 2.0], "model.reward_weights="),
    ],
)
def test_lengths_must_agree(prompts: Any, columns: Any, weights: Any, named: str) -> None:
    with pytest.raises(UserError, match=rf"^{named}"):
        compute_rewards([half], prompts, COMPLETIONS, columns, weights)


@pytest.mark.faults
def test_slow_function_is_interrupted_and_the_signal_given_back() -> None:
    handler = signal.getsignal(signal.SIGALRM)

    def stubborn(prompts: Any, completions: Any) -> Any:
        try:
            time.sleep(60)
        except Exception:
            return [1.0] * 3

    start = time.perf_counter()
    with pytest.raises(RewardError, match=r"'stubborn'.*took more than 0.2 s"):
        compute_rewards([stubborn], PROMPTS, COMPLETIONS, {}, timeout_s=0.2)
    assert time.perf_counter() - start < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert compute_rewards([half], PROMPTS, COMPLETIONS, {}, timeout_s=5.0).rewards.tolist() == [0.5] * 3


@pytest.mark.faults
def test_slow_function_of_another_thread_is_left_behind() -> None:
    failures: list[Exception] = []
    gate = threading.Event()

    def work() -> None:
        try:
            compute_rewards([lambda prompts, completions: gate.wait(60)], PROMPTS, COMPLETIONS, {}, timeout_s=0.2)
        except RewardError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    gate.set()
    assert "took more than 0.2 s" in str(failures[0])


@pytest.mark.faults
def test_a_name_from_a_config_calls_nothing_but_classes_of_rewards(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in (f"subprocess.Popen(args='touch {mark}', shell=True)", f"os.system(command='touch {mark}')"):
        with pytest.raises(UserError, match=r"__call__|brackets are for classes"):
            resolve_reward(name)
    time.sleep(0.2)
    assert not mark.exists()


@pytest.mark.faults
def test_slow_function_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import time\nfrom grpo_lit.rewards import compute_rewards, RewardError\n"
        "def slow(prompts, completions): time.sleep(600)\n"
        "try: compute_rewards([slow], ['p'], ['c'], {}, timeout_s=0.1)\nexcept RewardError: print('left')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "left\n"


def test_result_is_a_list() -> None:
    result = RewardResult([1.0, None])
    assert result == [1.0, None]
    assert result.verdicts == []


def test_a_reward_function_of_chat_messages_works_once_wrapped_and_is_told_of_the_wrapper_before() -> None:
    """As in TRL's documentation: completions are lists of one message, further columns arrive by name."""

    def has_answer(completions: Any, answer: list[str], **kwargs: Any) -> list[float]:
        return [float(gold in completion[0]["content"]) for completion, gold in zip(completions, answer, strict=True)]

    given: dict[str, Any] = {
        "prompts": ["1+1", "1+2"],
        "completions": ["is 2", "is 4"],
        "columns": {"answer": ["2", "3"]},
    }
    output = compute_rewards([from_messages(has_answer)], **given)
    assert output.per_function["has_answer"].tolist() == [1.0, 0.0]
    with pytest.raises(RewardError, match="grpo_lit.rewards.from_messages wraps a function of TRL's chat messages"):
        compute_rewards([has_answer], **given)
