"""Group Relative Policy Optimization for small reasoning models, on Lightning."""

__version__ = "0.1.0"
