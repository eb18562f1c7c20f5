/* test_sharing.c - ranks that share a GPU: permission, the sum of the heaps, and the SMs of each rank. */
#include "harness.h"
#include "runtime/error.h"
#include "runtime/sharing.h"

#define H200_SMS 132u

/* Place rank r on GPU r % num_gpus. Each GPU has free_bytes. */
static void place(EpHeapDevice devices[], uint32_t num_ranks, uint32_t num_gpus, uint64_t free_bytes,
                  bool may_share) {
    memset(devices, 0, EP_MAX_RANKS * sizeof devices[0]);
    for (uint32_t r = 0; r < num_ranks; r++) {
        devices[r].device_id[15] = (unsigned char)(1 + r % num_gpus);
        devices[r].free_bytes = free_bytes;
        devices[r].num_sms = H200_SMS;
        devices[r].may_share = may_share;
    }
}

bool test_sharing_needs_permission(void) {
    EpHeapDevice devices[EP_MAX_RANKS];
    Rank *me = NULL;
    place(devices, 4, 4, 1000, false);
    CHECK(me, ep_sharing_check(devices, 4, 500, false) == 0);
    place(devices, 4, 2, 1000, false);
    CHECK(me, ep_sharing_check(devices, 4, 500, false) == EP_EINVAL);
    CHECK(me, strstr(ep_error_text(), "rank 0") && strstr(ep_error_text(), "EPMOE_SHARE_GPU=1"));
    CHECK(me, ep_sharing_check(devices, 4, 500, true) == 0); /* threads of one process need no setting */
    place(devices, 4, 2, 1000, true);
    CHECK(me, ep_sharing_check(devices, 4, 500, false) == 0);
    /* One rank without the setting is enough for an error, which names this rank. */
    devices[3].may_share = 0;
    CHECK(me, ep_sharing_check(devices, 4, 500, false) == EP_EINVAL && strstr(ep_error_text(), "rank 3"));
    return true;
}

bool test_sharing_counts_memory(void) {
    EpHeapDevice devices[EP_MAX_RANKS];
    Rank *me = NULL;
    place(devices, 4, 1, 1000, true);
    CHECK(me, ep_sharing_check(devices, 4, 250, false) == 0);
    CHECK(me, ep_sharing_check(devices, 4, 251, false) == EP_ENOMEM);
    CHECK(me, strstr(ep_error_text(), "4 heaps of 251 bytes") &&
                  strstr(ep_error_text(), "needed 1004, available 1000"));
    /* Ranks read the free memory at different times. The smallest value counts. */
    devices[2].free_bytes = 900;
    CHECK(me, ep_sharing_check(devices, 4, 250, false) == EP_ENOMEM);
    /* There is no limit for a rank that shares its GPU with no other rank. */
    place(devices, 4, 4, 100, true);
    CHECK(me, ep_sharing_check(devices, 4, 1ull << 40, false) == 0);
    /* CPU ranks share the memory of the machine. The limit holds for one rank too. */
    memset(devices, 0, sizeof devices);
    for (uint32_t r = 0; r < 4; r++) {
        devices[r].free_bytes = 1000;
        devices[r].may_share = 1;
    }
    CHECK(me, ep_sharing_check(devices, 1, 1000, false) == 0 &&
                  ep_sharing_check(devices, 1, 1001, false) == EP_ENOMEM);
    CHECK(me, ep_sharing_check(devices, 4, 251, false) == EP_ENOMEM);
    return true;
}

bool test_sharing_divides_sms(void) {
    EpHeapDevice devices[EP_MAX_RANKS];
    Rank *me = NULL;
    for (uint32_t num_ranks = 1; num_ranks <= EP_MAX_RANKS; num_ranks++) {
        uint32_t used = 0;
        place(devices, num_ranks, 1, 1000, true);
        for (uint32_t r = 0; r < num_ranks; r++) {
            const uint32_t mine = H200_SMS - ep_sharing_reserved_sms(devices, num_ranks, r);
            CHECK(me, num_ranks == 1 ? mine == H200_SMS : mine >= 2 && mine % 2 == 0);
            used += mine;
        }
        CHECK(me, num_ranks == 1 || used <= H200_SMS - H200_SMS / 16);
        CHECK(me, used > H200_SMS * 3 / 4); /* few SMs are idle */
    }
    place(devices, 4, 2, 1000, true); /* two ranks on each of two GPUs */
    CHECK(me, ep_sharing_reserved_sms(devices, 4, 3) == H200_SMS - 62);
    place(devices, 2, 1, 1000, true);
    devices[0].num_sms = 2; /* Each rank has at least two SMs, also on a small GPU. */
    devices[1].num_sms = 2;
    CHECK(me, ep_sharing_reserved_sms(devices, 2, 0) == 0);
    memset(devices, 0, sizeof devices);
    CHECK(me, ep_sharing_reserved_sms(devices, 4, 0) == 0);
    return true;
}
