/* fused_shared.cuh - what the megakernels have in common: registers, and words in shared memory. */
#ifndef EP_FUSED_SHARED_CUH
#define EP_FUSED_SHARED_CUH
#include "kernels/gemm/gemm_hopper.cuh"
#include "protocol/params.h"

/* Registers of a thread of the producer's warpgroup, and of an MMA thread. Together they use all registers
 * of a CTA. */
#ifndef EP_FUSED_COMM_REGS
#define EP_FUSED_COMM_REGS 88
#define EP_FUSED_MMA_REGS 208
#endif

/* Registers of the kernels of FP8: an MMA thread has more accumulators. */
#ifndef EP_FUSED_FP8_COMM_REGS
#define EP_FUSED_FP8_COMM_REGS 56
#define EP_FUSED_FP8_MMA_REGS 224
#endif

/* The epoch of the operation. It is reloaded from shared memory at each use, to save a register. */
static __shared__ uint64_t ep_shared_epoch;
static __shared__ uint32_t ep_shared_ok; /* whether all ranks have entered the operation */
struct EpSharedEpoch {
    __device__ operator uint64_t() const { return ep_ld_shared_u64(ep_smem(&ep_shared_epoch)); }
};

/* This warp's queue of cells in shared memory, if warp `first` has the first one. */
template <typename F> EP_FN uint32_t fifo_at(uint32_t smem, uint32_t first) {
    return smem + (threadIdx.x / 32 - first) * F::BYTES;
}

#endif /* EP_FUSED_SHARED_CUH */
