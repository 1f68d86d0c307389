"""`verify_math`: is this response's final answer the gold answer?

Three steps, each cheaper than the next and each only when needed: find the final answer
(`grpo_lit.rewards.extract`), compare exactly in this process (`compare`, `algebra`), and ask SymPy and
Math-Verify in a worker process (`pool`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from grpo_lit.errors import UserError
from grpo_lit.rewards.algebra import TooLarge
from grpo_lit.rewards.compare import is_several, same_answer
from grpo_lit.rewards.extract import final_answer, gold_answer
from grpo_lit.rewards.leaves import ExactOracle, check_size
from grpo_lit.rewards.normalize import normalise
from grpo_lit.rewards.phrases import is_yes_or_no
from grpo_lit.rewards.policy import DEFAULT_POLICY, VerifierPolicy
from grpo_lit.rewards.pool import Job, Reply, WorkerPool, check_timeout
from grpo_lit.rewards.stated import is_plain, stated

VerdictKind = Literal["correct", "wrong", "unparsable", "timeout", "crashed"]
VERDICT_KINDS: tuple[VerdictKind, ...] = ("correct", "wrong", "unparsable", "timeout", "crashed")
READER_FAILED = "the reader failed on it"
"""Beginning of a verdict's reason where reading the response raised: a fault of this package."""
MAX_ANSWER_CHARS = 2000
"""A final answer longer than this isn't read as mathematics."""
CACHE_SIZE = 20_000
_TO_DO, _SEVERAL = "a calculation that is not carried out", "several answers where one is asked for"
_log = logging.getLogger("grpo_lit.verifier")


@dataclass(frozen=True)
class Verdict:
    """What became of one response.

    Attributes:
        kind: ``unparsable``: no final answer, or one that can't be read or is too large to evaluate.
            ``timeout`` and ``crashed``: the worker process ran out of time, or died. All but ``correct``
            count as not right.
        extracted: the final answer as written; None if there is none.
        reason: why, in words.
        source: where the answer was found ("boxed", "####", ...).
        method: who decided: "extraction", "exact" (this process) or "worker".
        latency_s: seconds spent on this response, without waiting for a worker to be free or to start.
    """

    kind: VerdictKind
    extracted: str | None
    reason: str
    source: str = "none"
    method: Literal["extraction", "exact", "worker"] = "extraction"
    latency_s: float = 0.0

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.kind == "correct"


class _Pending(NamedTuple):
    """A response whose answer the worker must judge."""

    job: Job
    verdict: Verdict


class VerifierPool:
    """Judges responses; safe to use from several threads, and in processes forked after it was made.

    Args:
        num_workers: worker processes for what can't be decided exactly.
        timeout_s: longest time for one answer.
        policy: what is made of units, percent signs and currencies.

    Example:
        >>> with VerifierPool() as pool:
        ...     [v.kind for v in pool.verify_many([r"\\boxed{0.5}", "It is 3."], ["1/2", "4"])]
        ['correct', 'wrong']

    Raises:
        UserError: fewer than one worker, a time that isn't above zero, or no such policy.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 5.0, policy: VerifierPolicy = DEFAULT_POLICY) -> None:
        if (problem := policy.problem()) is not None:
            raise UserError(f"verifier.{problem[0]}", problem[1], problem[2])
        self.workers = WorkerPool(num_workers, timeout_s)
        self.policy = policy
        self._cache = _Cache()

    def verify(self, response: str, gold: str, *, timeout_s: float | None = None) -> Verdict:
        """Judges one response; see `verify_math`."""
        return self.verify_many([response], [gold], timeout_s=timeout_s)[0]

    def verify_many(
        self, responses: Sequence[str], golds: Sequence[str], *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """Judges each response against its gold answer, in order; equal questions are put to a worker once.

        Raises:
            UserError: the lengths differ, or something isn't text.
            SystemFault: a worker process is needed and can't be started.
        """
        if len(responses) != len(golds):
            raise UserError("golds", f"{len(golds)} answers", f"one for each of the {len(responses)} responses")
        timeout_s = self.workers.timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        first = [self._judge_here(r, g, timeout_s) for r, g in zip(responses, golds, strict=True)]
        jobs = list(dict.fromkeys(item.job for item in first if isinstance(item, _Pending)))
        replies = dict(zip(jobs, self.workers.judge(jobs, timeout_s), strict=True))
        for job, reply in replies.items():
            self._cache.keep(job, reply, timeout_s)
        return [item if isinstance(item, Verdict) else _combine(item, replies[item.job]) for item in first]

    def same(self, first: str, second: str, *, timeout_s: float | None = None) -> bool:
        """Whether two final answers, as extracted, are equal; the notion of equality that `verify` uses."""
        if is_plain(normalise(first)):  # as gold, so that "8" and "3+5" differ either way round
            first, second = second, first
        return self.verify(rf"\boxed{{{first}}}", second, timeout_s=timeout_s).correct

    def close(self) -> None:
        """Ends the worker processes."""
        self.workers.close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge_here(self, response: str, gold: str, timeout_s: float) -> Verdict | _Pending:
        """All that this process can decide."""
        start = time.perf_counter()
        for name, value in (("response", response), ("gold", gold)):
            if not isinstance(value, str):
                raise UserError(name, value, "text")
        try:
            verdict, job = _exact_verdict(response, gold, self.policy)
        except Exception as error:
            # A response is any text at all: one that trips the reader gets a verdict and a warning; the run goes on.
            _log.warning("verifier: %r while reading %r against %r", error, response[-200:], gold)
            verdict, job = Verdict("unparsable", None, f"{READER_FAILED}: {error!r}"), None
        if job is not None:
            known = self._cache.find(job, timeout_s)
            if known is not None:  # a remembered reply costs nothing
                verdict, job = _combine(_Pending(job, verdict), known._replace(seconds=0.0)), None
        verdict = replace(verdict, latency_s=verdict.latency_s + time.perf_counter() - start)
        return verdict if job is None else _Pending(job, verdict)


def _exact_verdict(response: str, gold: str, policy: VerifierPolicy) -> tuple[Verdict, Job | None]:
    """A verdict, or with a job one that is still to be completed by a worker."""
    found = final_answer(response)
    wanted, several, plain = _prepared_gold(gold)
    if found.opening and is_yes_or_no(wanted):
        found = replace(found, text=found.opening, source="whole response")
    if found.text is None:
        return Verdict("unparsable", None, found.reason), None
    text = found.joined if found.joined and several else found.text
    verdict = Verdict("wrong", text, "", found.source, "exact")
    if not wanted:
        return replace(verdict, kind="unparsable", reason="the gold answer is empty"), None
    if len(text) > MAX_ANSWER_CHARS:
        return replace(verdict, kind="unparsable", reason=f"an answer of {len(text)} characters"), None
    answer = normalise(text)
    if plain and policy.calculations == "refused":
        statement = stated(answer)
        if statement is None:
            return replace(verdict, reason=_TO_DO), None
        answer = statement
    try:
        same = same_answer(wanted, answer, ExactOracle(policy))
        if same is None:
            check_size(wanted)
            check_size(answer)
    except (TooLarge, RecursionError) as error:
        reason = f"refused to evaluate {error}" if isinstance(error, TooLarge) else "nested too deeply"
        return replace(verdict, kind="unparsable", reason=reason), None
    if same is None:
        return verdict, Job(wanted, answer, policy)
    if not same and not several and is_several(answer):
        return replace(verdict, reason=_SEVERAL), None
    reason = "equal by exact comparison" if same else "different by exact comparison"
    return replace(verdict, kind="correct" if same else "wrong", reason=reason), None


@lru_cache(maxsize=4096)
def _prepared_gold(gold: str) -> tuple[str, bool, bool]:
    """A gold answer, normalised; whether it is several, and whether it is made of plain numbers."""
    wanted = normalise(gold_answer(gold))
    return wanted, is_several(wanted), is_plain(wanted)


def _combine(pending: _Pending, reply: Reply) -> Verdict:
    return replace(
        pending.verdict,
        kind=reply.kind,
        reason=reply.reason,
        method="worker",
        latency_s=pending.verdict.latency_s + reply.seconds,
    )


class _Cache:
    """The worker's latest replies. A timeout counts for calls that allow no more time; a crash isn't kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: OrderedDict[Job, tuple[Reply, float]] = OrderedDict()

    def find(self, job: Job, timeout_s: float) -> Reply | None:
        with self._lock:
            reply, allowed = self._replies.get(job, (None, 0.0))
            if reply is None or (reply.kind == "timeout" and timeout_s > allowed):
                return None
            self._replies.move_to_end(job)
            return reply

    def keep(self, job: Job, reply: Reply, timeout_s: float) -> None:
        if reply.kind == "crashed":
            return
        with self._lock:
            self._replies[job] = (reply, timeout_s)
            while len(self._replies) > CACHE_SIZE:
                self._replies.popitem(last=False)


_default: VerifierPool | None = None
_default_lock = threading.Lock()


def default_pool() -> VerifierPool:
    """The pool of this process, made on first use."""
    global _default
    with _default_lock:
        if _default is None:
            _default = VerifierPool()
        return _default


def verify_math(response: str, gold: str, *, timeout_s: float = 5.0) -> Verdict:
    r"""Whether the final answer of a response is the gold answer.

    Works from any thread and uses no signals in this process. Most verdicts take well under a millisecond;
    only what needs a computer algebra system goes to a worker process, which is killed when it exceeds its
    time or memory.

    Args:
        response: what the model wrote, thinking included.
        gold: plain text, ``#### 72``, ``\boxed{...}``, ``$...$``, LaTeX, or a solution that ends in one of
        these.
        timeout_s: longest time for the worker, counted from when it has read the question.

    Raises:
        UserError: an argument isn't text, or the time isn't above zero.
        SystemFault: a worker process is needed and can't be started.

    >>> verify_math("2 + 2 = 4, so \\boxed{4}", "4").correct
    True
    >>> verify_math("Either 12 or 13.", "13").reason
    'several answers where one is asked for'
    """
    return default_pool().verify(response, gold, timeout_s=timeout_s)


def explain(response: str, gold: str, *, timeout_s: float = 5.0, pool: VerifierPool | None = None) -> str:
    """A verdict with all that led to it, in lines for a reader."""
    pool = pool or default_pool()
    verdict = pool.verify(response, gold, timeout_s=timeout_s)
    wanted, several, _ = _prepared_gold(gold)
    lines = [
        f"verdict   {verdict.kind}: {verdict.reason}",
        f"gold      {gold_answer(gold)!r}, read as {wanted!r}{' (several answers)' if several else ''}",
    ]
    if verdict.extracted is None:
        lines.append("answer    none found")
    else:
        lines.append(f"answer    {verdict.extracted!r}, found by: {verdict.source}")
        if len(verdict.extracted) <= MAX_ANSWER_CHARS:
            lines.append(f"read as   {normalise(verdict.extracted)!r}")
    lines.append(f"decided   by {verdict.method} in {1000 * verdict.latency_s:.2f} ms")
    if pool.policy != DEFAULT_POLICY:
        lines.append("policy    " + ", ".join(f"{name} {value}" for name, value in pool.policy._asdict().items()))
    return "\n".join(lines)
