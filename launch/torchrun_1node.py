"""torchrun on one node, which ends with the program's own exit code. Run by launch/torchrun_1node.sh.

torchrun by itself ends with 1 whatever its ranks ended with, and with 0 where every rank did, finished or not. Rank 0
writes the program's exit code to the file that RLHF_MC_EXIT_CODE_FILE names, and 0 only after the run's success mark.
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
        # The user's own file, if there is one. It may be of an earlier run.
        word = Path(os.environ.setdefault("RLHF_MC_EXIT_CODE_FILE", str(Path(folder) / "exit_code")))
        word.unlink(missing_ok=True)
        code = _torchrun(arguments)
        said = word.read_text().strip() if word.exists() else ""
    if code == 0 and said != "0":
        print("torchrun_1node: error: every rank ended with 0, but the run has not finished", file=sys.stderr)
        return 1
    return int(said) if said.isdecimal() and said != "0" else code


def _torchrun(arguments: list[str]) -> int:
    try:
        torchrun(arguments)
        return 0
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # which rank, and its exit code or signal; no stack of torchrun's own
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
