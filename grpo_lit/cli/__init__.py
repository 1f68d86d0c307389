"""The ``grpo-lit`` command: a table from names to functions, imported only when called."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

# name: (what it does, module:function taking the arguments after the name)
COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("train a policy", "grpo_lit.cli.train:fit"),
    "validate": ("measure a policy's accuracy on held-out prompts", "grpo_lit.cli.train:validate"),
    "check": ("resolve a config and check the system, without training", "grpo_lit.cli.check:main"),
    "evaluate": ("score models on datasets, with intervals and a report", "grpo_lit.cli.evaluate:main"),
    "sent": ("order training prompts by the semantic entropy of sampled answers", "grpo_lit.cli.sent:main"),
    "compare": ("put two or more runs side by side", "grpo_lit.cli.compare:main"),
    "export": ("write trained weights as a PEFT folder or a merged model", "grpo_lit.cli.export:main"),
    "filter": ("keep the rows of a dataset that are worth training on", "grpo_lit.cli.filter:main"),
    "verify": ("explain a verdict, or judge a file of cases", "grpo_lit.cli.verify:main"),
    "generate": ("answer prompts with a model, an adapter or a checkpoint", "grpo_lit.cli.generate:main"),
    "tune": ("find fast settings for a configuration, judged by benchmarks", "grpo_lit.cli.tune:main"),
    "toy": ("the small policies whose truth is known exactly", "grpo_lit.toy.cli:main"),
    "bench": ("measure speed and memory side by side", "grpo_lit.bench:main"),
}

# Errors of the system that name no file and are no mistake of this program: disk full, read-only, too many open files.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOMEM)


def usage() -> str:
    """The help text: every command with a line each."""
    lines = ["usage: grpo-lit COMMAND [--config NAME_OR_FILE] [options]", "", "commands:"]
    lines += [f"  {name:<10} {description}" for name, (description, _) in COMMANDS.items()]
    lines += ["", "grpo-lit COMMAND --help lists a command's options. First run: grpo-lit fit --config quickstart"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after the program's name; ``sys.argv`` by default.

    Returns:
        Exit code: 0, 2 for a mistake in the arguments, 1 for a fault of the system.
    """
    try:
        code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # | head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush
        return 141
    return code


def _main(argv: Sequence[str] | None) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars; this project shows one of its own
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from grpo_lit import __version__

        print(f"grpo-lit {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return fail(f"unknown command {name!r}: accepted are {', '.join(COMMANDS)}", 2)
    return _run(COMMANDS[name][1], rest)


def _run(target: str, arguments: list[str]) -> int:
    from grpo_lit.errors import SystemFault, Terminated, UserError

    module_name, _, function_name = target.partition(":")
    with _ended_on_a_signal():
        command = getattr(importlib.import_module(module_name), function_name)
    try:
        with _raised_on_sigterm(Terminated):
            code: int = command(arguments)
        return code
    except (UserError, SystemFault, Terminated) as error:
        if os.environ.get("GRPO_LIT_TRACEBACK"):
            raise
        return fail(" ".join(str(error).split()), error.exit_code)
    except OSError as error:  # of a file that the user named and no command checked, or of a full disk
        named = isinstance(error.filename, str | os.PathLike)
        if os.environ.get("GRPO_LIT_TRACEBACK") or not (named or error.errno in _OF_THE_MACHINE):
            raise
        where = f"{os.fspath(error.filename)}: " if named else ""
        return fail(f"{where}{error.strerror} (GRPO_LIT_TRACEBACK=1 shows where)", 1)
    except KeyboardInterrupt as error:
        return fail(str(error) or "interrupted", 130)


@contextmanager
def _ended_on_a_signal() -> Iterator[None]:
    """End at once where the body, which imports and writes nothing, is stopped: libraries swallow or twist an error."""
    told = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated by SIGTERM", 143)}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda got, _: os._exit(fail(*told[got]))) for number in told}  # type: ignore[index]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _raised_on_sigterm(error: type[BaseException]) -> Iterator[None]:
    """Raise an error where the body stands when SIGTERM comes, unless it is handled; a second one ends at once."""
    own = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != own:  # a fork that runs no command of its own
            os.kill(os.getpid(), number)
        raise error

    free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def fail(message: str, code: int) -> int:
    """Print an error as one line and return its exit code."""
    print(f"grpo-lit: error: {message}", file=sys.stderr, flush=True)
    return code
