/* cpu/backend.c - the CPU backend: heap memory, worker threads, and the table ep_cpu_backend.
 *
 * A heap is an anonymous memory file (memfd). Its descriptor travels over a socket, so a killed process
 * leaves nothing behind. A worker is a thread; cpu/ops.h has what it runs. Exports
 * ep_cpu_backend and ep_backend.
 * Invariants: a heap's file is sealed, so no process can cut memory that a peer has mapped. A plan is
 * validated before its offsets are used. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "backend.h"
#include "cpu/ops.h"
#include "cpu/quantize.h"
#include "protocol/flags.h"
#include "runtime/error.h"
#include "runtime/interrupt.h"
#include "runtime/memory_limit.h"

#define MAX_WORKERS 64u
/* no process can shrink the memory that a peer has mapped */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* as on the GPU, so that an alignment means the same on both backends */
#define BASE_ALIGN (2ull << 20)

/* Map the file at an aligned address: reserve a larger range, map the file inside it, and unmap the rest. */
static int map_file(int fd, uint64_t num_bytes, void **memory) {
    uint64_t reserved = num_bytes + BASE_ALIGN;
    unsigned char *from =
        (unsigned char *)mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *memory = NULL;
    if (from != MAP_FAILED) {
        uint64_t before = ep_align_u64((uintptr_t)from, BASE_ALIGN) - (uintptr_t)from,
                 used = ep_align_u64(num_bytes, 4096);
        void *at = mmap(from + before, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
        if (at != MAP_FAILED) {
            if (before) munmap(from, before);
            if (reserved > before + used) munmap(from + before + used, reserved - before - used);
            *memory = at;
            return 0;
        }
        munmap(from, reserved);
    }
    return ep_error(EP_ENOMEM, "cannot map %llu bytes of shared memory: %s", (unsigned long long)num_bytes,
                    strerror(errno));
}

/* The system does not refuse a memory file that is too large. It kills a process when the memory is used.
 * So the heap's size is compared with the free memory first. */
static int heap_device(int device, EpHeapDevice *out) {
    (void)device;
    *out = (EpHeapDevice){.free_bytes = ep_free_bytes(""), .may_share = 1};
    return 0;
}

static int heap_open(int device, uint64_t num_bytes, void **memory, EpHeapHandle *heap_handle, int *fd_out) {
    (void)device;
    int code, fd = memfd_create("epmoe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return ep_error(EP_ESYS, "memfd_create: %s", strerror(errno));
    /* Allocate the memory now. So a machine without enough memory causes an error here, not a SIGBUS at
     * the first write. */
    /* Block all signals, because on some Linux kernels any signal interrupts the allocation and
     * discards its progress. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int e = ftruncate(fd, (off_t)num_bytes) ? errno : posix_fallocate(fd, 0, (off_t)num_bytes);
    for (int tries = 0; e == EINTR && tries < 100; tries++) e = posix_fallocate(fd, 0, (off_t)num_bytes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (e) {
        close(fd);
        return ep_error(EP_ENOMEM, "no room for a heap of %llu bytes: %s", (unsigned long long)num_bytes,
                        strerror(e));
    }
    code = fcntl(fd, F_ADD_SEALS, SEALS) ? ep_error(EP_ESYS, "F_ADD_SEALS: %s", strerror(errno))
                                         : map_file(fd, num_bytes, memory);
    if (code) {
        close(fd);
        return code;
    }
    heap_handle->num_bytes = num_bytes;
    *fd_out = fd;
    return 0;
}

static void heap_close(int device, void *memory, uint64_t num_bytes) {
    (void)device;
    munmap(memory, num_bytes);
}

static int heap_import(int device, const EpHeapHandle *mine, const EpHeapHandle *heap_handle, int fd,
                       void **memory) {
    struct stat st;
    int code;
    (void)device;
    if (fd < 0)
        return ep_error(EP_ESYS,
                        "no file descriptor came with it: raise the limit of open files (ulimit -n)");
    const int seals = fcntl(fd, F_GET_SEALS); /* -1: a file that can have none */
    if (fstat(fd, &st) || (uint64_t)st.st_size != heap_handle->num_bytes ||
        heap_handle->num_bytes != mine->num_bytes || seals < 0 || (seals & SEALS) != SEALS)
        code = ep_error(EP_ECORRUPT, "a peer sent a file that is not a heap of this world");
    else code = map_file(fd, heap_handle->num_bytes, memory);
    if (fd >= 0) close(fd);
    return code;
}

static int host_alloc(int device, uint64_t num_bytes, void **memory) {
    (void)device;
    *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *memory == MAP_FAILED ? ep_error(EP_ENOMEM, "cannot map a peer's heap (mmap): %s", strerror(errno))
                                 : 0;
}
static int copy(int device, void *dst, const void *src, uint64_t num_bytes, void *stream) {
    (void)device, (void)stream;
    memmove(dst, src, num_bytes);
    return 0;
}
static int zero(int device, void *dst, uint64_t num_bytes, void *stream) {
    (void)device, (void)stream;
    memset(dst, 0, num_bytes);
    return 0;
}
static int clear(int device, const EpComm *c, void *stream) {
    return zero(device, &ep_local(c)->faulted, sizeof(uint64_t), stream);
}
static int sync_stream(int device, void *stream, EpWorld *world) {
    (void)device, (void)stream, (void)world;
    return 0;
}
static int sync_all(int device) {
    (void)device;
    return 0;
}
static int preload(int device, bool is_shared) {
    (void)device, (void)is_shared;
    return 0;
}

/* ---- workers ---- */

/* A worker's part of an operation, with its parameters. */
typedef void Part(const void *params, uint32_t worker, uint32_t num_workers);
typedef struct {
    Part *part;
    const void *params;
    uint32_t worker, num_workers;
} Work;

static void *work(void *arg) {
    const Work *w = (const Work *)arg;
    ep_never_interrupt();
    w->part(w->params, w->worker, w->num_workers);
    return NULL;
}

/* Wait for a worker. If the calling thread is interrupted meanwhile, all workers leave their waits. */
static void join(pthread_t thread, const EpComm *comm) {
    struct timespec until;
    do {
        if (ep_interrupted()) ep_st_relaxed_sys_u64(&comm->host->abort, 1);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)EP_INTERRUPT_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
    } while (pthread_timedjoin_np(thread, NULL, &until) == ETIMEDOUT);
}

/* Run all workers of an operation. The calling thread is worker 0. If a thread cannot be created, the
 * calling thread runs that worker, too: first the first half of all its workers, then the second. This cannot
 * deadlock: a first half waits for nothing, or for peers only; a second half waits for first halves, also
 * for those of other workers of this rank. */
static int run_halves(Part *part, const EpComm *comm, const void *params, const void *const *halves,
                      uint32_t num_halves, uint32_t num_workers) {
    pthread_t threads[MAX_WORKERS];
    Work works[MAX_WORKERS];
    bool started[MAX_WORKERS] = {false};
    if (num_workers > MAX_WORKERS) num_workers = MAX_WORKERS;
    for (uint32_t i = 0; i < num_workers; i++) works[i] = (Work){part, params, i, num_workers};
    for (uint32_t i = 1; i < num_workers; i++)
        started[i] = pthread_create(&threads[i], NULL, work, &works[i]) == 0;
    for (uint32_t half = 0; half < num_halves; half++)
        for (uint32_t i = 0; i < num_workers; i++)
            if (!started[i]) part(halves[half], i, num_workers);
    for (uint32_t i = 1; i < num_workers; i++)
        if (started[i]) join(threads[i], comm);
    return 0;
}
/* Run all workers of an operation whose workers wait only for peers, never for each other. */
static int run(Part *part, const EpComm *comm, const void *params, uint32_t num_workers) {
    return run_halves(part, comm, params, &params, 1, num_workers);
}

typedef struct {
    const EpDispatchParams *p;
    const EpScales *scales;
} Dispatch;
static void dispatch_part(const void *params, uint32_t worker, uint32_t num_workers) {
    const Dispatch *d = (const Dispatch *)params;
    ep_cpu_dispatch(d->p, d->scales, worker, num_workers);
}
static void combine_part(const void *p, uint32_t worker, uint32_t num_workers) {
    ep_cpu_combine((const EpCombineParams *)p, worker, num_workers);
}
static void ll_dispatch_part(const void *p, uint32_t worker, uint32_t num_workers) {
    ep_cpu_ll_dispatch((const EpLlDispatchParams *)p, worker, num_workers);
}
static void ll_combine_part(const void *p, uint32_t worker, uint32_t num_workers) {
    ep_cpu_ll_combine((const EpLlCombineParams *)p, worker, num_workers);
}

/* A plan, the result of preprocess, is in a tensor that the caller's code may have overwritten. The plan has
 * indices of rows and of slots. The CPU backend checks that each index is in its range before it uses it. So
 * an overwritten plan never causes a store out of bounds. It may still send a token to a wrong row. */
static bool all_below(const int32_t *x, uint64_t n, int64_t low, int64_t end) {
    bool ok = true;
    for (uint64_t i = 0; i < n; i++) ok &= x[i] >= low && x[i] < end;
    return ok;
}
static bool is_sound(const EpShape *s, uint32_t me, const EpPlanLayout *l, const int32_t *plan) {
    uint32_t W = s->num_ranks, K = s->num_topk, L = ep_num_local_experts(s);
    uint64_t T = l->num_tokens;
    if (plan[EP_HEAD_STATUS] || plan[EP_HEAD_NUM_TOKENS] != (int32_t)T)
        /* The rank will propagate the error when it enters (ep_make_header), so it does not use the
         * rest of the plan. */
        return true;
    if (!all_below(plan + EP_HEAD_NUM_ROWS, 1, 0, 1ll + s->capacity) ||
        !all_below(plan + EP_HEAD_NUM_SEND, W, 0, (int64_t)T + 1) ||
        !all_below(plan + EP_HEAD_NUM_RECV, W, 0, 1ll + s->max_tokens) ||
        plan[EP_HEAD_NUM_RECV + me] != plan[EP_HEAD_NUM_SEND + me] ||
        !all_below(plan + l->token_expert_off, T * K, -1, s->num_experts) ||
        !all_below(plan + l->token_row_off, T * K, -1, s->capacity) ||
        !all_below(plan + l->token_slot_off, T * W, -1, s->max_tokens))
        return false;
    for (uint32_t r = 0; r < W; r++)
        if (!all_below(plan + l->send_token_off + r * T, (uint64_t)plan[EP_HEAD_NUM_SEND + r], 0, (int64_t)T))
            return false;
    for (uint64_t i = 0; i < T * K; i++) {
        int32_t e = plan[l->token_expert_off + i];
        if (e >= 0 &&
            (plan[l->token_row_off + i] < 0 || plan[l->token_slot_off + i / K * W + (uint32_t)e / L] < 0))
            return false;
    }
    return true;
}
static int propagate_bad_plan(const EpComm *c, uint32_t op) {
    EpComm comm = *c;
    comm.status = EP_EINVAL;
    ep_cpu_enter(&comm, op);
    return ep_error(
        EP_EINVAL,
        "the layout's plan was overwritten after preprocess made it: do not write to it, and make a new one");
}

static int plan(int device, const EpPlanParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_plan(p);
    return 0;
}
static int dispatch(int device, const EpDispatchParams *p, const EpScales *scales, uint32_t num_sm,
                    void *stream) {
    const Dispatch d = {p, scales};
    (void)device, (void)stream;
    return is_sound(&p->comm.shape, p->comm.my_rank, &p->layout, p->plan)
               ? run(dispatch_part, &p->comm, &d, num_sm)
               : propagate_bad_plan(&p->comm, EP_OP_WORD(EP_OP_DISPATCH, scales->dtype));
}
static int combine(int device, const EpCombineParams *p, uint32_t num_sm, void *stream) {
    (void)device, (void)stream;
    return is_sound(&p->comm.shape, p->comm.my_rank, &p->layout, p->plan)
               ? run(combine_part, &p->comm, p, num_sm)
               : propagate_bad_plan(&p->comm, EP_OP_COMBINE);
}
static int ll_dispatch(int device, const EpLlDispatchParams *p, uint32_t num_sm, void *stream) {
    (void)device, (void)stream;
    EpLlDispatchParams send = *p, receive = *p;
    const void *const halves[] = {&send, &receive};
    send.parts &= EP_LL_SEND;
    receive.parts &= EP_LL_RECEIVE;
    return run_halves(ll_dispatch_part, &p->comm, p, halves, 2, num_sm);
}
static int ll_combine(int device, const EpLlCombineParams *p, uint32_t num_sm, void *stream) {
    (void)device, (void)stream;
    EpLlCombineParams send = *p, receive = *p;
    const void *const halves[] = {&send, &receive};
    send.parts &= EP_LL_SEND;
    receive.parts &= EP_LL_RECEIVE;
    return run_halves(ll_combine_part, &p->comm, p, halves, 2, num_sm);
}
static int enter(int device, const EpComm *c, uint32_t op, void *stream) {
    (void)device, (void)stream;
    ep_cpu_enter(c, op);
    return 0;
}
static int signal_word(int device, uint64_t *word, uint64_t value, bool add, void *stream) {
    (void)device, (void)stream;
    ep_chaos(EP_CHAOS_SIGNAL);
    if (add) ep_add_release_sys_u64(word, value); /* publishes what this rank has put before */
    else ep_st_release_sys_u64(word, value);
    return 0;
}
static int wait_word(int device, const EpComm *c, const uint64_t *word, uint64_t value, bool exact,
                     void *stream) {
    const EpFaultRecord f = ep_fault_at(0, c->my_rank, EP_WORD_SIGNAL, 0);
    (void)device, (void)stream;
    ep_chaos(EP_CHAOS_SIGNAL);
    ep_wait_u64(c, word, exact ? EP_CMP_EQ : EP_CMP_GE, value,
                &f); /* what the word publishes is now readable */
    return 0;
}

static void keep_own_columns(const EpGemmParams *p, const EpOwnColumns *own) {
    const uint32_t num_cols = ep_gemm_num_cols(p), end = (uint32_t)p->offsets[p->num_experts];
    for (uint64_t row = (uint32_t)p->offsets[0]; row < p->num_rows && row < end; row++) {
        const uint32_t first = ep_first_own_column(own, row, num_cols);
        for (uint32_t col = 0; col < num_cols; col++)
            if (col - first >= own->of_adapter) ((uint16_t *)p->out)[row * num_cols + col] = 0;
    }
}
static int gemm(int device, const EpGemmParams *p, const EpGemmScales *scales, const EpFourBit *four_bit,
                const EpLowRank *low_rank, const EpOwnColumns *own, void *stream) {
    (void)device, (void)scales, (void)stream;
    EP_TRY(ep_cpu_gemm(p, four_bit, low_rank));
    if (own) keep_own_columns(p, own);
    return 0;
}
/* Let the other ranks know in operation op that this rank cannot take part. */
static int propagate(const EpComm *c, uint32_t op, int code) {
    EpComm comm = *c;
    comm.status = code;
    ep_cpu_enter(&comm, op);
    return code;
}
/* The fused operations: here their stages, one after the other, in the layer's dtype. */
static int dispatch_gemm(int device, const EpDispatchGemmParams *p, const EpScales *scales, void *stream) {
    float *memory; /* before the dispatch: nobody waits for this rank after it */
    int code = ep_cpu_gemm_memory(&p->gemm, NULL, &memory);
    if (code) return propagate(&p->dispatch.comm, EP_OP_DISPATCH_GEMM, code);
    code = dispatch(device, &p->dispatch, scales, p->num_move_blocks, stream);
    if (!code) ep_cpu_gemm_in(&p->gemm, NULL, NULL, memory);
    free(memory);
    return code;
}
static int gemm_combine(int device, const EpGemmCombineParams *p, const EpScales *scales, void *stream) {
    (void)scales;
    const int code = ep_cpu_gemm(&p->gemm, NULL, p->low.a ? &p->low : NULL);
    if (!code) return combine(device, &p->combine, p->num_move_blocks, stream);
    return propagate(&p->combine.comm, EP_OP_GEMM_COMBINE, code);
}
static int activation(int device, const EpActivationParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_activation(p);
    return 0;
}
static int move_choices(int device, const EpMoveChoicesParams *p, void *stream) {
    (void)device, (void)stream;
    for (uint64_t i = 0; i < p->num_choices; i++) p->indices[i] = ep_moved_choice(p, i);
    return 0;
}
static int map_choices(int device, const EpMapChoicesParams *p, void *stream) {
    (void)device, (void)stream;
    for (uint64_t i = 0; i < p->num_choices; i++) p->out[i] = ep_mapped_choice(p, i);
    return 0;
}
static int quantize(int device, const EpQuantizeParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_quantize_rows(p);
    return 0;
}
static int rescale(int device, const EpRescaleParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_rescale(p);
    return 0;
}
static int transpose(int device, const EpTransposeParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_transpose(p);
    return 0;
}
static int quantize_weight(int device, const EpQuantizeWeightParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_quantize_weight(p);
    return 0;
}
static int expand(int device, const EpExpandParams *p, void *stream) {
    (void)device, (void)stream;
    ep_cpu_expand(p);
    return 0;
}

const EpBackend ep_cpu_backend = {
    .heap_device = heap_device,
    .heap_open = heap_open,
    .heap_close = heap_close,
    .heap_import = heap_import,
    .heap_unimport = heap_close,
    .host_alloc = host_alloc,
    .host_free = heap_close,
    .copy = copy,
    .zero = zero,
    .sync = sync_stream,
    .sync_all = sync_all,
    .plan = plan,
    .dispatch = dispatch,
    .combine = combine,
    .ll_dispatch = ll_dispatch,
    .ll_combine = ll_combine,
    .enter = enter,
    .clear = clear,
    .signal = signal_word,
    .wait = wait_word,
    .gemm = gemm,
    .dispatch_gemm = dispatch_gemm,
    .gemm_combine = gemm_combine,
    .activation = activation,
    .move_choices = move_choices,
    .map_choices = map_choices,
    .quantize = quantize,
    .rescale = rescale,
    .transpose = transpose,
    .quantize_weight = quantize_weight,
    .expand = expand,
    .preload = preload,
};

const EpBackend *ep_backend(EpBackendKind kind) {
    if (kind == EP_CPU) return &ep_cpu_backend;
#ifdef EP_HAVE_CUDA
    if (kind == EP_CUDA) return &ep_cuda_backend;
#endif
    ep_error(EP_EINVAL, "this build of epmoe has no CUDA backend: build it with nvcc and EPMOE_CUDA=1");
    return NULL;
}
