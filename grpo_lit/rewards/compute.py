"""A step's rewards: calls the functions, checks what they return, and adds it up."""

from __future__ import annotations

import inspect
import math
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rewards.functions import RewardFunction, resolve_reward

_LARGEST = torch.finfo(torch.float32).max


class RewardError(UserError):
    """A reward function failed or returned something that is no reward.

    A `UserError`, because reward functions are the user's code: exit code 2, one line that names the
    function. What the function raised is the ``__cause__``. A `SystemFault` of a built-in function passes
    through as it is.
    """

    def __init__(self, name: str, problem: str) -> None:
        problem = " ".join(problem.split())
        super().__init__("reward function", name, f"one number or None for each completion, but it {problem}")
        self.function = name


@dataclass
class RewardOutput:
    """Rewards of N completions.

    Attributes:
        rewards: (N,) float32, the weighted sum over the functions; NaN where every function abstained.
        per_function: by name (N,) float32 before weighting; NaN where it abstained.
        verdict_counts: how many answers were correct, wrong, unparsable, timeout or crashed, over all
            functions that verify answers.
        latencies_s: seconds per verified answer.
    """

    rewards: Tensor
    per_function: dict[str, Tensor]
    verdict_counts: dict[str, int] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)


def compute_rewards(
    functions: Sequence[RewardFunction | str],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    weights: Sequence[float] | None = None,
    *,
    timeout_s: float | None = None,
) -> RewardOutput:
    r"""Rewards of N completions: :math:`r_i = \sum_f w_f r_{f,i}` over the functions with a reward for row i.

    Args:
        functions: callables, or names for `resolve_reward`.
        prompts: N prompts, one per completion.
        completions: N texts, with the tail that the chat template prefilled.
        columns: the data set's columns, N entries each; a function gets those that it takes.
        weights: one per function; 1 by default.
        timeout_s: longest time for one function on all N rows; the built-in ones have limits of their own. In the
            main thread the function is interrupted by SIGALRM, unless it uses that signal itself. In another thread
            it can't be stopped, only left behind in a daemon thread, which doesn't keep the process from ending.

    Raises:
        RewardError: a function raised, took too long, or returned a wrong length, no number, NaN or an
        infinity.
        UserError: lengths don't agree, or a column that a function needs is missing.
    """
    n = len(completions)
    if len(prompts) != n:
        raise UserError("prompts", f"{len(prompts)} prompts", f"one for each of the {n} completions")
    if weights is not None and len(weights) != len(functions):
        raise UserError("model.reward_weights", list(weights), f"one weight for each of {len(functions)} rewards")
    for name, values in columns.items():
        if len(values) != n:
            raise UserError(f"column {name}", f"{len(values)} entries", f"one for each of the {n} completions")
    total = torch.zeros(n, dtype=torch.float32)
    counted = torch.zeros(n, dtype=torch.bool)
    output = RewardOutput(total, {})
    counts: Counter[str] = Counter()
    for index, entry in enumerate(functions):
        function = resolve_reward(entry)
        name = _unused_name(reward_name(function), output.per_function)
        returned = _call(function, name, prompts, completions, columns, timeout_s)
        own = _checked(returned, name, n)
        output.per_function[name] = own
        known = ~own.isnan()
        weight = 1.0 if weights is None else float(weights[index])
        total[known] += weight * own[known]
        counted |= known
        for verdict in getattr(returned, "verdicts", ()):
            counts[verdict.kind] += 1
            output.latencies_s.append(verdict.latency_s)
    total[~counted] = torch.nan
    output.verdict_counts = dict(counts)
    return output


def reward_name(function: RewardFunction) -> str:
    """The name a function goes by in metrics and errors."""
    return getattr(function, "__name__", None) or type(function).__name__


def _unused_name(name: str, taken: Mapping[str, Any]) -> str:
    number, candidate = 2, name
    while candidate in taken:
        candidate = f"{name}_{number}"
        number += 1
    return candidate


def check_columns(functions: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """See that the columns of a data set are all that reward functions need.

    Raises:
        UserError: a function has a parameter that no column has the name of.
    """
    offered = dict.fromkeys(["prompts", "completions", *columns])
    for function in functions:
        accepted_arguments(function, reward_name(function), offered)


def accepted_arguments(function: RewardFunction, name: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of the prompts, completions and columns, those that a function takes.

    Raises:
        UserError: it needs one that the data set doesn't have.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return dict(offered)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p for p in parameters if p.kind in keyword}
    missing = [key for key, p in named.items() if p.default is p.empty and key not in offered]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]  # given by name
    if missing:
        accepted = f"functions of prompts, completions and columns; it needs {missing[0]!r}, there are: "
        raise UserError("model.rewards", name, accepted + ", ".join(offered))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(offered)
    return {key: value for key, value in offered.items() if key in named}


def _call(
    function: RewardFunction,
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    timeout_s: float | None,
) -> Any:
    offered = {"prompts": prompts, "completions": completions}
    offered |= {key: values for key, values in columns.items() if key not in offered}
    # Lists of their own: a function that changes its arguments must not change the next one's.
    arguments = {key: list(values) for key, values in accepted_arguments(function, name, offered).items()}
    returned: Any
    try:
        if timeout_s is None or str(getattr(function, "__module__", "")).startswith("grpo_lit."):
            returned = function(**arguments)
        elif threading.current_thread() is threading.main_thread():
            returned = _interrupted(function, arguments, name, timeout_s)
        else:
            returned = _left_behind(function, arguments, name, timeout_s)
    except (SystemFault, UserError):
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, TypeError) and "string indices" in str(error):
            hint = " (completions are texts; grpo_lit.rewards.from_messages wraps a function of TRL's chat messages)"
        raise RewardError(name, f"raised {type(error).__name__}: {error}{hint}") from error
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise RewardError(name, "is async; rewards are called without await")
    return returned


class _ExpiredError(BaseException):
    """Time is over; no `Exception`, so that a function that catches all of those doesn't catch this."""


def _interrupted(function: RewardFunction, arguments: dict[str, Any], name: str, timeout_s: float) -> Any:
    def expire(number: int, frame: FrameType | None) -> None:
        raise _ExpiredError

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        try:
            return function(**arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _ExpiredError:
        raise RewardError(name, f"took more than {timeout_s:g} s (reward_timeout_s)") from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _left_behind(function: RewardFunction, arguments: dict[str, Any], name: str, timeout_s: float) -> Any:
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function(**arguments))
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise RewardError(name, f"took more than {timeout_s:g} s (reward_timeout_s)")
    if failure:
        raise failure[0]
    return result[0]


def _checked(returned: Any, name: str, n: int) -> Tensor:
    """(N,) float32; NaN for None.

    Raises:
        RewardError: it isn't N numbers.
    """
    if isinstance(returned, Tensor):
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__len__"):
        raise RewardError(name, f"returned {type(returned).__name__}")
    if len(returned) != n:
        raise RewardError(name, f"returned {len(returned)} rewards for {n} completions")
    values = torch.full((n,), torch.nan, dtype=torch.float32)
    for row, value in enumerate(returned):
        if value is None:
            continue
        try:
            reward = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            reward = math.nan
        if not abs(reward) <= _LARGEST:
            raise RewardError(name, f"returned {repr(value)[:80]} for row {row}")
        values[row] = reward
    return values
