"""Writes the figures of the documentation: runs benchmarks, keeps what they say and draw.

    python benches/figures.py                        # everything, on a quiet machine: an hour
    python benches/figures.py warm hash -- --quick   # two of them; options after -- reach each

For each benchmark `docs/figures/NAME.md` holds the command, the machine, the notes and the tables
as printed, and `docs/figures/NAME.png` the plot, where it draws one. `docs/figures.md`
includes them. A benchmark that fails leaves the files as they were.
"""

import argparse
import datetime
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from support.options import CHECKOUT

FOLDER = CHECKOUT / "docs" / "figures"
SCRIPTS = ("warm", "cold", "mixed", "storage", "hash", "step", "budget")
DRAWN = {"budget": "Hit rates over memory, and speeds of each contender"}
"""What a plot shows, where it is not microseconds per row over rows per call."""

WITHOUT_OPTIONS = {"hash"}
"""Benchmarks that read no checkpoint, draw no plot, and take none of the common options."""

BUSY = 1.5
"""Processes wanting to run, in the mean of the last minute, that make a figure doubtful.

A benchmark that ran just before counts as one.
"""


def run(name: str, options: list[str], plot: Path) -> tuple[str, str]:
    """Runs one benchmark; its command line, as a reader would type it, and what it printed."""
    own = [] if name in WITHOUT_OPTIONS else options
    shown = shlex.join(["python", f"benches/{name}.py", *own])
    command = [sys.executable, str(CHECKOUT / "benches" / f"{name}.py"), *own]
    with tempfile.TemporaryDirectory() as folder:
        if name not in WITHOUT_OPTIONS:
            command += ["--plot", str(plot), "--json", str(Path(folder, "figures.json"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    missed = name in WITHOUT_OPTIONS and "below target" in done.stdout
    if done.returncode and not missed:
        sys.stdout.write(done.stdout)
        sys.exit(f"benches/{name}.py ended with status {done.returncode}; nothing was written")
    return shown, done.stdout


def fragment(name: str, command: str, printed: str, *, plot: bool) -> str:
    """What a benchmark printed as a part of a page."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [f"`{command}`, {day}:", ""]
    load = re.search(r"load:? ([0-9.]+)", printed)
    doubts = ["a quick run"] if "--quick" in command else []
    if load and float(load[1]) > BUSY:
        doubts.append(f"a machine with {load[1]} processes waiting to run")
    if doubts:
        lines += [f"!!! warning\n    From {' on '.join(doubts)}: no basis for conclusions.", ""]
    if "\n## " not in printed:
        return "\n".join([*lines, "```text", printed.rstrip(), "```", ""])
    body = re.sub(r"(?m)^# .*\n+", "", printed, count=1)
    body = re.sub(r"(?m)^(written|no plot): .*\n?", "", body)
    body = re.sub(r"(?m)^(\|.*)\n- ", r"\1\n\n- ", body)
    facts, _, rest = body.partition("\n## ")
    tables, _, figures = f"## {rest}".partition("\n## Figures\n")
    lines += [facts.strip(), ""]
    if figures:
        lines += [figures.strip(), ""]
    if plot:
        shown = DRAWN.get(name, "Microseconds per row over rows per call")
        lines += [f"![{shown}](figures/{name}.png)", ""]
    indented = "\n".join(f"    {line}".rstrip() for line in tables.splitlines())
    indented = re.sub(r"(?m)^    ## (.*)$", r"    **\1**", indented)
    return "\n".join([*lines, '??? note "All tables"', "", indented, ""])


def main() -> None:
    """Runs what was asked for."""
    given, options = sys.argv[1:], []
    if "--" in given:
        place = given.index("--")
        given, options = given[:place], given[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"benchmarks, of {', '.join(SCRIPTS)}; all")
    names = parser.parse_args(given).names or list(SCRIPTS)
    unknown = sorted(set(names) - set(SCRIPTS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"== benches/{name}.py", flush=True)
        drawn = FOLDER / f".{name}.png"
        command, printed = run(name, options, drawn)
        plot = drawn.exists()
        if plot:
            drawn.replace(FOLDER / f"{name}.png")
        text = fragment(name, command, printed, plot=plot)
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"written: {FOLDER / name}.md" + (" and its plot" if plot else ""), flush=True)


if __name__ == "__main__":
    main()
