"""Triton kernels and their launchers; imported only when an op really runs on Triton.

The formulas and the torch references are in the files of the same name one folder up.
"""
