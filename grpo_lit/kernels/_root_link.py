"""What `import kernels` finds in the root of a checkout.

The link `kernels` there shows this folder at the front door, but `kernels` is also the name of a distribution
of Hugging Face's that transformers and bitsandbytes look for. With the root on sys.path (``python -c``,
``python -m``), they would find this folder instead: at best they import our ops a second time under another
name, at worst, with their `kernels` installed, `import transformers` fails on a name that we don't have.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def step_aside(name: str) -> None:
    """Put the distribution called `name`, if one is installed, in place of this folder in sys.modules.

    If none is, the module stays as it is, empty but for ``__version__ = "0"``: transformers compares that
    with the lowest version it accepts and goes on as if nothing were installed (without it, releases up to
    5.8 fail to parse the version). `from kernels import ...` raises the ImportError that its callers catch.

    Args:
        name: the bare name that was imported, `kernels`.
    """
    mark = os.path.join(name, os.path.basename(__file__))  # of this checkout, and of any other on the path
    elsewhere = [e for e in sys.path if not os.path.isfile(os.path.join(e or os.curdir, mark))]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None or spec.loader is None:
        sys.modules[name].__dict__["__version__"] = "0"
        return
    # The import statement that got here returns what sys.modules holds when this module's body ends.
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(f"{name}.{__name__.rpartition('.')[2]}", None)
