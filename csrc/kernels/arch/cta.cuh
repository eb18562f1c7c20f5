/* cta.cuh - what the CTAs of all operations have in common: enter, leave, and poisoning after a failure.
 *
 * Exports ep_cta_enter, ep_cta_leave, ep_cta_fill, and the addresses of slots and choices in staging buffers.
 * Invariant: all threads of a CTA get the same verdict, and every CTA leaves exactly once. */
#ifndef EP_CTA_CUH
#define EP_CTA_CUH
#include "kernels/arch/ptx.cuh"
#include "kernels/arch/resident.cuh"
#include "protocol/plan.h"
#include "protocol/queue.h"

#ifndef EP_WARPS
#define EP_WARPS 16u /* warps of a CTA of plan, dispatch and combine */
#endif
#define EP_FULL 0xffffffffu

/* CTA 0 enters for the rank. One warp of every CTA waits for all ranks and compares their headers. All
 * threads get the verdict; after it they may write to peers. */
EP_FN bool ep_cta_enter(const EpComm *c, uint32_t op, const int32_t *plan, const int32_t *recv,
                        uint32_t num_tokens, uint32_t num_rows, uint32_t has_weight, uint32_t has_scalar,
                        uint64_t epoch) {
    __shared__ int ok;
    EpWaits waits;
    if (threadIdx.x < 32) {
        if (blockIdx.x == 0) {
            EpHeader h = ep_make_header(c, op, plan, recv, num_tokens, num_rows);
            h.has_weight = has_weight;
            h.has_scalar = has_scalar;
            ep_enter(c, &h, epoch);
        }
        const bool verdict = ep_enter_await(c, op, epoch, blockIdx.x == 0, &waits);
        if (threadIdx.x == 0) ok = verdict;
    }
    __syncthreads();
    if (ok && blockIdx.x == 0 && threadIdx.x < 32) ep_count_waits(c, &waits); /* the other warps go on */
    return ok;
}

/* One thread of every CTA leaves the operation for its CTA. All threads get the result. */
EP_FN EpLeft ep_cta_leave(const EpComm *c, uint64_t epoch) {
    __shared__ int left;
    __syncthreads();
    if (threadIdx.x == 0) left = ep_leave(c, gridDim.x, epoch);
    __syncthreads();
    return (EpLeft)left;
}

/* All threads of the CTA fill num_bytes with a 32-bit pattern. Address and size are multiples of 4. */
EP_FN void ep_cta_fill(void *at, uint64_t num_bytes, uint32_t pattern) {
    if (!at) return;
    for (uint64_t i = threadIdx.x; i < num_bytes / 4; i += blockDim.x) ((uint32_t *)at)[i] = pattern;
}
#define EP_NAN_WORD 0xffffffffu
#define EP_NO_ROW 0xffffffffu /* -1: no row was received */

#endif /* EP_CTA_CUH */
