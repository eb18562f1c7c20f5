"""epmoe: expert-parallel Mixture-of-Experts on one NVLink node, in C and CUDA C.

    EPMoE              a Mixture-of-Experts layer with its experts spread over the ranks
    EPAll2AllLayer     its plan, dispatch and combine
    SymmetricHeap      memory that every rank can reach on every other
    World              the ranks that take part
    grouped_gemm       rows grouped by expert times each expert's own weights

Everything runs on the GPUs of one node or, without one, on the CPU; see the README.
"""

from . import reference
from .errors import (EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, EpTimeout, HeapExhausted, PeerDied,
                     PeerError)
from .gemm import grouped_gemm
from .heap import SymmetricHeap
from .layer import EPAll2AllLayer, EPLayout
from .moe import EPMoE
from .world import World, thread_worlds
from . import ops  # noqa: F401  (registers torch.ops.epmoe)

__version__ = "0.1.0"
__all__ = ["EPAll2AllLayer", "EPLayout", "EPMoE", "EpClosed", "EpError", "EpIndexError", "EpMismatch", "EpOverflow", "EpTimeout",
           "HeapExhausted", "PeerDied", "PeerError", "SymmetricHeap", "World", "grouped_gemm",
           "reference", "thread_worlds"]
