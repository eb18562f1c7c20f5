"""epmoe: expert-parallel Mixture-of-Experts on one NVLink node, in C and CUDA C.

    EPMoE              the experts of a Mixture-of-Experts layer, spread over the ranks
    EPAll2AllLayer     plan, dispatch and combine
    EpAll2AllFusedOp   the same, with the experts' GEMMs in the same kernels
    LowLatencyAll2All  dispatch and combine of few tokens, for decoding
    EPLayout           the plan of a dispatch: where its rows are
    SymmetricHeap      memory that every rank can access on every other rank
    ExpertMap          which physical experts hold each expert; balance_experts makes one
    World              the ranks that take part
    Nodes              the ranks of several nodes
    thread_worlds      ranks that are threads of one process, for tests
    prepare_ddp        DistributedDataParallel, with experts; also prepare_fsdp for FSDP2, expert_parameters,
                       clip_grad_norm_ and whole_state_dict
    grouped_gemm       rows grouped by expert times each expert's own weights
    quantize_fp8       rows, or their activations, in FP8 with a scale for each 128 numbers;
                       quantize_fp8_weight for weights
    SwiGLU, GptOss     gates with other numbers
    reference          the oracle, in plain PyTorch
    include_dir        the folder of the header for device code

Everything runs on the GPUs of one node, or on the CPU; layers can span several nodes.  See the README.
"""

from . import reference
from .activations import GptOss, SwiGLU
from .device import include_dir
from .errors import (EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, EpTimeout, HeapExhausted,
                     PeerDied,
                     PeerError)
from .expert_map import ExpertMap, balance_experts
from .fp8 import quantize_fp8, quantize_fp8_weight
from .fused import EpAll2AllFusedOp
from .gemm import grouped_gemm
from .heap import SymmetricHeap
from .layer import EPAll2AllLayer
from .layout import EPLayout
from .low_latency import LowLatencyAll2All, LowLatencyHandle, PendingCall
from .moe import EPMoE
from .nodes import Nodes, fused as _  # fused: the layers over several nodes
from .parallel import clip_grad_norm_, expert_parameters, prepare_ddp, prepare_fsdp, whole_state_dict
from .world import World, thread_worlds
from .flops import install as _count_flops

_count_flops()
__version__ = "0.1.0"
__all__ = ["EPAll2AllLayer", "EPLayout", "EPMoE", "EpAll2AllFusedOp", "EpClosed", "EpError", "EpIndexError",
           "EpMismatch", "EpOverflow", "EpTimeout", "ExpertMap", "GptOss", "HeapExhausted",
           "LowLatencyAll2All", "LowLatencyHandle", "Nodes", "PeerDied", "PeerError", "PendingCall",
           "SwiGLU", "SymmetricHeap", "World", "balance_experts", "clip_grad_norm_", "expert_parameters",
           "grouped_gemm", "include_dir", "prepare_ddp", "prepare_fsdp", "quantize_fp8",
           "quantize_fp8_weight", "reference", "thread_worlds", "whole_state_dict"]
