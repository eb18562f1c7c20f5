/* sharing.h - ranks that share a device: whether they may, whether there is memory for all of them, and how
 * many SMs each of them uses. Exports: ep_sharing_check and ep_sharing_reserved_sms.
 * Invariant: every rank calls these functions with the same EpHeapDevice of all ranks. So the result of the
 * check is the same on all ranks. */
#ifndef EP_SHARING_H
#define EP_SHARING_H
#include "backend.h"

/* Check that each rank can create a heap of num_bytes.
 *   EP_EINVAL: ranks that are processes share a GPU, and one of them has not set EPMOE_SHARE_GPU.
 *   EP_ENOMEM: a device does not have enough free memory for the heaps of all its ranks.
 * A GPU with only one rank is not checked, because its own allocation error says more precisely what is
 * missing. */
int ep_sharing_check(const EpHeapDevice devices[], uint32_t num_ranks, uint64_t num_bytes, bool are_threads);
/* The number of SMs that my_rank leaves to the other ranks on its GPU. 0 if it is the only rank on the GPU,
 * and on the CPU. */
uint32_t ep_sharing_reserved_sms(const EpHeapDevice devices[], uint32_t num_ranks, uint32_t my_rank);

#endif /* EP_SHARING_H */
