"""Procedural tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), an optional source of prompts."""

from __future__ import annotations

from typing import Any

from grpo_lit.errors import SystemFault, UserError


def gym_rows(task: str = "gsm_symbolic", size: int = 500, seed: int = 42, **options: Any) -> list[dict[str, Any]]:
    """Generated problems; the same task, seed and options give the same rows.

    Their verdicts come from the task's own scorer: set ``model.rewards: [gym_score]``.

    Args:
        task: name of a reasoning-gym dataset, such as ``gsm_symbolic``, ``chain_sum`` or ``countdown``.
        size: rows.
        seed: of the generator.
        options: further settings of the task.

    Returns:
        Rows with ``question``, ``answer`` (text of the task's own answer, for reading), ``task`` and ``entry``,
        which the scorer needs.

    Raises:
        UserError: unknown task or a setting that it refuses.
        SystemFault: reasoning-gym isn't installed.
    """
    if size < 1:
        raise UserError("data.dataset_options.size", size, "at least 1 row")
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS as TASKS
    except ImportError as error:
        raise SystemFault("data.dataset=reasoning_gym needs the package: pip install 'grpo-lit[gym]'") from error
    if task not in TASKS:
        raise UserError("data.dataset_options.task", task, f"a task of reasoning-gym: {', '.join(sorted(TASKS))}")
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        entries = [dataset[index] for index in range(size)]
    except (AssertionError, TypeError, ValueError) as error:
        given = {"task": task, "size": size, **options}
        raise UserError(
            "data.dataset_options", given, f"settings of this task ({' '.join(str(error).split())})"
        ) from error
    return [
        {
            "question": entry["question"],
            "answer": str(entry["answer"]) if entry["answer"] is not None else "see scorer",
            "task": task,
            "entry": entry,
        }
        for entry in entries
    ]
