"""Restricted reader of .metadata, the pickle in a checkpoint of torch.distributed.checkpoint (DCP),
which torch reads without restrictions. A file with other classes than those that describe tensors
is refused before torch reads it.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from rlhf_mc.config.errors import UserError, error_reason, first_line

_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")


def read_metadata(path: Path) -> Any:
    """Return torch's Metadata. Raise UserError if the file cannot be read, is corrupt, or would
    execute code."""
    try:
        return _Reader(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error_reason(error)})") from error
    except Exception as error:  # a corrupt pickle raises any exception
        raise UserError(
            f"{path}: not the metadata of a checkpoint's tensors ({first_line(error)})"
        ) from error
