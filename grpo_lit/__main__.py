"""``python -m grpo_lit``: the same as the ``grpo-lit`` command."""

import sys

from grpo_lit.cli import main

if __name__ == "__main__":
    sys.exit(main())
