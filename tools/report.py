"""Write a report of one run or several: one HTML page that needs no network, of runs that have
finished, are running or have died. It does not disturb a run.

    python tools/report.py RUN_DIR [RUN_DIR ...] [--output report.html] [--plot]

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
from rlhf_mc.run_files import PLOT, REPORT
from rlhf_mc.runtime.exit_codes import exit_code


def main() -> int:
    """Write the page, and the plot. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--output", type=Path, help=f"the page; default: {REPORT} in the first RUN_DIR"
    )
    parser.add_argument("--plot", action="store_true", help=f"write {PLOT} in each RUN_DIR too")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may not be UTF-8
    return exit_code(
        "rlhf_mc",
        lambda: write(
            arguments.runs, arguments.output or arguments.runs[0] / REPORT, arguments.plot
        ),
    )


def write(roots: list[Path], output: Path, plots: bool) -> None:
    """Write the page, and plots of the runs if wanted, and print the files' names."""
    runs = read_runs(roots)
    write_report(runs, output)
    print(output)
    for run in runs if plots else []:
        from rlhf_mc.report.plots import plot_run  # matplotlib takes a second

        plot_run(run.rows, run.root / PLOT, title=run.root.resolve().name)
        print(run.root / PLOT)


if __name__ == "__main__":
    sys.exit(main())
