"""Helpers for fault tests, usable from a configuration."""

from grpo_lit.testing.faults import FaultInjector

__all__ = ["FaultInjector"]
