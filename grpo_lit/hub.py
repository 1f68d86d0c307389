"""The model hub, asked once whether it is there: its clients would try again and again for half a minute."""

from __future__ import annotations

import functools
import logging
import os
import queue
import sys
import threading

from huggingface_hub import constants, get_session

TIMEOUT_S = 3.0

_log = logging.getLogger("grpo_lit.hub")


@functools.cache
def offline_if_unreachable() -> None:
    """Where the hub does not answer, let this process and its children use what is cached (``HF_HUB_OFFLINE=1``)."""
    if constants.HF_HUB_OFFLINE:
        return
    answers: queue.Queue[object] = queue.Queue()
    # In a thread: without a network a client waits as long for each address of the host.
    threading.Thread(target=_ask, args=(answers,), daemon=True).start()
    try:
        error = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        error = f"no answer within {TIMEOUT_S:g} s"
    if error is not None:
        _log.info("%s can't be reached (%s): only what is cached is used", constants.ENDPOINT, error)
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _ask(answers: queue.Queue[object]) -> None:
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # of whichever HTTP library the hub's client uses: no answer came
        answers.put(error)
    else:
        answers.put(None)
