"""Write a report of one run or several: one HTML page that needs no network, of runs that have
finished, are running or have died. It does not disturb a run.

    python tools/report.py RUN_DIR [RUN_DIR ...] [--output report.html]

RUN_DIR is trainer.default_local_dir. The page goes to report.html in the first of them; a run
writes it there at its end too. docs/watching.md explains the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_mc.runtime.tool import Parser, end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.report.page import read_runs, write_report
from rlhf_mc.run_files import REPORT
from rlhf_mc.runtime.exit_codes import exit_code


def main() -> int:
    """Write the page. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--output", type=Path, help=f"the page; default: {REPORT} in the first RUN_DIR"
    )
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may not be UTF-8
    output = arguments.output or arguments.runs[0] / REPORT
    return exit_code("rlhf_mc", lambda: write(arguments.runs, output))


def write(roots: list[Path], output: Path) -> None:
    """Write the page, and print its name."""
    write_report(read_runs(roots), output)
    print(output)


if __name__ == "__main__":
    sys.exit(main())
