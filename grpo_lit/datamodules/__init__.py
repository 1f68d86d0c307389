"""Prompts and their gold answers: datasets, order, batches."""

from grpo_lit.datamodules.datasets import DATASETS, DatasetSpec, load_rows
from grpo_lit.datamodules.loader import PromptBatch, PromptLoader
from grpo_lit.datamodules.math import MathDataModule
from grpo_lit.datamodules.sent import cluster_answers, semantic_entropy, sent_order
from grpo_lit.datamodules.vigor import UniformAllocator, VigorAllocator

__all__ = [
    "DATASETS",
    "DatasetSpec",
    "MathDataModule",
    "PromptBatch",
    "PromptLoader",
    "UniformAllocator",
    "VigorAllocator",
    "cluster_answers",
    "load_rows",
    "semantic_entropy",
    "sent_order",
]
