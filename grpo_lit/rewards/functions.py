"""Built-in reward functions, and user functions by import path.

A reward function is called as ``function(prompts=..., completions=..., **columns)`` with lists of N entries,
and returns N numbers; None abstains: that row is left to the other functions, or stays out of its group.
Columns are those of the data set; a function without ``**kwargs`` gets only those that it names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lit.errors import UserError
from grpo_lit.paths import look_in_current_folder
from grpo_lit.rewards.extract import find_boxes, visible_text
from grpo_lit.rewards.gym import gym_score
from grpo_lit.rewards.policy import VerifierPolicy
from grpo_lit.rewards.verify import Verdict, VerifierPool, default_pool

RewardFunction = Callable[..., Sequence["float | None"]]

_WELL_FORMED = re.compile(
    r"\s*(?:<think>)?(?P<thinking>(?:(?!</?think>).)*)</think>(?P<answer>(?:(?!</?think>).)*)", re.DOTALL
)


class RewardResult(list["float | None"]):
    """Rewards that carry the verdicts they came from, for the metrics."""

    def __init__(self, rewards: Iterable[float | None], verdicts: Sequence[Verdict] = ()) -> None:
        super().__init__(rewards)
        self.verdicts = list(verdicts)


def gold_text(value: Any) -> str | None:
    """A gold answer as text: numbers and lists of answers become what `verify_math` reads.

    >>> gold_text(27.0), gold_text(["$1$", "$2$"]), gold_text(None)
    ('27', '$1$, $2$', None)
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, (list, tuple)):
        texts = [text for text in map(gold_text, value) if text is not None]
        return ", ".join(texts) or None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value).strip() or None


@dataclass
class MathAccuracy:
    """Whether the final answer is the one in the column ``answer``.

    Args:
        right: reward of a right answer.
        wrong: reward of a wrong answer, and of none.
        undecided: reward when the verifier ran out of time or died; None abstains.
        timeout_s: longest time for one answer.
        num_workers: worker processes; above 1 the function has a pool of its own.
        units, percent, currency, calculations: see `VerifierPolicy`.

    In a configuration: ``math_accuracy(wrong=-1.0, percent="value")``.
    """

    right: float = 1.0
    wrong: float = 0.0
    undecided: float | None = 0.0
    timeout_s: float = 5.0
    num_workers: int = 1
    units: str = "lenient"
    percent: str = "either"
    currency: str = "lenient"
    calculations: str = "refused"

    def __post_init__(self) -> None:
        self.__name__ = "math_accuracy"
        policy = VerifierPolicy(self.units, self.percent, self.currency, self.calculations)
        own = self.num_workers != 1 or policy != VerifierPolicy()
        self._pool = VerifierPool(self.num_workers, self.timeout_s, policy) if own else None

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any]) -> RewardResult:
        """Rewards of N completions; a row without a gold answer abstains."""
        golds = [gold_text(value) for value in answer]
        known = [i for i, gold in enumerate(golds) if gold is not None]
        pool = self._pool or default_pool()
        verdicts = pool.verify_many(
            [completions[i] for i in known], [golds[i] or "" for i in known], timeout_s=self.timeout_s
        )
        rewards: list[float | None] = [None] * len(completions)
        for i, verdict in zip(known, verdicts, strict=True):
            undecided = verdict.kind in ("timeout", "crashed")
            rewards[i] = self.right if verdict.correct else self.undecided if undecided else self.wrong
        return RewardResult(rewards, verdicts)


def math_accuracy(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any]) -> RewardResult:
    """1 for a right final answer, 0 otherwise; column ``answer``. For other values: `MathAccuracy`."""
    return _MATH_ACCURACY(prompts, completions, answer)


def think_format(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """1 for ``<think>reasoning</think>`` and then an answer, both not empty and each tag once; 0 otherwise.

    The opening tag may be missing: a chat template that ends its prompt with it takes it out of the
    completion.
    """
    return [float(_is_well_formed(completion)) for completion in completions]


def _is_well_formed(completion: str) -> bool:
    match = _WELL_FORMED.fullmatch(completion) if completion.count("</think>") == 1 else None
    return match is not None and bool(match["thinking"].strip()) and bool(match["answer"].strip())


def boxed_format(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    r"""1 if a closed ``\boxed{...}`` that isn't empty stands outside of any thinking; 0 otherwise."""
    rewards = []
    for completion in completions:
        visible = visible_text(completion)
        boxes, _ = find_boxes(visible) if visible is not None else ([], False)
        rewards.append(float(bool(boxes) and bool(boxes[-1][2].strip())))
    return rewards


def exact_match(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """1 if the completion is the text in the column ``answer``, to the last space; 0 otherwise."""
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


_MATH_ACCURACY = MathAccuracy()
CONFIGURABLE_REWARDS: dict[str, Callable[..., RewardFunction]] = {"math_accuracy": MathAccuracy}
"""Built-in rewards that take settings in brackets."""
BUILT_IN_REWARDS: dict[str, RewardFunction] = {
    "math_accuracy": math_accuracy,
    "think_format": think_format,
    "boxed_format": boxed_format,
    "exact_match": exact_match,
    "gym_score": gym_score,
}


def resolve_reward(name: str | RewardFunction, *, argument: str = "model.rewards") -> RewardFunction:
    """The reward function of a name.

    Args:
        name: a built-in name, an import path ``my_pkg.mod.fn`` or ``my_pkg.mod:fn``, or a callable, which is
            returned as it is. The path may lead to a class, which is then made without arguments, or with those
            in brackets: ``math_accuracy(wrong=-1.0)``. Modules of the current folder are found too.
        argument: how the user calls the setting; for the error.

    Raises:
        UserError: there is no such function; says what is accepted.
    """
    accepted = f"one of {', '.join(BUILT_IN_REWARDS)}, or the import path of a function, such as my_pkg.mod.fn"
    if callable(name):
        return name
    if not isinstance(name, str):
        raise UserError(argument, name, accepted)
    if name in BUILT_IN_REWARDS:
        return BUILT_IN_REWARDS[name]
    spelled, name, settings = name, *_split_call(name, argument)
    if name in CONFIGURABLE_REWARDS and settings is not None:
        return _make(CONFIGURABLE_REWARDS[name], settings, argument, spelled)
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise UserError(argument, name, accepted)
    found = _import(module_name, attribute, argument, name, accepted)
    if inspect.isclass(found) and not any("__call__" in base.__dict__ for base in found.__mro__):
        raise UserError(argument, spelled, f"{accepted}, or of a class with a method __call__")
    if settings is not None and not inspect.isclass(found):  # nothing is called here but what can be a reward
        raise UserError(argument, spelled, f"{accepted}; settings in brackets are for classes")
    if inspect.isclass(found):
        found = _make(found, settings or {}, argument, spelled)
    if not callable(found):
        raise UserError(argument, name, f"{accepted}; this is {type(found).__name__}, which can't be called")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        raise UserError(argument, name, f"{accepted}; this is an async function, and rewards are called without await")
    return found  # type: ignore[no-any-return]


def _split_call(name: str, argument: str) -> tuple[str, dict[str, Any] | None]:
    """``fn(a=1)`` -> fn and its settings; None where there are no brackets.

    Raises:
        UserError: something other than keywords with plain values in the brackets.
    """
    if not name.endswith(")"):
        return name, None
    before, _, inside = name[:-1].partition("(")
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return before.strip(), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UserError(argument, name, "settings as name=value in the brackets, such as wrong=-1.0") from error


def _make(factory: Callable[..., Any], settings: dict[str, Any], argument: str, name: str) -> RewardFunction:
    try:
        made: RewardFunction = factory(**settings)
    except UserError as error:
        raise UserError(argument, name, f"{error.argument.removeprefix('verifier.')}={error.accepted}") from error
    except TypeError as error:
        raise UserError(
            argument, name, f"a class with other arguments, given as {name.partition('(')[0]}(name=value) ({error})"
        ) from error
    return made


def _import(module_name: str, attribute: str, argument: str, name: str, accepted: str) -> Any:
    look_in_current_folder()
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name and not (module_name + ".").startswith(error.name + "."):
            raise UserError(
                argument, name, f"{accepted}; its module needs {error.name!r}, which isn't installed"
            ) from error
        raise UserError(argument, name, f"{accepted}; there is no module {module_name!r}") from error
    except AttributeError as error:
        raise UserError(argument, name, f"{accepted}; {module_name!r} has no {attribute!r}") from error
    except Exception as error:
        raise UserError(
            argument, name, f"{accepted}; importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    return found
