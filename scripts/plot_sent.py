"""Draw how semantic entropy is distributed over the prompts of a SENT cache, as `grpo-lit sent` does beside it.

python scripts/plot_sent.py docs/results/sent_gsm8k.jsonl docs/figures/sent_gsm8k.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_lit.datamodules.sent_cache import read_sent_cache
from grpo_lit.datamodules.sent_report import draw


def main(source: str, target: str) -> None:
    """Read the cache `source` and write the figure to `target`."""
    draw(read_sent_cache(Path(source), argument="source"), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:3])
