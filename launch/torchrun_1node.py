"""torchrun on one node, with the program's own exit code. Run by launch/torchrun_1node.sh.

torchrun's own exit code is 1 for every failure, and 0 if every rank exits with 0, even before the
run has finished. Rank 0 writes the program's exit code to the file that RLHF_MC_EXIT_CODE_FILE
names, and 0 only after success.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def run(arguments: list[str]) -> int:
    """Run torchrun. Return the exit code of this launcher."""
    with tempfile.TemporaryDirectory(prefix="rlhf_mc-") as folder:
        # A file that the user has named may be left over from an earlier run.
        file = Path(
            os.environ.setdefault("RLHF_MC_EXIT_CODE_FILE", str(Path(folder) / "exit_code"))
        )
        file.unlink(missing_ok=True)
        code = _torchrun(arguments)
        written = file.read_text().strip() if file.exists() else ""
    if code == 0 and written != "0":
        print(
            "torchrun_1node: error: every rank ended with 0, but the run has not finished",
            file=sys.stderr,
        )
        return 1
    return int(written) if written.isdecimal() and written != "0" else code


def _torchrun(arguments: list[str]) -> int:
    """Run torchrun. Return its exit code."""
    try:
        torchrun(arguments)
        return 0
    except ChildFailedError as error:
        # names the rank, and its exit code or signal, without torchrun's stack
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
