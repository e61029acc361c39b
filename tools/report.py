"""Write a report of one run or several: one HTML page that needs no network, of runs that have finished, are running or
have died. It does not disturb a run.

    python tools/report.py RUN_DIR [RUN_DIR ...] [--output report.html] [--plot]

RUN_DIR is trainer.default_local_dir. The page goes to report.html in the first of them; a run writes it there at its
end too. docs/report.md explains the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_mc.runtime.tool import Parser, end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.config.errors import UserError
from rlhf_mc.report.page import read_runs, write_report
from rlhf_mc.run_files import PLOT, REPORT


def main() -> int:
    """Write the page, and the plot. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, help=f"the page; default: {REPORT} in the first RUN_DIR")
    parser.add_argument("--plot", action="store_true", help=f"write {PLOT} in each RUN_DIR too")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may not be UTF-8
    output = arguments.output or arguments.runs[0] / REPORT
    try:
        runs = read_runs(arguments.runs)
        write_report(runs, output)
        print(output)
        for run in runs if arguments.plot else []:
            from rlhf_mc.report.plots import plot_run  # matplotlib takes a second

            plot_run(run.rows, run.root / PLOT, title=run.root.resolve().name)
            print(run.root / PLOT)
    except UserError as error:
        print(f"rlhf_mc: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
