"""epmoe: expert-parallel Mixture-of-Experts on one NVLink node, in C and CUDA C.

    EPMoE              the experts of a Mixture-of-Experts layer, spread over the ranks
    EPAll2AllLayer     plan, dispatch and combine
    EpAll2AllFusedOp   the same, with the experts' GEMMs in the same kernels
    LowLatencyAll2All  dispatch and combine of few tokens, for decoding
    EPLayout           the plan of a dispatch: where its rows are
    SymmetricHeap      memory that every rank can access on every other rank
    ExpertMap          which physical experts hold each expert; balance_experts makes one
    Balance            how ranks with few rows help the others
    World              the ranks that take part
    Nodes              the ranks of several nodes
    thread_worlds      ranks that are threads of one process, for tests
    prepare_ddp        DistributedDataParallel, with experts; also prepare_fsdp for FSDP2, expert_parameters,
                       clip_grad_norm_ and whole_state_dict
    grouped_gemm       rows grouped by expert times each expert's own weights
    quantize_fp8       rows, or their activations, in FP8 with a scale for each 128 numbers;
                       quantize_fp8_weight for weights
    quantize_mxfp4     weights in MXFP4, and quantize_int4 in INT4, whose format is an Int4
    SwiGLU, GptOss     gates with other numbers
    numerics           what the bits of a module's results depend on
    reference          the oracle, in plain PyTorch
    include_dir        the folder of the header for device code

Everything runs on the GPUs of one node, or on the CPU; layers can span several nodes.  See the README.
"""

from . import reference
from .a2a.fused import EpAll2AllFusedOp
from .a2a.internode import layer as _  # the layers over several nodes
from .a2a.layer import EPAll2AllLayer
from .a2a.layout import EPLayout
from .a2a.low_latency import LowLatencyAll2All, LowLatencyHandle, PendingCall
from .comm.device import include_dir
from .comm.heap import SymmetricHeap
from .comm.nodes import Nodes
from .comm.world import World, thread_worlds
from .errors import (EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, EpTimeout, HeapExhausted,
                     PeerDied, PeerError)
from .flops import install as _count_flops
from .gemm.activations import GptOss, SwiGLU
from .gemm.four_bit import Int4, quantize_int4, quantize_mxfp4
from .gemm.grouped import grouped_gemm
from .gemm.quantize import quantize_fp8, quantize_fp8_weight
from .moe.balance import Balance
from .moe.module import EPMoE
from .moe.numerics import numerics
from .moe.parallel import clip_grad_norm_, expert_parameters, prepare_ddp, prepare_fsdp, whole_state_dict
from .moe.placement import ExpertMap, balance_experts

_count_flops()
__version__ = "0.1.0"
__all__ = ["Balance", "EPAll2AllLayer", "EPLayout", "EPMoE", "EpAll2AllFusedOp", "EpClosed", "EpError",
           "EpIndexError", "EpMismatch", "EpOverflow", "EpTimeout", "ExpertMap", "GptOss", "HeapExhausted",
           "Int4", "LowLatencyAll2All", "LowLatencyHandle", "Nodes", "PeerDied", "PeerError", "PendingCall",
           "SwiGLU", "SymmetricHeap", "World", "balance_experts", "clip_grad_norm_", "expert_parameters",
           "grouped_gemm", "include_dir", "numerics", "prepare_ddp", "prepare_fsdp", "quantize_fp8",
           "quantize_fp8_weight", "quantize_int4", "quantize_mxfp4", "reference", "thread_worlds",
           "whole_state_dict"]
