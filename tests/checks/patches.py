"""Fail if a library's attribute is replaced outside of the files of patches, or if a Patch has no
test.

Part of `make checks`, run from the repository's root. docs/architecture.md describes patches.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "rlhf_mc"
FILES = {
    "torch_patches.py": "tests/dist/test_megatron_patches.py",
    "models/megatron_patches.py": "tests/dist/test_megatron_patches.py",
    "models/transformer_engine.py": "tests/unit/models/test_transformer_engine.py",
    "rollout/sglang_patches.py": "tests/dist/test_sglang.py",
    "rollout/vllm_patches.py": "tests/dist/test_vllm_patches.py",
}
"""File of patches -> file with their tests. Each names the attribute that it replaces."""
WHILE_BUILT = "rollout/vllm_parameters.py"
"""Replaces vLLM's groups while a model is built."""
MECHANISM = "patching.py"
SETTINGS = ("torch.utils.deterministic.fill_uninitialized_memory", "sys.excepthook")
"""Attributes that are documented to be set."""
REPLACING = ("Patch", "replaced")
"""The functions of patching.py."""


def library_names(tree: ast.Module) -> set[str]:
    """Return the names in a file that modules, classes and functions of libraries have."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (a.asname or a.name).partition(".")[0]
                for a in node.names
                if not a.name.startswith(PACKAGE)
            }
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(
            (PACKAGE, "__future__")
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def replacements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each replacement of a library's attribute."""
    names = library_names(tree)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.patching"
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in imported & set(REPLACING):
                yield node.lineno, ast.unparse(node)
            elif node.func.id in ("setattr", "delattr"):
                targets = [ast.Attribute(node.args[0], "any")]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if not isinstance(target, ast.Attribute) or ast.unparse(target) in SETTINGS:
                continue
            if isinstance(root, ast.Name) and root.id in names:
                yield node.lineno, ast.unparse(node)


def patched_names(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each attribute that a Patch of the file replaces."""
    for node in ast.walk(tree):
        is_patch = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Patch"
        if is_patch and isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value)


def main() -> int:
    """Print what is wrong, one line each. Return the exit code."""
    problems = []
    num_patches = 0
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(), str(path))
        if name in FILES:
            tests = Path(FILES[name]).read_text()
            patched = list(patched_names(tree))
            num_patches += len(patched)
            problems += [
                f"{path}: {FILES[name]} does not name the patch of {p}"
                for p in patched
                if p not in tests
            ]
        elif name not in (MECHANISM, WHILE_BUILT):
            problems += [
                (
                    f"{path}:{line}: {text.splitlines()[0][:80]}: a replacement outside of the "
                    "files of patches"
                )
                for line, text in replacements(tree)
            ]
    print(
        "\n".join(problems)
        if problems
        else f"patches: {num_patches}, each in a file of patches and in a test"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
