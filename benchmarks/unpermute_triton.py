"""unpermute for the peer DeepEP on a GPU: reads each row once, writes each sum once.

Triton is installed with torch for CUDA.
"""

import triton
import triton.language as tl

BLOCK = 1024  # columns of a program


@triton.jit
def _unpermute(rows, token_row, weight, out, hidden, topk: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.float32)
    for k in range(topk):
        row = tl.load(token_row + token * topk + k).to(tl.int64)
        there = tl.where(row >= 0, column, hidden) < hidden  # a choice of another rank reads nothing
        values = tl.load(rows + row * hidden + column, mask=there, other=0.0).to(tl.float32)
        total += values * tl.load(weight + token * topk + k)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def unpermute(rows, token_row, weight):
    """See deep_ep.unpermute."""
    (num_tokens, topk), hidden = token_row.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, hidden)
    if num_tokens:
        grid = num_tokens, triton.cdiv(hidden, BLOCK)
        _unpermute[grid](rows, token_row, weight, out, hidden, topk, BLOCK)
    return out
