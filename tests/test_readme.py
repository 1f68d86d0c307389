"""Every command of README.md and the docs runs, or at least is one that the program accepts; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grpo_lit.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


DOCS = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))


def commands(text: str = README) -> list[str]:
    """Lines of the shell blocks, without comments; parts of a line joined by && count one by one."""
    lines: list[str] = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            lines += [part.split("  #")[0].strip() for part in line.split("&&")]
    return [line for line in lines if line]


def own(text: str = README) -> list[list[str]]:
    """Arguments of the program's own commands; braces stand for each of their words."""
    found = []
    for line in commands(text):
        if line.startswith("grpo-lit "):
            words = shlex.split(line)[1:]
            braces = next((word for word in words if re.fullmatch(r"\{[a-z,]+\}", word)), None)
            options = braces[1:-1].split(",") if braces else [None]
            found += [[option if word == braces else word for word in words] for option in options]
    return found


def inline() -> list[list[str]]:
    """Arguments of the program's commands within sentences, with a configuration where the text leaves it open."""
    names = "|".join(COMMANDS)
    texts = [text for text in re.findall(r"`([^`]+)`", README) if re.match(rf"(grpo-lit )?({names}) ", text)]
    found = [shlex.split(text.removeprefix("grpo-lit ")) for text in texts]
    return [["quickstart" if word in ("F", "...") else word for word in words] for words in found]


def launched() -> list[list[str]]:
    """Arguments of the fits that torchrun and srun start, in a block of its own."""
    blocks = "".join(re.findall(r"^```text\n(torchrun.*?)^```", README, re.M | re.S)).replace("\\\n", " ")
    return [
        shlex.split(line.split("grpo_lit" if "grpo_lit" in line else "grpo-lit")[1]) for line in blocks.splitlines()
    ]


# What runs here as it is written; what needs a GPU, a network or hours is read to its end instead.
RUN = ("evaluate", "export", "compare", "verify", "filter", "generate")
READ = ("fit", "validate", "check", "sent")
OTHERS = ("python3 -m venv .venv", ". .venv/bin/activate", "pip install ", "python -m pytest")


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_every_line_is_one_that_is_run_or_read() -> None:
    assert [line for line in commands() if not line.startswith(("grpo-lit ", *OTHERS))] == []
    assert {arguments[0] for arguments in own()} <= {*RUN, *READ, "tune", "bench"} <= set(COMMANDS)
    assert {arguments[0] for arguments in inline()} <= set(COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [a for a in own() + inline() + launched() + own(DOCS) if a[0] in READ and len(a) > 2 and "--config" in a],
    ids=" ".join,
)
def test_what_needs_a_gpu_or_a_network_is_accepted(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["quickstart" if word == "..." else word for word in arguments] + ["--print_config"]) == 0


def test_tune_accepts_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_lit.cli.tune import resolve, split_arguments

    monkeypatch.chdir(tmp_path)
    (line,) = [arguments for arguments in own() if arguments[0] == "tune"]
    options, base = split_arguments(line[1:])
    assert options.output == "tuned"
    assert resolve(base)[0]["trainer"]["default_root_dir"] == "runs/quickstart"


@pytest.mark.parametrize(
    "arguments", [a for a in own() + inline() + own(DOCS) if a[0] in ("bench", "toy")], ids=" ".join
)
def test_benchmarks_and_small_policies_know_their_options(arguments: list[str]) -> None:
    assert exit_code([*arguments, *([] if "--help" in arguments else ["--help"])]) == 0


GSM8K_ROWS = """{"question": "Tom has 2 apples and buys 3. How many has he?", "answer": "2+3=5\\n#### 5"}
{"question": "Ann reads 4 pages a day. How many in a week?", "answer": "4*7=28\\n#### 28"}
"""


def test_what_follows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, after two short runs into the folder that the README names."""
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.max_steps=2", "--trainer.val_check_interval=1"]
    short += ["--data.prompts_per_step=4", "--data.val_prompts=6"]
    for _ in range(2):
        assert main(["fit", "--config", "quickstart", *short]) == 0
    (tmp_path / "train.jsonl").write_text(GSM8K_ROWS)
    run = [arguments for arguments in own() if arguments[0] in RUN]
    assert {arguments[0] for arguments in run} == set(RUN)
    for arguments in run:
        here = [word.replace("smollm2_arithmetic", "quickstart") for word in arguments]  # no model to download
        assert main(here) == 0, f"{arguments}\n{capsys.readouterr().err[-1500:]}"
    assert (tmp_path / "scores" / "report.html").exists()
    assert (tmp_path / "exported" / "config.json").exists()
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 2


def test_check_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner's command, on a model that needs no network."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--config", "quickstart", "--vram", "8GiB"]) == 0
    assert "MiB" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    """To a file, and where a place in it is named, to a heading."""
    missing = []
    for target in re.findall(r"\]\(([^)]+)\)", README):
        file, _, place = target.partition("#")
        if target.startswith("http"):
            continue
        if not (ROOT / file).exists():
            missing.append(target)
        elif place:
            headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.M)
            if place not in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]:
                missing.append(target)
    assert not missing


def test_paths_that_are_named_exist() -> None:
    """Those of the map and of the reading guide, wherever they are; a bare name follows its folder in the same cell."""
    missing, folder = [], Path()
    tables = README.partition("## To change X")[2].partition("## Results")[0]
    for path in re.findall(r"`([a-z0-9_/]+(?:\.py|/))`", tables):
        candidates = [ROOT / path, ROOT / "grpo_lit" / path, folder / path]
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        if found is None:
            missing.append(path)
        elif "/" in path:
            folder = found if found.is_dir() else found.parent
    assert missing == []


def test_the_reading_takes_an_afternoon() -> None:
    """As many lines as the guide says, to a tenth."""
    guide = README.partition("## Reading it in an afternoon")[2].partition("\n## ")[0]
    files = re.findall(r"`([a-z_]+/[a-z_]+\.py|[a-z_]+\.py)`", guide.partition("`grpo_lit/toy/`")[0])
    said = re.search(r"about ([\d,]+) lines", guide)
    assert len(files) > 15
    assert said is not None
    lines = sum(len((ROOT / "grpo_lit" / file).read_text().splitlines()) for file in files)
    assert abs(lines / int(said[1].replace(",", "")) - 1) < 0.1, lines


def test_numbers_of_a_table_are_in_the_record_before_it() -> None:
    """A cell that is one number of three digits or more, in its rounding, stands in a record that the text links to."""
    checked, wrong = 0, []
    recorded: list[float] = []
    for line in README.splitlines():
        files = re.findall(r"\]\((docs/results/[^)]+)\)", line)
        if line.startswith("#"):
            recorded = []
        elif files:
            texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
            recorded = [float(number) for text in texts for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)]
        if recorded and line.startswith("|"):
            for cell in line.strip("|").split("|")[1:]:
                number = re.fullmatch(r"([\d,]+(?:\.(\d+))?)(?: (?:s|ms|MiB))?", cell.strip())
                if number and len(re.sub(r"\D", "", number[1]).lstrip("0")) >= 3:
                    value, half = float(number[1].replace(",", "")), 0.501 * 10.0 ** -len(number[2] or "")
                    checked += 1
                    if not any(abs(value - known) <= half for known in recorded):
                        wrong.append((value, line))
    assert wrong == []
    assert checked > 60
