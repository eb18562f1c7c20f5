/* sharing.c - checks and computes how ranks share a device; see sharing.h. */
#include "runtime/sharing.h"

#include <string.h>

#include "runtime/error.h"

/* The number of ranks on rank r's device, rank r included. */
static uint32_t count_sharing(const EpHeapDevice devices[], uint32_t num_ranks, uint32_t r) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < num_ranks; i++)
        if (memcmp(devices[i].device_id, devices[r].device_id, sizeof devices[r].device_id) == 0) n++;
    return n;
}

int ep_sharing_check(const EpHeapDevice devices[], uint32_t num_ranks, uint64_t num_bytes, bool are_threads) {
    for (uint32_t r = 0; r < num_ranks; r++) {
        const EpHeapDevice *device = &devices[r];
        const uint32_t n = count_sharing(devices, num_ranks, r);
        if (n == 1 && device->num_sms > 0) continue;
        if (n > 1 && !device->may_share && !are_threads)
            return ep_error(
                EP_EINVAL,
                "rank %u shares its GPU with %u other rank%s. Give each rank its own GPU "
                "(torch.cuda.set_device(local_rank)), or "
                "set EPMOE_SHARE_GPU=1 on all ranks (for development and tests: correct, but slow)",
                r, n - 1, n == 2 ? "" : "s");
        if (num_bytes > device->free_bytes / n)
            return ep_error(EP_ENOMEM, "no room for %u heaps of %llu bytes each: needed %llu, available %llu",
                            n, (unsigned long long)num_bytes, (unsigned long long)num_bytes * n,
                            (unsigned long long)device->free_bytes);
    }
    return 0;
}

/* Operations of ranks that share a GPU wait for each other. To avoid a deadlock, the CTAs of all these ranks
 * must be resident at once. So together the ranks use no more CTAs than the GPU has SMs.
 * A sixteenth of the SMs is given to no rank. The reason: a cluster of two CTAs needs two SMs of one GPC, and
 * single CTAs of another rank may leave one unusable SM in each GPC. */
uint32_t ep_sharing_reserved_sms(const EpHeapDevice devices[], uint32_t num_ranks, uint32_t my_rank) {
    const uint32_t n = count_sharing(devices, num_ranks, my_rank);
    const uint32_t num_sms = devices[my_rank].num_sms;
    if (n == 1 || num_sms == 0) return 0;
    const uint32_t pairs = (num_sms - num_sms / 16) / n / 2;
    return num_sms - (pairs > 0 ? 2 * pairs : 2);
}
