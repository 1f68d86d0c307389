r"""``grpo-lit verify``: why a response is right or wrong, or how the verifier fares on a file of judged cases.

grpo-lit verify --response "so \boxed{1/2}" --gold 0.5
grpo-lit verify --file cases.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_lit.cli.parser import CLIParser
from grpo_lit.datamodules.readers import read_file
from grpo_lit.errors import UserError, typed_names
from grpo_lit.markdown import table
from grpo_lit.rewards import Verdict, VerifierPolicy, VerifierPool, explain, latency_histogram
from grpo_lit.rewards.functions import gold_text


class Case(NamedTuple):
    """A response that someone judged."""

    response: str
    gold: str
    correct: bool


def main(arguments: Sequence[str]) -> int:
    """Explain one verdict, or print a confusion table."""
    parser = CLIParser(prog="grpo-lit verify", description="Judge answers, and say why.")
    parser.add_argument("--response", type=str | None, default=None, help="What a model wrote; - reads standard input.")
    parser.add_argument("--gold", type=str | None, default=None, help="The gold answer.")
    parser.add_argument(
        "--file", type=str | None, default=None, help="Rows with response, gold and correct (.jsonl, .csv, .parquet)."
    )
    parser.add_argument("--show", type=int, default=20, help="Disagreements to list.")
    parser.add_argument("--baseline", type=bool, default=True, help="Judge with math-verify alone as well.")
    parser.add_argument("--timeout_s", type=float, default=5.0, help="Longest time for one answer.")
    parser.add_argument("--workers", type=int, default=1, help="Worker processes for --file.")
    for name, value in VerifierPolicy()._asdict().items():
        parser.add_argument(f"--policy.{name}", type=str, default=value, help="See docs/data.md.")
    options = parser.parse_args(list(arguments))
    if (options.file is None) == (options.response is None):
        raise UserError("response", options.response, "a response and its gold, or a file of cases: one of the two")
    if options.file is None and options.gold is None:
        raise UserError("gold", None, "the gold answer")
    if options.show < 0:
        raise UserError("show", options.show, "0 or more disagreements")
    with typed_names({"num_workers": "workers", "verifier": "policy"}):
        policy = VerifierPolicy(**options.policy.as_dict())
        verifier = VerifierPool(options.workers, options.timeout_s, policy)
    with verifier as pool:
        if options.file is not None:
            return _judge_file(options.file, pool, show=options.show, baseline=options.baseline)
        response = sys.stdin.read() if options.response == "-" else options.response
        print(explain(response, options.gold, timeout_s=options.timeout_s, pool=pool))
    return 0


def read_cases(path: str) -> list[Case]:
    """Cases of a file; ``answer`` stands in for a missing ``gold``.

    Raises:
        UserError: missing file, or a row without one of the columns.
    """
    cases = []
    for number, row in enumerate(read_file(path, "cases", argument="file"), start=1):
        gold = gold_text(row.get("gold", row.get("answer")))
        correct = _as_bool(row.get("correct"))
        if not isinstance(row.get("response"), str) or gold is None or correct is None:
            raise UserError("file", f"{path}, row {number}", "response, gold, and correct as true or false")
        cases.append(Case(row["response"], gold, correct))
    if not cases:
        raise UserError("file", path, "at least one row")
    return cases


def _as_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(str(value).lower())


def _judge_file(path: str, pool: VerifierPool, *, show: int, baseline: bool) -> int:
    cases = read_cases(path)
    pool.verify(r"\boxed{\sin(1)}", r"\cos(1)")  # the worker's start is no verdict's time
    start = time.perf_counter()
    verdicts = pool.verify_many([case.response for case in cases], [case.gold for case in cases])
    seconds = time.perf_counter() - start
    print(confusion(cases, [verdict.correct for verdict in verdicts], "grpo-lit"))
    kinds = Counter(verdict.kind for verdict in verdicts)
    times = latency_histogram([verdict.latency_s for verdict in verdicts])
    print("verdicts: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    print(
        f"time: median {times['verify_ms_p50']:.3f} ms, 95 % {times['verify_ms_p95']:.2f} ms, longest "
        f"{times['verify_ms_max']:.0f} ms; {len(cases) / seconds:.0f} verdicts a second"
    )
    if baseline:
        start = time.perf_counter()
        theirs = [math_verify_alone(case.response, case.gold) for case in cases]
        seconds = time.perf_counter() - start
        print("\n" + confusion(cases, theirs, "math-verify alone"))
        print(f"time: {len(cases) / seconds:.0f} verdicts a second")
    differ = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case.correct]
    if differ and show > 0:
        print(f"\n{len(differ)} where grpo-lit and the file differ" + (f", the first {show}" * (len(differ) > show)))
        for case, verdict in differ[:show]:
            print(_line(case, verdict))
    return 0


def confusion(cases: Sequence[Case], judged: Sequence[bool], name: str) -> str:
    """Markdown table of the file's verdicts against ours, with the share that agrees."""
    counts = Counter((case.correct, own) for case, own in zip(cases, judged, strict=True))
    agree = counts[True, True] + counts[False, False]
    rows = [
        [f"{word} in the file", counts[was, True], counts[was, False]]
        for word, was in (("right", True), ("wrong", False))
    ]
    lines = table([name, "judged right", "judged wrong"], rows)
    return "\n".join([*lines, f"agreement {agree} of {len(cases)} = {100 * agree / len(cases):.2f} %"])


def math_verify_alone(response: str, gold: str) -> bool:
    """The verdict of math-verify with its defaults; an exception of it counts as wrong."""
    from math_verify import parse, verify

    try:
        wanted = parse(gold if any(mark in gold for mark in ("$", "\\boxed", "####")) else f"${gold}$")
        return bool(verify(wanted, parse(response)))
    except Exception:  # whatever the library raises on odd input, its user gets no verdict
        return False


def _line(case: Case, verdict: Verdict) -> str:
    file = "right" if case.correct else "wrong"
    return json.dumps(
        {
            "gold": case.gold[-120:],
            "extracted": verdict.extracted,
            "file": file,
            "ours": verdict.kind,
            "reason": verdict.reason,
            "response_end": case.response[-120:],
        },
        ensure_ascii=False,
    )
