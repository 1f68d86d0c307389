"""What ``grpo-lit check`` says about the data: sizes, prompts too long, gold answers, duplicates, overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_lit.datamodules.gold import gold_problems
from grpo_lit.datamodules.math import MathDataModule
from grpo_lit.datamodules.overlap import Pair, find_duplicates, find_overlap
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.policy import PolicyConfig
from grpo_lit.prompts import PromptEncoder

SHOWN = 5
MOST_ROWS = 50_000
"""Beyond so many rows the comparison of all questions is left to ``grpo-lit filter``."""


def data_findings(
    data: MathDataModule, encoder: PromptEncoder, policy: PolicyConfig, *, judge_gold: bool = True
) -> Iterator[tuple[bool, str]]:
    """Lines of the report, each with whether it is in order; a line that isn't ends the report.

    Args:
        data: not yet connected.
        encoder: tokenizer and chat template of the model.
        policy: the model, for the SENT cache's key.
        judge_gold: whether ``math_accuracy`` will judge, so that the gold answers must be readable.
    """
    from grpo_lit.datamodules.sent_cache import model_key

    try:
        train, val = data.load()
        yield True, f"data {data.dataset}: {len(train)} training prompts, {len(val)} held out"
        data.connect(encoder, model_key(policy))
    except (UserError, SystemFault) as error:
        yield False, " ".join(str(error).split())
        return
    longest = data.longest_prompts[0]
    for kind, sampled, long in (("", train, data.too_long), ("held-out ", val, data.too_long_held_out)):
        if long:
            yield (
                True,
                (
                    f"{kind}prompts too long: {len(long)} of {len(sampled)} exceed data.max_prompt_length="
                    f"{data.max_prompt_length} tokens and are left out (rows {', '.join(map(str, long))})"
                ),
            )
    yield True, f"longest training prompt kept: {longest} tokens"
    if data.sent_cache is not None:
        yield True, f"SENT cache {data.sent_cache}: made of these prompts with this model"
    if judge_gold and "answer" in train[0]:
        yield True, _gold_line([row["answer"] for row in train], [row["index"] for row in train])
    if len(train) > MOST_ROWS:
        yield True, f"duplicates: not looked for among more than {MOST_ROWS} rows; grpo-lit filter does"
        return
    questions, held_out = ([row["question"] for row in rows] for rows in (train, val))
    yield True, _pairs_line("duplicates in training", find_duplicates(questions), questions, len(train))
    if val and not data.val_on_train:
        pairs = find_overlap(questions, held_out)
        yield True, _pairs_line("held-out questions in training", pairs, held_out, len(val))


def _gold_line(golds: Sequence[str], rows: Sequence[int]) -> str:
    problems = [(row, problem) for row, problem in zip(rows, gold_problems(golds), strict=True) if problem]
    shown = "; ".join(f"row {row} {problem}" for row, problem in problems[:SHOWN])
    more = "; ..." if len(problems) > SHOWN else ""
    return f"gold answers: {len(problems)} of {len(golds)} can't be judged" + (f" ({shown}{more})" if shown else "")


def _pairs_line(what: str, pairs: Sequence[Pair], texts: Sequence[str], total: int) -> str:
    exact = sum(pair.equal for pair in pairs)
    line = f"{what}: {exact} equal, {len(pairs) - exact} alike by n-grams, of {total}"
    if not pairs:
        return line
    example = " ".join(texts[pairs[0].second].split())
    return f"{line}; such as {example[:80]!r}" + (" (data.seed draws another split)" if "held-out" in what else "")
