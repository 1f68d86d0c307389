r"""Rewards: the math verifier, the built-in reward functions, and how a step's rewards are put together.

A verdict is reached in this order, a file each, and the first that can tell decides:

===================  ====================================================================================
`extract`            where the final answer is: last closed box, answer tag, ``####``, "the answer is", short
                     response, last value in prose with all that stands at it ("not 8", "7 to 8", "16 - 8")
`normalize`          one spelling: Unicode, LaTeX and words for a sign; knows nothing of what it means
`stated`             where the gold answer is made of plain numbers: is each part of the answer a number as
                     written? If not, what was it worked out to? (``3+5 = 8`` states 8, ``3+5`` nothing)
`phrases`            choice letters, yes and no, "can't be determined", dates
`structure`          the answer's shape: list, tuple, interval, set, relation, equation, matrix, ratio, value
`compare`            two shapes are the same if their values are ...
`leaves`, `units`    ... and two values are, by their words, bases, units, percent signs, and an oracle:
`reader`, `algebra`  exact algebra in this process: rational functions with square roots
`pool`, `worker`     a process that can be killed ...
`symbolic`           ... asks SymPy at fixed points, then Math-Verify
===================  ====================================================================================

`verify` walks this way, `policy` holds what may be chosen on it. `functions` makes rewards of verdicts and finds those
of the user; `compute` calls them all and adds up.
"""

from grpo_lit.rewards.compute import RewardError, RewardOutput, compute_rewards
from grpo_lit.rewards.extract import Extraction, final_answer
from grpo_lit.rewards.functions import (
    BUILT_IN_REWARDS,
    MathAccuracy,
    RewardFunction,
    RewardResult,
    boxed_format,
    math_accuracy,
    resolve_reward,
    think_format,
)
from grpo_lit.rewards.gym import gym_score
from grpo_lit.rewards.latency import latency_histogram
from grpo_lit.rewards.messages import from_messages
from grpo_lit.rewards.policy import VerifierPolicy
from grpo_lit.rewards.verify import (
    VERDICT_KINDS,
    Verdict,
    VerifierPool,
    default_pool,
    explain,
    verify_math,
)

__all__ = [
    "BUILT_IN_REWARDS",
    "VERDICT_KINDS",
    "Extraction",
    "MathAccuracy",
    "RewardError",
    "RewardFunction",
    "RewardOutput",
    "RewardResult",
    "Verdict",
    "VerifierPolicy",
    "VerifierPool",
    "boxed_format",
    "compute_rewards",
    "default_pool",
    "explain",
    "final_answer",
    "from_messages",
    "gym_score",
    "latency_histogram",
    "math_accuracy",
    "resolve_reward",
    "think_format",
    "verify_math",
]
