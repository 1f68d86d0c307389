"""Lightning callbacks: what a run writes and shows. One class a file."""

from grpo_lit.callbacks.adapter_export import AdapterExport
from grpo_lit.callbacks.adaptive_micro_batch import AdaptiveMicroBatch
from grpo_lit.callbacks.auto_checkpointing import AutoCheckpointing
from grpo_lit.callbacks.baseline_evaluation import BaselineEvaluation
from grpo_lit.callbacks.completions_file import CompletionsFile
from grpo_lit.callbacks.entropy_mask import EntropyMask
from grpo_lit.callbacks.graceful_stop import GracefulStop
from grpo_lit.callbacks.live_page import LivePage
from grpo_lit.callbacks.metrics_file import MetricsFile
from grpo_lit.callbacks.oom_replay import OOMReplay
from grpo_lit.callbacks.progress import StepProgress
from grpo_lit.callbacks.rank_watch import RankWatch
from grpo_lit.callbacks.run_checkpoint import RunCheckpoint
from grpo_lit.callbacks.target_probability import TargetProbability
from grpo_lit.callbacks.vllm_evaluation import VLLMEvaluation
from grpo_lit.callbacks.vram_profiler import VRAMProfiler

__all__ = [
    "AdapterExport",
    "AdaptiveMicroBatch",
    "AutoCheckpointing",
    "BaselineEvaluation",
    "CompletionsFile",
    "EntropyMask",
    "GracefulStop",
    "LivePage",
    "MetricsFile",
    "OOMReplay",
    "RankWatch",
    "RunCheckpoint",
    "StepProgress",
    "TargetProbability",
    "VLLMEvaluation",
    "VRAMProfiler",
]
