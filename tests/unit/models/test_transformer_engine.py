"""Transformer Engine as a package that is absent, or installed and broken, and the choice of
attention. Its layers themselves need a GPU."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from rlhf_mc import platform
from rlhf_mc.checkpoint import convert
from rlhf_mc.config.errors import NodeError
from rlhf_mc.models import layers, transformer_engine
from rlhf_mc.models.context_parallel import Context
from rlhf_mc.models.transformer_engine import (
    has_packed_attention,
    import_transformer_engine,
    uses_transformer_engine,
)

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a package of the name whose import runs the given code."""

    def install(code: str) -> None:
        package = tmp_path / "transformer_engine" / "pytorch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text(code)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "transformer_engine"
        ]:
            monkeypatch.delitem(sys.modules, name)

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_tokens_of_context_parallel_ranks_are_ordered_as_transformer_engine_orders_them() -> None:
    """Take the example of its reorder_seq_chunks_before_a2a_after_attn_thd, the inverse of
    reorder_seq_chunks_after_a2a_before_attn_thd."""
    sequences = torch.tensor([*range(8), *range(8), *range(8), *range(16)])
    bounds = torch.tensor([0, 8, 16, 24, 40], dtype=torch.int32)
    by_rank = torch.tensor(
        [
            [0, 7, 0, 7, 0, 7, 0, 1, 14, 15],
            [1, 6, 1, 6, 1, 6, 2, 3, 12, 13],
            [2, 5, 2, 5, 2, 5, 4, 5, 10, 11],
            [3, 4, 3, 4, 3, 4, 6, 7, 8, 9],
        ]
    ).flatten()
    assert torch.equal(transformer_engine._to_ranks(sequences, bounds, 4), by_rank)
    assert torch.equal(
        transformer_engine._to_sequences(by_rank, bounds, torch.empty(0), 4), sequences
    )
    for rank, tokens in enumerate(by_rank.view(4, -1)):
        own = Context(size=4, rank=rank).own_tokens(bounds.diff().numpy())
        assert torch.equal(sequences[own], tokens)


def test_a_machine_without_it_uses_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert not import_transformer_engine()
    assert not uses_transformer_engine.__wrapped__()


def test_a_cpu_uses_local_layers_beside_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("")
    monkeypatch.setattr(platform, "use_cuda", lambda: False)
    assert import_transformer_engine()
    assert not uses_transformer_engine.__wrapped__()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise OSError('libcudnn.so.9: cannot open shared object file')",
            r"OSError: libcudnn.so.9: cannot open",
        ),
        (
            "raise FileNotFoundError('Could not find shared object file')",
            "FileNotFoundError: Could not find",
        ),
        (
            "raise RuntimeError('Found empty `transformer-engine` meta package')",
            "RuntimeError: Found empty",
        ),
        (
            "assert False, 'package version mismatch.\\nFound 2.10'",
            r"AssertionError: package version mismatch\.\)",
        ),
    ],
)
def test_a_broken_one_is_one_line(install: Install, code: str, reason: str) -> None:
    install(code)
    with pytest.raises(NodeError, match=reason) as caught:
        import_transformer_engine()
    message = str(caught.value)
    assert "\n" not in message
    assert (
        f"build it for torch {torch.__version__}" in message
        and "pip uninstall transformer_engine" in message
    )


def test_tools_name_a_broken_one_before_megatron_imports_it(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_MC_DEVICE", "cpu")  # which the import sets too
    import check_layouts

    install("raise FileNotFoundError('Could not find shared object file')")
    here = str(tmp_path)
    for program in (
        lambda: check_layouts.check(mock.Mock(), 1),
        lambda: convert.mcore_to_hf(here, here, (1, 1, 1), 1),
        lambda: convert.training_checkpoint_to_hf(here, here, "actor", None, 1),
    ):
        with pytest.raises(NodeError, match="FileNotFoundError: Could not find"):
            program()


def test_an_import_error_matters_only_on_a_gpu(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("raise ImportError('undefined symbol: _ZN3c10')")
    assert not import_transformer_engine()
    monkeypatch.setattr(platform, "use_cuda", lambda: True)
    with pytest.raises(NodeError, match="ImportError: undefined symbol"):
        import_transformer_engine()


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Replace Transformer Engine's selection of an attention backend, and its attention. Yield what
    the selection answers (flash, fused), what it was asked, and what the attention's gradients are
    multiplied by."""
    found = SimpleNamespace(flash=False, fused=False, asked=[], gradients=1.0)

    def get_attention_backend(params: SimpleNamespace) -> tuple[object, ...]:
        found.asked.append(params)
        return found.flash, None, found.fused, None, True, [found.flash, found.fused, True]

    name = "transformer_engine.pytorch.attention.dot_product_attention"
    parts = name.split(".")
    for count in range(1, 1 + len(parts)):
        package = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    utils = SimpleNamespace(
        AttentionParams=SimpleNamespace, get_attention_backend=get_attention_backend
    )
    monkeypatch.setattr(sys.modules[name], "utils", utils, raising=False)
    monkeypatch.setattr(
        sys.modules["transformer_engine.pytorch.attention"],
        "DotProductAttention",
        lambda *_, **options: functools.partial(_attention, found, options),
        raising=False,
    )
    monkeypatch.setattr(platform, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    has_packed_attention.cache_clear()
    yield found
    has_packed_attention.cache_clear()


def _attention(
    found: SimpleNamespace,
    options: dict[str, object],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    **_: object,
) -> torch.Tensor:
    """Attend as Transformer Engine does to packed sequences, with gradients `found.gradients` times
    too large."""
    assert (options["qkv_format"], options["attn_mask_type"]) == ("thd", "padding_causal")
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max(lengths)
    packed = layers.pack(lengths)
    q, k, v = (x[:, None] for x in (q, k, v))
    config = SimpleNamespace(
        attention_dropout=0.0, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = layers.PackedAttention(config, 1, pg_collection=SimpleNamespace(tp=None))
    out = attention(q, k, v, None, packed_seq_params=packed)
    out.register_hook(lambda grad: found.gradients * grad)
    return out[:, 0]


def test_an_attention_with_wrong_gradients_is_not_used(
    selection: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    selection.fused = True
    selection.gradients = 3.0
    with caplog.at_level(logging.WARNING):
        assert not has_packed_attention(torch.bfloat16, 8, 2, (256, 256))
    line = (
        "gradients of attention that are wrong by 2 times their norm for packed sequences in "
        "bfloat16 with heads of 256"
    )
    assert line in caplog.text and "cuDNN 91900" in caplog.text
    has_packed_attention.cache_clear()
    selection.gradients = 1.02
    assert has_packed_attention(torch.bfloat16, 8, 2, (256, 256))


@pytest.mark.parametrize(
    ("flash", "fused"), [(False, True), (True, False), (True, True), (False, False)]
)
def test_packed_attention_is_flash_attn_or_cudnn(
    selection: SimpleNamespace, caplog: pytest.LogCaptureFixture, flash: bool, fused: bool
) -> None:
    selection.flash = flash
    selection.fused = fused
    with caplog.at_level(logging.WARNING):
        assert has_packed_attention(torch.bfloat16, 8, 2, (128, 128)) == (flash or fused)
        assert has_packed_attention(torch.bfloat16, 8, 2, (128, 128)) == (flash or fused)
    assert len(selection.asked) == 1  # and so at most one warning for each kind of attention
    line = (
        "no attention kernel for packed sequences in bfloat16 with heads of 128 dimensions on "
        "NVIDIA A100"
    )
    assert caplog.text.count(line) == (not flash and not fused)


def test_packed_attention_is_asked_for_the_models_heads(selection: SimpleNamespace) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        has_packed_attention(torch.float32, 8, 2, (64, 64))
    finally:
        torch.use_deterministic_algorithms(False)
    (asked,) = selection.asked
    assert (asked.qkv_dtype, asked.num_heads, asked.num_gqa_groups) == (torch.float32, 8, 2)
    assert asked.head_dim_qk == asked.head_dim_v == 64
    assert asked.qkv_layout.startswith("thd") and asked.attn_mask_type == "padding_causal"
    assert asked.deterministic
