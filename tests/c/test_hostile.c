/* test_hostile.c - memory safety: tensors that are too small, peers that write random data into a heap,
 * and peers whose heap memory must not be mapped. */
#include <fcntl.h>
#include <sys/mman.h>

#include "backend.h"
#include "cpu/ops.h"
#include "harness.h"

/* On one rank, the tensor of rows has fewer rows than the plan, or the plan belongs to another number of
 * tokens (and has the same length). Then the calls fail on all ranks, the library writes nothing outside
 * of the tensors, and the next step works. After a failed dispatch, combine fails on all ranks too. */
static bool calls_fail(Step *st, uint32_t bad_rank) {
    const int code = st->me->rank == bad_rank ? EP_EINVAL : EP_EPEER;
    CHECK_CODE(st->me, code, call_combine(st));
    CHECK_CODE(st->me, code, call_dispatch(st));
    CHECK_CODE(st->me, st->me->rank == 0 ? EP_EINVAL : EP_EPEER, call_combine(st));
    return true;
}
static bool too_few_rows_body(Rank *me, void *arg) {
    const Case *c = (const Case *)arg;
    Step st = step_open(me, c, 0);
    uint64_t words, fewer_words;
    CHECK_CODE(me, 0, call_plan(&st));
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t bad_rank = i < 2 ? 1 : 0; /* the rank with the wrong argument */
        CHECK_CODE(me, 0, call_dispatch(&st));
        if (me->rank == bad_rank) st.num_rows = i % 2 ? 0 : c->num_rows[bad_rank] - 1;
        TRY(calls_fail(&st, bad_rank));
        st.num_rows = c->num_rows[me->rank] + c->slack;
        CHECK_CODE(me, me->rank == 0 ? EP_EINVAL : EP_EPEER, call_combine(&st));
    }
    CHECK_CODE(me, 0, ep_layer_plan_words(me->layer, st.num_tokens, &words));
    CHECK_CODE(me, 0, ep_layer_plan_words(me->layer, st.num_tokens - 1, &fewer_words));
    CHECK(me, words == fewer_words);
    CHECK_CODE(me, 0, call_dispatch(&st));
    st.num_tokens -= me->rank == 1;
    TRY(calls_fail(&st, 1));
    CHECK(me,
          me->rank != 0 || strstr(ep_error_text(), "cannot use this layout: its plan or dispatch failed"));
    step_close(&st);
    return run_step(me, c, 0);
}
bool test_too_few_rows(void) {
    for (uint32_t mode = 0; mode < 3; mode++) {
        EpLayerConfig config = small_config(2);
        config.shape.combine_mode = mode;
        TRY(with_cases(too_few_rows_body, config, false, 1));
    }
    return true;
}

/* Rank 1 writes a slot into the memory of rank 0, which receives it with this plan. */
static void receive_slot(EpDispatchParams *p, int32_t *plan, const int32_t *trailer, uint64_t epoch) {
    EpComm peer = p->comm;
    const EpHeader header = ep_make_header(&p->comm, EP_OP_DISPATCH, plan, NULL, 0, p->num_rows);
    peer.my_rank = 1;
    ep_enter(&peer, &header, epoch);
    memset(ep_slot_at(&peer, 0, 1, 0), 1, peer.layout.row_bytes);
    memcpy(ep_slot_at(&peer, 0, 1, 0) + peer.layout.row_bytes, trailer, 4ull * ep_trailer_weights(1));
    ep_flag_publish(&peer, 0, 0, epoch);
    ep_cpu_dispatch(p, &(EpScales){0}, 0, 1);
}
/* A slot of a peer names a token or a return slot that does not exist. The receiver keeps the number 0
 * instead, so combine still returns the row, and writes nothing outside of the buffers. */
bool test_wrong_slot_of_peer(void) {
    static const int32_t numbers[] = {0, 1, 2, -1, INT32_MAX, INT32_MIN};
    static EpHostWords host;
    const uint32_t num = sizeof numbers / sizeof *numbers;
    for (uint32_t i = 0; i < 2 * num * num; i++) {
        const uint32_t max_tokens = 1 + i % 2;
        const int32_t token = numbers[i / 2 % num], slot = numbers[i / 2 / num];
        const EpShape s = {2, 2, 1, max_tokens, 4, EP_F32, EP_COMBINE_SCATTER, 1};
        const int32_t trailer[] = {token, slot, INT32_MIN, 0}; /* the third is a tag */
        int32_t plan[512] = {[EP_HEAD_NUM_ROWS] = 1, [EP_HEAD_NUM_RECV + 1] = 1}, recv[8];
        float rows[4];
        EpDispatchParams p = {.comm = {.shape = s, .layout = ep_comm_layout(&s), .host = &host},
                              .layout = ep_plan_layout(&s, 0),
                              .plan = plan,
                              .recv = recv,
                              .rows = rows,
                              .num_rows = 1};
        CHECK(NULL, p.layout.num_words <= 512 && ep_recv_words(&s) <= 8);
        for (uint32_t r = 0; r < 2; r++) {
            p.comm.base[r] = (unsigned char *)alloc_exact(p.comm.layout.num_bytes);
            memset(p.comm.base[r], 0, p.comm.layout.num_bytes);
        }
        memset(recv, 0x5a, sizeof recv);
        receive_slot(&p, plan, trailer, 1);
        const uint32_t saved_token = (uint32_t)token < max_tokens ? (uint32_t)token : 0,
                       saved_slot = (uint32_t)slot < max_tokens ? (uint32_t)slot : 0;
        const int32_t *record = recv + ep_record_at(&s, 1, saved_slot);
        CHECK(NULL, record[EP_RECORD_TOKEN] == (int32_t)saved_token && record[EP_RECORD_ROWS] == 0);
        CHECK(NULL, all_bytes_are(rows, sizeof rows, 1) && host.fault.code == 0);
        for (uint32_t r = 0; r < 2; r++) free(p.comm.base[r]);
    }
    return true;
}

/* A hostile peer is a thread that overwrites the words that peers write, with random and with plausible
 * numbers. Results may be wrong, and calls may fail. But the library writes no byte outside of the tensors
 * and the communication buffers, and no call takes much longer than its timeout. */
typedef enum {
    ATTACK_STAGE,
    ATTACK_COUNTS,
    ATTACK_FLAGS,
    ATTACK_ENTER,
    ATTACK_HEADER,
    ATTACK_FLICKER,
    ATTACK_TOKENS,
    ATTACK_ALL,
    NUM_ATTACKS
} Attack;
typedef struct {
    Attack attack;
    uint64_t seed;
    const Case *cases;
    _Atomic bool over;
    uint64_t num_words; /* that the peer has overwritten */
    unsigned char *victims[EP_MAX_RANKS];
    uint32_t num_ranks;
    EpCommLayout layout;
    EpShape shape;
} Hostile;

static void overwrite_word(const Hostile *h, unsigned char *victim, Attack attack, Rng *rng) {
    const EpCommLayout *l = &h->layout;
    const uint64_t begin[] = {l->stage_off, l->counts_off, l->flag_off, l->enter_off, l->header_off};
    const uint64_t end[] = {l->num_bytes, l->flag_off, l->local_off, l->header_off, l->counts_off};
    uint64_t value = rng_next(rng),
             epoch = ep_ld_relaxed_gpu_u64((const uint64_t *)(victim + l->local_off)) + rng_below(rng, 3);
    EpHeader *headers = (EpHeader *)(victim + l->header_off) + rng_below(rng, 2) * h->num_ranks;
    uint32_t a = rng_below(rng, h->num_ranks), b = rng_below(rng, h->num_ranks), small = rng_below(rng, 64),
             field = rng_below(rng, 13);
    if (attack == ATTACK_FLICKER) { /* A word of a header changes while the rank compares the header. */
        uint32_t *word = &headers[a].abi + field, right = __atomic_load_n(word, __ATOMIC_RELAXED);
        for (uint32_t i = 0; i < 64; i++) __atomic_store_n(word, i % 2 ? right : right - 1, __ATOMIC_RELAXED);
        return;
    }
    /* The token counts of two peers are wrong, but their sum is often right. */
    if (attack == ATTACK_TOKENS) {
        if (rng_below(rng, 2)) small = (uint32_t)value;
        __atomic_store_n(&headers[a].num_tokens, h->shape.max_tokens + small, __ATOMIC_RELAXED);
        __atomic_store_n(&headers[b].num_tokens, h->shape.max_tokens - small, __ATOMIC_RELAXED);
        return;
    }
    if (attack == ATTACK_COUNTS && value % 4) value = epoch << 32 | (value % 8 < 4 ? small : (uint32_t)value);
    if ((attack == ATTACK_ENTER || attack == ATTACK_FLAGS) && value % 2) value = epoch;
    /* Plausible numbers of tokens and rows, as in a trailer. */
    if (attack == ATTACK_STAGE && value % 2) value = (uint64_t)small * 4 << 32 | rng_below(rng, 200);
    uint64_t at = begin[attack] + rng_next(rng) % (end[attack] - begin[attack]);
    __atomic_store_n((uint64_t *)(victim + at / 8 * 8), value, __ATOMIC_RELAXED);
}

static void *hostile_main(void *arg) {
    Hostile *h = (Hostile *)arg;
    Rng rng = {h->seed};
    for (; !atomic_load(&h->over); h->num_words++) {
        Attack attack = h->attack == ATTACK_ALL ? (Attack)rng_below(&rng, ATTACK_ALL) : h->attack;
        overwrite_word(h, h->victims[rng_below(&rng, h->num_ranks)], attack, &rng);
        /* With pauses, some calls succeed. So the attack also reaches the stages after them. */
        if (rng_below(&rng, 64) == 0) usleep(rng_below(&rng, 60));
    }
    return NULL;
}

static bool hostile_steps(Rank *me, const Hostile *h) {
    /* The number of steps or this time ends the loop. */
    const double limit_s = 0.1 + 0.005 * (test_scale < 100 ? test_scale : 100);
    const double until = seconds_now() + limit_s * slowness();
    CHECK_CODE(me, 0, ep_world_set_timeout(me->world, 0.15));
    for (uint32_t i = 0; i < scaled(400) && seconds_now() < until && ep_world_check(me->world) == 0; i++) {
        Step st = step_open(me, &h->cases[i % NUM_ROUTES], 0);
        for (uint32_t op = EP_OP_PLAN; op <= EP_OP_COMBINE; op++) {
            double start = seconds_now();
            int code = call_op(&st, op);
            CHECK(me, code <= 0 && code >= EP_ECORRUPT);
            CHECK(me, is_within(start, 6));
            if (code) break;
        }
        step_close(&st);
    }
    return true;
}

static bool hostile_body(Rank *me, void *arg) {
    Hostile *h = (Hostile *)arg;
    const EpLayerConfig *config = &me->setup->config;
    uint64_t probe, rest;
    void *at, *guard;
    pthread_t thread;
    EpHeapStats s;
    /* The offset of the layer in the heap is not public. An allocation of the same size has the same
     * offset. */
    CHECK_CODE(me, 0, alloc_heap(me, h->layout.num_bytes, &probe));
    CHECK_CODE(me, 0, ep_heap_free(me->heap, probe));
    CHECK_CODE(me, 0, ep_layer_create(me->heap, config, &me->layer));
    ep_heap_stats(me->heap, &s);
    /* The rest of the heap is a guard after the layer. Its bytes must not change. */
    CHECK_CODE(me, 0, alloc_heap(me, s.largest_free_bytes, &rest));
    CHECK_CODE(me, 0, ep_heap_translate(me->heap, rest, me->rank, &guard));
    memset(guard, 0xee, s.largest_free_bytes);
    ASAN_POISON_MEMORY_REGION(guard, s.largest_free_bytes);
    if (me->rank == 0) {
        for (uint32_t r = 0; r < h->num_ranks; r++) {
            CHECK_CODE(me, 0, ep_heap_translate(me->heap, probe, r, &at));
            h->victims[r] = (unsigned char *)at;
        }
        if (pthread_create(&thread, NULL, hostile_main, h)) abort();
    }
    bool ok = hostile_steps(me, h);
    if (me->rank == 0) {
        atomic_store(&h->over, true);
        pthread_join(thread, NULL);
    }
    ASAN_UNPOISON_MEMORY_REGION(guard, s.largest_free_bytes);
    CHECK(me, all_bytes_are(guard, s.largest_free_bytes, 0xee));
    return ok;
}

bool test_hostile_peer(void) {
    uint64_t num_words = 0;
    for (uint32_t i = 0; i < 3 * NUM_ATTACKS; i++) {
        uint32_t num_ranks = 1 + i % 3;
        Hostile h = {.attack = (Attack)(i / 3), .seed = test_seed + i, .num_ranks = num_ranks};
        Case cases[NUM_ROUTES];
        Rng rng = {test_seed + i};
        EpLayerConfig config = small_config(num_ranks);
        config.shape.combine_mode = (i + i / 3) % 3;
        config.shape.max_tokens = 6;
        for (uint32_t j = 0; j < NUM_ROUTES; j++)
            case_make(&cases[j], &config.shape, &rng, h.attack == ATTACK_TOKENS ? ROUTE_FULL : (Route)j,
                      h.attack == ATTACK_TOKENS ? WITH_SCATTER : 0);
        config.shape.capacity = most_rows(cases, NUM_ROUTES) + i % 2;
        h.cases = cases;
        h.shape = config.shape;
        h.layout = ep_comm_layout(&config.shape);
        Setup setup = {.num_ranks = num_ranks,
                       .config = config,
                       .heap_bytes = 64 << 10,
                       .world_ends = true,
                       .own_layer = true};
        bool ok = run_team(&setup, hostile_body, &h);
        for (uint32_t j = 0; j < NUM_ROUTES; j++) case_free(&cases[j]);
        TRY(ok);
        num_words += h.num_words;
    }
    printf("    overwrote %llu words\n", (unsigned long long)num_words);
    return true;
}

/* The CPU backend does not map memory that a peer could truncate, or that is shorter than the peer's heap
 * handle says. */
bool test_import_rejects_unsafe_memory(void) {
    Rank *me = NULL;
    const EpHeapHandle heap_handle = {.num_bytes = 1 << 16};
    const int seals[] = {0, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL};
    for (uint32_t i = 0; i < 4; i++) {
        const bool is_sealed = i & 1, is_whole = i & 2;
        void *memory = NULL;
        int fd = memfd_create("epmoe-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(me, fd >= 0 && ftruncate(fd, is_whole ? 1 << 16 : 1 << 15) == 0 &&
                      fcntl(fd, F_ADD_SEALS, seals[is_sealed]) == 0);
        CHECK_CODE(me, is_sealed && is_whole ? 0 : EP_ECORRUPT,
                   ep_cpu_backend.heap_import(-1, &heap_handle, &heap_handle, fd, &memory));
        CHECK(me, fcntl(fd, F_GETFD) < 0); /* heap_import closes fd in every case */
        if (memory) ep_cpu_backend.heap_unimport(-1, memory, heap_handle.num_bytes);
    }
    /* A file on a disk can have no seals. */
    void *memory = NULL;
    char name[] = "/tmp/epmoe-test-XXXXXX";
    const int fd = mkstemp(name);
    CHECK(me, fd >= 0 && unlink(name) == 0 && ftruncate(fd, 1 << 16) == 0);
    if (fcntl(fd, F_GET_SEALS) < 0) {
        CHECK_CODE(me, EP_ECORRUPT, ep_cpu_backend.heap_import(-1, &heap_handle, &heap_handle, fd, &memory));
    } else {
        close(fd); /* here /tmp is in memory */
    }
    return true;
}
