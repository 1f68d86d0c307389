"""Speed of a configuration, judged by benchmarks: `grpo-lit tune`."""

from grpo_lit.tune.judge import Decision, comparable, decide
from grpo_lit.tune.search import Outcome, search
from grpo_lit.tune.space import default_space
from grpo_lit.tune.trial import Measurement

__all__ = ["Decision", "Measurement", "Outcome", "comparable", "decide", "default_space", "search"]
