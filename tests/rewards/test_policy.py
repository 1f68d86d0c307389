"""Units, percent and currency under each policy; the policy reaches the worker and the configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from grpo_lit.errors import UserError
from grpo_lit.rewards import MathAccuracy, VerifierPolicy, VerifierPool, gym_score, latency_histogram, resolve_reward
from grpo_lit.rewards.compute import reward_name

# gold, answer, and whether it is right: by default, and under the stricter policy named
PAIRS = [
    (r"25\%", "25", True, {"percent": "value"}, False),
    (r"25\%", "25", True, {"percent": "number"}, True),
    (r"25\%", "0.25", True, {"percent": "value"}, True),
    (r"25\%", "0.25", True, {"percent": "number"}, False),
    ("0.25", r"25\%", True, {"percent": "number"}, False),
    ("25", r"25\%", True, {"percent": "value"}, False),
    (r"25\%", r"25\%", True, {"percent": "value"}, True),
    (r"\frac{1}{4}", r"25\%", True, {"percent": "number"}, False),
    (r"60 \text{ km/h}", "60", True, {"units": "required"}, False),
    (r"60 \text{ km/h}", r"60 \text{ km/h}", True, {"units": "required"}, True),
    ("60", r"60 \text{ km/h}", True, {"units": "required"}, True),
    (r"90 \text{ minutes}", r"1.5 \text{ hours}", True, {"units": "required"}, True),
    (r"90 \text{ minutes}", r"1.5 \text{ hours}", True, {"units": "ignored"}, False),
    (r"9 \text{ inches}", r"9 \text{ feet}", False, {"units": "ignored"}, True),
    (r"5 \text{ m}", r"5 \text{ s}", False, {"units": "ignored"}, True),
    (r"\$36", "36", True, {"currency": "required"}, False),
    (r"\$36", r"\$36.00", True, {"currency": "required"}, True),
    (r"\$36", "36 dollars", True, {"currency": "required"}, True),
    (r"\$36", "36 euros", False, {"currency": "required"}, False),
    ("36", r"\$36", True, {"currency": "required"}, True),
    (r"\$36", "36", True, {"units": "required"}, True),
    (r"5 \text{ m}", "5", True, {"currency": "required"}, True),
    # only the worker can evaluate these
    (r"\sin(1)\%", r"\sin(1)", True, {"percent": "value"}, False),
    (r"\sin(1)\%", r"\frac{\sin(1)}{100}", True, {"percent": "value"}, True),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[VerifierPolicy, VerifierPool]]:
    made: dict[VerifierPolicy, VerifierPool] = {}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(("gold", "answer", "by_default", "policy", "under"), PAIRS)
def test_policy(
    gold: str,
    answer: str,
    by_default: bool,
    policy: dict[str, str],
    under: bool,
    pools: dict[VerifierPolicy, VerifierPool],
) -> None:
    for settings, right in ((VerifierPolicy(), by_default), (VerifierPolicy(**policy), under)):
        pool = pools.setdefault(settings, VerifierPool(policy=settings))
        verdict = pool.verify(rf"\boxed{{{answer}}}", gold)
        assert verdict.correct is right, (settings, verdict)


def test_the_same_question_under_two_policies_has_two_answers_in_one_cache() -> None:
    with VerifierPool(policy=VerifierPolicy(percent="value")) as pool:
        response, gold = r"\boxed{\sin(1)}", r"\sin(1)\%"
        assert not pool.verify(response, gold).correct
        pool.policy = VerifierPolicy()
        assert pool.verify(response, gold).correct


def test_settings_in_a_reward_s_name() -> None:
    reward = resolve_reward('math_accuracy(wrong=-1.0, percent="value")')
    assert isinstance(reward, MathAccuracy)
    assert reward_name(reward) == "math_accuracy"
    completions = [r"\boxed{25}", r"\boxed{0.25}"]
    assert reward(["", ""], completions, answer=[r"25\%"] * 2) == [-1.0, 1.0]
    made = resolve_reward("grpo_lit.rewards.MathAccuracy(right=2.0)")
    assert made([""], [r"\boxed{1}"], answer=["1"]) == [2.0]


@pytest.mark.parametrize(
    "name",
    [
        "math_accuracy(1)",
        "math_accuracy(wrong=open('x'))",
        "math_accuracy(wrong=-1",
        "math_accuracy(speed=3)",
        "math_accuracy(percent='maybe')",
        "no_such_reward(a=1)",
    ],
)
def test_settings_that_can_t_be_are_named(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.rewards="):
        resolve_reward(name)
    with pytest.raises(UserError, match=r"verifier\.units='x'.*lenient \| required \| ignored"):
        VerifierPool(policy=VerifierPolicy(units="x"))


def test_latencies_fall_into_their_bins() -> None:
    found = latency_histogram([0.00005, 0.0001, 0.0004, 0.02, 3.0])
    assert (found["verify_ms_p50"], found["verify_ms_p95"], found["verify_ms_max"]) == (0.4, 3000.0, 3000.0)
    bins = {name.removeprefix("verify_count_"): n for name, n in found.items() if "count" in name}
    assert bins == {"le_100us": 2, "le_1ms": 1, "le_10ms": 0, "le_100ms": 1, "le_1s": 0, "more": 1}
    assert latency_histogram([]) == {}


def test_gym_score_is_the_task_s_own() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=3, seed=1)
    entries = [dataset[index] for index in range(3)]
    tasks = ["gsm_symbolic"] * 3
    right = [rf"So \boxed{{{entry['answer']}}}." for entry in entries]
    assert gym_score([""] * 3, right, tasks, entries) == [1.0] * 3
    wrong = [rf"\boxed{{{int(entry['answer']) + 1}}}" for entry in entries]
    assert max(gym_score([""] * 3, wrong, tasks, entries)) < 0.5
    assert gym_score([""], ["<think>"], tasks[:1], entries[:1]) == [0.0]


def test_gym_score_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lit.errors import SystemFault
    from grpo_lit.rewards.gym import _scorer

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemFault, match=r"grpo-lit\[gym\]"):
        _scorer("never seen before")
