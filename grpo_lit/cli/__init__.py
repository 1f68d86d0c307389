"""The ``grpo-lit`` command: a table from names to functions, imported only when called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

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
    from grpo_lit.errors import SystemFault, UserError

    module_name, _, function_name = target.partition(":")
    try:
        code: int = getattr(importlib.import_module(module_name), function_name)(arguments)
        return code
    except (UserError, SystemFault) as error:
        if os.environ.get("GRPO_LIT_TRACEBACK"):
            raise
        return fail(" ".join(str(error).split()), error.exit_code)
    except OSError as error:  # of a file that the user named and no command checked
        if os.environ.get("GRPO_LIT_TRACEBACK") or not isinstance(error.filename, str | os.PathLike):
            raise
        return fail(f"{os.fspath(error.filename)}: {error.strerror} (GRPO_LIT_TRACEBACK=1 shows where)", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def fail(message: str, code: int) -> int:
    """Print an error as one line and return its exit code."""
    print(f"grpo-lit: error: {message}", file=sys.stderr, flush=True)
    return code
