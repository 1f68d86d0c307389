"""``grpo-lit bench``: every speed and memory figure of the documentation comes from here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

from grpo_lit.errors import UserError

BENCHMARKS = {
    "kernels": "grpo_lit.bench.kernels",
    "memory": "grpo_lit.bench.memory",
    "rollout": "grpo_lit.bench.rollout",
    "scaling": "grpo_lit.bench.scaling",
    "step": "grpo_lit.bench.step",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: grpo-lit bench {" + ",".join(BENCHMARKS) + "} [options]")
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        raise UserError("bench", argv[0], " | ".join(BENCHMARKS))
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it looks for kernels that nobody needs here
    code: int = importlib.import_module(BENCHMARKS[argv[0]]).main(list(argv[1:]))
    return code
