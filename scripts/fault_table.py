"""Inject faults into real runs, keep what came of each, and write docs/faults.md from that.

    python scripts/fault_table.py run                   every try that the record lacks; half an hour on two cores
    python scripts/fault_table.py run --only sigkill    one fault; --again repeats what the record has
    python scripts/fault_table.py run --minutes 4       stop starting tries after that long; a later call goes on
    python scripts/fault_table.py table                 docs/faults.md from docs/results/faults.jsonl

Every run trains the quick start's model with the quick start's configuration, for a few steps. An undisturbed run is
the measure: after a fault and a resume, the metrics without their timings, the completions and the final adapter must
be those of the undisturbed run, bit for bit. Linux only; what needs root (small disks, read-only mounts) says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from faults import inputs, stops, storage, strangers
from faults.lab import FAULTS, ROOT, Lab, NotPossibleError

RECORD = ROOT / "docs" / "results" / "faults.jsonl"
PAGE = ROOT / "docs" / "faults.md"
START, END = "<!-- table: scripts/fault_table.py table -->", "<!-- end of table -->"
MODULES = (stops, storage, inputs, strangers)


def read_record(path: Path) -> list[dict[str, Any]]:
    """The tries so far; a later one of the same number replaces an earlier one."""
    if not path.is_file():
        return []
    tries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({(entry["fault"], entry["try"]): entry for entry in tries}.values())


def commit() -> str:
    """The commit of this checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run(options: argparse.Namespace) -> int:
    """Make the tries that the record lacks."""
    lab = Lab(options.scratch or Path(tempfile.gettempdir()) / "grpo_lit_faults")
    stop = time.monotonic() + 60 * options.minutes
    done = {(entry["fault"], entry["try"]) for entry in read_record(options.record)}
    here = {
        "date": str(date.today()),
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release().split('-')[0]}, CPU",
    }
    failures = 0
    for name in options.only or FAULTS:
        for number in range(FAULTS[name].tries):
            if (name, number) in done and not options.again:
                continue
            if time.monotonic() > stop:
                print("out of time; run it again to go on")
                return 3
            start = time.monotonic()
            try:
                outcome = FAULTS[name].inject(lab, number)
            except NotPossibleError as error:
                print(f"{name} {number}: not run, {error}", flush=True)
                break
            except Exception:
                print(f"{name} {number}: FAILED\n{traceback.format_exc()}", flush=True)
                failures += 1
                break
            entry = {
                "fault": name,
                "try": number,
                "lost": outcome.lost,
                "exit": outcome.exit_code,
                "saw": outcome.saw.replace(str(lab.folder), "..."),
                "seconds": round(time.monotonic() - start, 1),
                **here,
            }
            with options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            print(f"{name} {number}: {json.dumps(entry, ensure_ascii=False)}", flush=True)
    return 1 if failures else 0


def table(record: list[dict[str, Any]]) -> str:
    """The Markdown table: a row a fault, in the order of the script."""
    lines = ["| fault | times tried | what was lost | what the user saw |", "|---|---|---|---|"]
    for name, row in FAULTS.items():
        tries = sorted((entry for entry in record if entry["fault"] == name), key=lambda entry: entry["try"])
        lost = sorted({entry["lost"] for entry in tries} - {"nothing"})
        count = sum(entry["lost"] != "nothing" for entry in tries)
        words = dict.fromkeys(f"exit {entry['exit']}: {_without_folders(entry['saw'])}" for entry in tries)
        seen = "<br>".join(_cell(text) for text in list(words)[:4])
        what = "" if not tries else f"{count} of {len(tries)}: {'; '.join(lost)}" if lost else "nothing"
        lines.append(f"| {row.title} | {len(tries) or 'not run'} | {what} | {seen} |")
    return "\n".join(lines)


def _without_folders(text: str) -> str:
    """The same words for the same fault: without process ids, seconds and the number of the folder."""
    for pattern, new in ((r"\.\.\./\w+-\d+/?", ".../"), (r"PID \d+", "PID ..."), (r"^after \d+ s", "within a minute")):
        text = re.sub(pattern, new, text)
    return text


def _cell(text: str) -> str:
    for old, new in (("grpo-lit: error: ", ""), ("|", "&#124;"), ("<", "&lt;"), ("\n", " ")):
        text = text.replace(old, new)
    return text if len(text) <= 260 else text[:260] + " ..."


def footer(record: list[dict[str, Any]]) -> str:
    """When, where and with what."""
    if not record:
        return ""
    days = sorted({entry["date"] for entry in record})
    versions = sorted({", ".join(f"{k} {v}" for k, v in entry["versions"].items()) for entry in record})
    machines = sorted({f"{entry['machine']}, Python {entry['python']}" for entry in record})
    tries, faults = len(record), len({entry["fault"] for entry in record})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{tries} tries of {faults} faults, {when}; {'; '.join(versions)}; {'; '.join(machines)}; one thread. Every "
        f"try with its words, exit code, commit and seconds: `docs/results/faults.jsonl`."
    )


def write_table(options: argparse.Namespace) -> int:
    """Put the table into the page, between its marks."""
    record = read_record(options.record)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{table(record)}\n\n{footer(record)}\n\n{END}{after}", encoding="utf-8")
    print(f"{PAGE}: {len(record)} tries")
    return 0


def main() -> int:
    """Run the faults, or write the page."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog=", ".join(FAULTS), allow_abbrev=False
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--only", choices=sorted(FAULTS), action="append", metavar="FAULT")
    parser.add_argument("--again", action="store_true", help="repeat tries that the record has")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no try later than this")
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, appended to")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the runs; kept, and used again")
    options = parser.parse_args()
    return run(options) if options.action == "run" else write_table(options)


if __name__ == "__main__":
    sys.exit(main())
