"""The size of a chunk of logits: heads.py computes them in chunks, the planner counts their memory. No torch here."""

from __future__ import annotations

CHUNK_LOGITS = 1 << 26
"""Maximum number of logits on a rank at a time: tokens of a chunk times columns of the rank. 256 MiB in float32, twice
as much with the entropy. benchmarks/log_probs.py: larger chunks are no faster, much smaller ones are slower."""
GPU_CHUNKS = 4
"""Factor of CHUNK_LOGITS on a GPU. Each chunk reads the weight and reads and writes the sum of its gradient: with 441
tokens (1 << 26 logits of 152,000 columns) that takes as long as two thirds of the products, with 1766 a sixth."""
