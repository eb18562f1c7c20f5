"""epmoe: expert-parallel Mixture-of-Experts on one NVLink node, in C and CUDA C.

    EPMoE              a Mixture-of-Experts layer with its experts spread over the ranks
    EPAll2AllLayer     its plan, dispatch and combine
    EpAll2AllFusedOp   the same, with the experts' products in the same kernels
    EPLayout           where a dispatch put its rows
    SymmetricHeap      memory that every rank can reach on every other
    World              the ranks that take part
    grouped_gemm       rows grouped by expert times each expert's own weights
    GptOss             an activation with numbers

Everything runs on the GPUs of one node or, without one, on the CPU; see the README.
"""

from . import reference
from .errors import (EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, EpTimeout, HeapExhausted, PeerDied,
                     PeerError)
from .gemm import grouped_gemm
from .heap import SymmetricHeap, include_dir
from .fused import EpAll2AllFusedOp
from .layer import EPAll2AllLayer
from .layout import EPLayout
from .moe import EPMoE
from .reference import GptOss
from .world import World, thread_worlds

__version__ = "0.1.0"
__all__ = ["EPAll2AllLayer", "EPLayout", "EPMoE", "EpAll2AllFusedOp", "EpClosed", "EpError", "EpIndexError", "EpMismatch", "EpOverflow", "EpTimeout",
           "GptOss", "HeapExhausted", "PeerDied", "PeerError", "SymmetricHeap", "World", "grouped_gemm",
           "include_dir", "reference", "thread_worlds"]
