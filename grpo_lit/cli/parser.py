"""Parsing: config names, one-line errors, and Lightning's CLI with this project's defaults."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from pydoc import locate
from typing import Any, NoReturn, get_type_hints

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo_lit.callbacks import (
    AdapterExport,
    AdaptiveMicroBatch,
    AutoCheckpointing,
    CompletionsFile,
    GracefulStop,
    MetricsFile,
    OOMReplay,
    RankWatch,
    RunCheckpoint,
    StepProgress,
)
from grpo_lit.checkpoint import AtomicCheckpointIO
from grpo_lit.cli.config_files import resolve_config_names
from grpo_lit.cli.profiling import ProfilerConfig, profiler_callbacks
from grpo_lit.datamodules import MathDataModule
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.module import GRPOModule
from grpo_lit.paths import look_in_current_folder, output_folder

# Sections that can't be null; their keys have defaults.
_SECTIONS = (
    "trainer",
    "checkpoint",
    "profiler",
    "model.rollout",
    "model.rollout.sampling",
    "model.loss",
    "model.optimizer",
    "model.lr_schedule",
    "model.validation",
    "model.validation.sampling",
)


# Sections whose keys are no arguments of the parser; its messages name them as if there were no section around them.
_PARSED_AS_A_WHOLE = {"data": MathDataModule, "model.lora": LoRAConfig}

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # --help says what a dataclass's fields are


class ParseError(UserError):
    """The arguments do not parse; the message is already one line."""

    def __init__(self, message: str) -> None:
        ValueError.__init__(self, message)


class CLIParser(LightningArgumentParser):
    """Lightning's parser, with errors raised as one line instead of printed with the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what was wrong.

        Raises:
            UserError: always.
        """
        cause: BaseException | None = ex
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        raise ParseError(_with_suggestion(self, tidy(message))) from ex

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """As jsonargparse's; ``skip_none``, which Lightning passes, has another name there."""
        if "skip_none" in kwargs:
            kwargs["skip_unset"] = kwargs.pop("skip_none")
        return str(super().dump(*args, **kwargs))

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """As jsonargparse's, by its name of today; Lightning calls the old one."""
        return super().instantiate(*args, **kwargs)


def tidy(message: str) -> str:
    """A jsonargparse message on one line, in this project's words."""
    text = re.sub(r"\s+", " ", message).strip().removeprefix("Parser key ")
    text = re.sub(r"tip: For details of accepted options run:.*$", "", text).strip()
    text = re.sub(r"Expected an? (.*?)\. Got value: (.*)$", r"got \2, accepted is \1", text)
    text = re.sub(  # settings under init_args without the class that they are of
        r"Type typing\.Callable.*Dict must include a class_path.*key='(\w+)', val=(.*?)\).*$",
        r"got \1=\2 without a class, accepted is --model.optimizer torch.optim.AdamW --model.optimizer.\1 ...",
        text,
    )
    union = re.search(
        r"Does not validate against any of the Union subtypes.*?\[(.*)\] Errors:.*Given value: ?(.*)$", text
    )
    if union is not None:
        types = union.group(1).replace("NoneType", "null")
        text = f"{text[: union.start()]}got {union.group(2) or repr('')}, accepted is {types}"
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"(?:typing\.)?Literal\[([^]]*)\]", lambda match: match.group(1).replace("'", ""), text)
    return re.sub(r'^"([\w.]+)": ', r"\1: ", text)


def _with_suggestion(parser: LightningArgumentParser, message: str) -> str:
    """Name the nearest accepted key where an unknown one was given."""
    match = re.search(
        r"unrecognized arguments: -*(?P<a>[\w.]+)|key ['\"]?(?P<b>[\w.]+)['\"]? is not expected"
        r"|option ['\"]?(?P<c>[\w.]+)['\"]? is not accepted"
        r"|group '(?P<d>[\w.]+)' does not accept option '(?P<e>[\w.]+)'",
        message,
        re.IGNORECASE,
    )
    if match is None:
        return message
    unknown = ".".join(name for name in match.groups() if name)
    accepted = {action.dest for action in parser._actions if action.dest != "help"}
    names = {name: name for name in accepted}
    for section, described in _PARSED_AS_A_WHOLE.items():
        keys = set(inspect.signature(described).parameters)
        if section in accepted:
            names |= {f"{section}.{key}": f"{section}.{key}" for key in keys}
        elif keys <= {name.partition(".")[0] for name in accepted}:  # the section's own parser
            names = {name: f"{section}.{name}" for name in accepted}
            message = message.replace(f"'{unknown}'", f"'{section}.{unknown}'")
    close = difflib.get_close_matches(unknown, list(names), n=1, cutoff=0.5)
    hint = f"did you mean {names[close[0]]}?" if close else "--help lists what is accepted"
    return f"unknown argument {unknown} ({message.rstrip('.')}); {hint}"


def _trainer_mistake(config: Any, message: str) -> UserError:
    """What Lightning says of a setting of its trainer, under the name that it gives in backticks."""
    words = re.findall(r"(?:^|`|\bfor )(\w+)", message.replace("Timer(duration", "max_time"))
    # a library that is missing is told without the setting that needs it
    chosen = (key for key in ("strategy", "accelerator") if config[key] not in ("auto", "cpu", "gpu", "cuda"))
    name = next((word for word in words if word in config), next(chosen, None))
    if name is None:
        return UserError("trainer", message, "settings that Trainer takes")
    return UserError(f"trainer.{name}", config[name], f"a setting that Trainer takes ({message.rstrip('.')})")


def check_optimizer(value: Any) -> None:
    """Refuse what makes no optimizer before it is called: the parser takes any function's name here, os.system too.

    Args:
        value: as parsed: a function, its name, or a section with ``class_path``.

    Raises:
        UserError: neither a class of optimizers nor a function that says that it returns one.
    """
    path = value if isinstance(value, str) else getattr(value, "class_path", None)
    found = value if path is None else locate(path)
    made = found
    if not inspect.isclass(found):
        try:
            made = get_type_hints(found).get("return")
        except (TypeError, NameError):
            made = None
    if not (inspect.isclass(made) and issubclass(made, torch.optim.Optimizer)):
        raise UserError("model.optimizer", path or str(value), "a class of optimizers, such as torch.optim.AdamW")


class GRPOCLI(LightningCLI):
    """LightningCLI for `GRPOModule` and a math DataModule; parses and builds, and leaves running to the command.

    Args:
        args: command-line arguments after the command's name.
        command: name shown in the usage line.
    """

    def __init__(self, args: Sequence[str], command: str) -> None:
        look_in_current_folder()  # for class paths
        super().__init__(
            GRPOModule,
            MathDataModule,
            args=resolve_config_names(args),
            run=False,
            parser_class=CLIParser,
            parser_kwargs={"prog": f"grpo-lit {command}", "description": None},
            subclass_mode_data=True,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None,
            trainer_defaults={
                "devices": 1,
                "max_epochs": -1,
                "max_steps": 100,
                "num_sanity_val_steps": -1,
                "check_val_every_n_epoch": None,
                "val_check_interval": 20,
                "enable_model_summary": False,
                "default_root_dir": "runs/default",
                "log_every_n_steps": 1,
            },
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What a command takes besides trainer, model and data."""
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Checkpoint to go on from: a file, 'last' or 'best' of trainer.default_root_dir.",
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_class_arguments(ProfilerConfig, "profiler")
        for name, what in (
            ("oom_replay", "Replay what ran out of memory in smaller batches, to the same gradient"),
            ("adaptive_micro_batch", "Size micro-batches by the memory they take"),
        ):
            text = f"{what}; null does so on CUDA. Its settings: trainer.callbacks."
            parser.add_argument(f"--{name}", type=bool | None, default=None, help=text)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's warning about ``sys.argv``."""
        try:
            self.config = parser.parse_args(args)  # type: ignore[arg-type]
        except ParseError as error:
            name = str(error).partition(":")[0].partition(".")[0]
            for section, described in _PARSED_AS_A_WHOLE.items():
                if name in inspect.signature(described).parameters:
                    raise ParseError(f"{section}.{error}") from error
            raise
        for name in _SECTIONS:
            if self.config.get(name, ()) is None:
                raise UserError(name, None, "a section; leave it out for its defaults")
        check_optimizer(self.config["model"]["optimizer"])
        seed = self.config["seed_everything"]
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise UserError("seed_everything", seed, "a whole number from 0 to 2**32 - 1, true or false")

    def _parse_ckpt_path(self) -> None:
        """Nothing: the configuration rules, the checkpoint is checked against it."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Add what every run writes and shows."""
        config = self.config_init["trainer"]
        root = str(config["default_root_dir"] or "runs/default")
        config["default_root_dir"] = root
        output_folder(root, "trainer.default_root_dir")
        if config.get("logger") in (None, True):
            config["logger"] = TensorBoardLogger(root, name="tensorboard", version="")
        plugins = config.get("plugins") or []
        config["plugins"] = [AtomicCheckpointIO(), *(plugins if isinstance(plugins, list) else [plugins])]
        callbacks = self._callbacks(config)
        given = config.get("callbacks") or []
        own = {type(callback) for callback in (given if isinstance(given, list) else [given])}  # stand for ours
        callbacks = [callback for callback in callbacks if type(callback) not in own]
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": callbacks}
        try:
            return super().instantiate_trainer(**kwargs)
        except UserError:
            raise
        except MisconfigurationException as error:
            if config["devices"] in (0, "0", [], ""):
                accepted = "at least 1 device, a list of them, or auto"
                raise UserError("trainer.devices", config["devices"], accepted) from error
            if config["accelerator"] not in ("auto", "cpu"):  # mostly one that is not there: no mistake in a setting
                raise
            raise _trainer_mistake(config, " ".join(str(error).split())) from error
        except (TypeError, ValueError, ImportError) as error:  # a strategy, accelerator or device that there is not
            raise _trainer_mistake(config, " ".join(str(error).split())) from error

    def _callbacks(self, trainer: Any) -> list[Callback]:
        """What writes, shows and guards this run."""
        callbacks = [GracefulStop(), MetricsFile(), CompletionsFile(), AdapterExport(), RankWatch()]
        if trainer.get("enable_progress_bar") is not False:
            callbacks.append(StepProgress())
        cuda = trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        guards = {"adaptive_micro_batch": AdaptiveMicroBatch, "oom_replay": OOMReplay}
        for name, kind in guards.items():
            if cuda if self.config_init[name] is None else self.config_init[name]:
                callbacks.append(kind())
        if self.config["model"]["policy"]["gradient_checkpointing"] == "auto":
            callbacks.append(AutoCheckpointing())
        return callbacks + profiler_callbacks(self.config_init["profiler"])

    def dump(self) -> str:
        """The resolved configuration as YAML."""
        return str(self.parser.dump(self.config, skip_none=False, format="yaml"))
