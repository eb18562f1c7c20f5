/* sharing.h - ranks that share a device: may they, is there memory for all of them, and how many SMs does each use?
 *
 * Every rank gives these functions the same EpHeapRoom of all ranks, so every rank comes to the same verdict. */
#ifndef EP_SHARING_H
#define EP_SHARING_H
#include "backend.h"

/* 0; EP_EINVAL if processes share a GPU and one of them has not set EPMOE_SHARE_GPU; or EP_ENOMEM if a device that several
 * ranks share has no room for a heap of num_bytes for each of them.  A GPU that one rank has to itself is not judged: its
 * allocator says more precisely what is missing. */
int ep_sharing_check(const EpHeapRoom rooms[], uint32_t num_ranks, uint64_t num_bytes, bool are_threads);
/* SMs that rank my_rank leaves to other ranks on its GPU; 0 where it has the GPU to itself, and on the CPU. */
uint32_t ep_sharing_reserved_sms(const EpHeapRoom rooms[], uint32_t num_ranks, uint32_t my_rank);

#endif /* EP_SHARING_H */
