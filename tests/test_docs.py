"""The documentation names what there is: metrics of a real run, pages of the site."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def documented(key: str, text: str) -> bool:
    """Whether a key stands in the glossary: whole, as prefix with <...>, or as a suffix listed behind its stem."""
    group, _, name = key.partition("/")
    for pattern in set(re.findall(r"`([a-z0-9_/<>*]+)`", text)):
        expression = re.sub(r"<[a-z_]+>", "[a-z0-9_]+", pattern).replace("*", ".*")
        candidates = [expression, f"{group}/{expression}"]
        if pattern.startswith("_"):
            candidates = [f"{group}/.*{expression}"]
        if any(re.fullmatch(candidate, key) for candidate in candidates):
            return True
    return False


def test_every_metric_of_a_run_is_in_the_glossary(tmp_path: Path, grpo_lit_command: Callable[..., object]) -> None:
    root = tmp_path / "run"
    grpo_lit_command(
        "fit",
        "--config=quickstart",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=1",
        "--model.loss.beta=0.01",
        "--data.prompts_per_step=4",
        "--data.val_prompts=4",
    )
    keys = {key for line in (root / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {"train/loss", "train/ref_kl", "val/accuracy", "perf/rollout_s"} <= keys
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    missing = sorted(key for key in keys if not documented(key, text))
    assert not missing


def test_every_page_is_in_the_table_of_contents() -> None:
    toctree = re.search(r"```\{toctree\}\n:maxdepth: 1\n\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    assert toctree is not None
    assert sorted(toctree[1].split()) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")
