"""Gold answers that can't be judged: no response but a copy of them could ever be right."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lit.rewards import VerifierPool, default_pool
from grpo_lit.rewards.extract import gold_answer

_PROBE = r"\boxed{7.31}"


def gold_problems(golds: Sequence[str], *, pool: VerifierPool | None = None) -> list[str | None]:
    """For each gold answer why it can't be judged, or None where it can.

    A gold answer is good if a response that states it is right, and if the verifier can read it: put against any number
    it must give a verdict.

    Args:
        golds: as `load_rows` gives them.
        pool: the verifier; that of this process by default.
    """
    judge = pool or default_pool()
    answers = [gold_answer(gold) for gold in golds]
    stated = judge.verify_many([rf"\boxed{{{answer}}}" for answer in answers], golds)
    probed = judge.verify_many([_PROBE] * len(golds), golds)
    problems: list[str | None] = []
    for answer, own, probe in zip(answers, stated, probed, strict=True):
        if not answer.strip():
            problems.append("no answer in it")
        elif probe.kind not in ("correct", "wrong"):
            problems.append(f"{answer[:60]!r}: {probe.reason}")
        else:
            problems.append(None if own.correct else f"{answer[:60]!r} doesn't equal itself: {own.reason}")
    return problems
