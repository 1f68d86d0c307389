"""The model hub, asked once whether it is there: its clients would try again and again for half a minute."""

from __future__ import annotations

import functools
import logging
import os
import queue
import sys
import threading
from fnmatch import fnmatch

from huggingface_hub import HfApi, constants, get_session, try_to_load_from_cache

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


def announce_download(model: str) -> None:
    """Say how much of a model's weights is about to be downloaded: it can take minutes, and the client's bars are off.

    Args:
        model: hub id. Where the hub doesn't know it or isn't there, nothing is said: loading will.
    """
    if constants.HF_HUB_OFFLINE or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(model, files_metadata=True, timeout=TIMEOUT_S)
    except Exception:  # of the hub, or of whichever HTTP library its client uses
        return
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = [name for name in sizes if fnmatch(name, "model*.safetensors")]
    weights = weights or [name for name in sizes if fnmatch(name, "pytorch_model*.bin")]
    missing = sum(sizes[name] for name in weights if not isinstance(try_to_load_from_cache(model, name), str))
    if missing:
        text = f"{missing / 1e9:.1f} GB" if missing >= 1e8 else f"{missing / 1e6:.1f} MB"
        print(f"downloading {model}, {text}, to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
