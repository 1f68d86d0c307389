"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from grpo_lit.errors import UserError

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kmgt])(i?b)?", re.IGNORECASE)


def parse_bytes(text: str, *, argument: str = "--vram") -> int:
    """Bytes of a size such as 8GiB, 7.4G or 600 MiB; units are powers of 1024, since memory is sold so.

    >>> parse_bytes("8GiB") == 8 * 2**30, parse_bytes("7.5g") == 15 * 2**29, parse_bytes("2048k")
    (True, True, 2097152)

    Raises:
        UserError: no size, no unit (8 bytes are never meant), or less than 1 MiB.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = float(match.group(1)) * _UNITS[match.group(2).lower()] if match else 0.0
    if not 2**20 <= size < 2**60:
        raise UserError(argument, text, "a size from 1MiB on, such as 8GiB or 7400MiB")
    return int(size)


def format_bytes(num_bytes: float) -> str:
    """In GiB from 1 GiB on, else in MiB.

    >>> format_bytes(1536 * 2**20), format_bytes(20 * 2**20)
    ('1.50 GiB', '20 MiB')
    """
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
