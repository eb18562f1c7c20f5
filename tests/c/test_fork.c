/* test_fork.c - children that are forked while another thread creates a world. */
#include <sys/stat.h>
#include <sys/wait.h>

#include "harness.h"

/* The number of sockets and event descriptors of this process. */
static uint32_t num_sockets(void) {
    uint32_t num = 0;
    struct stat s;
    for (int fd = 0; fd < 1024; fd++)
        num += fstat(fd, &s) == 0 && (S_ISSOCK(s.st_mode) || (s.st_mode & S_IFMT) == 0);
    return num;
}

/* Two threads, each a rank, create and release worlds until the test is over. */
typedef struct {
    pthread_barrier_t barrier;
    EpWorldConfig configs[2];
    atomic_bool is_over;
    atomic_uint num_worlds, num_failed;
} Creation;
typedef struct {
    Creation *creation;
    uint32_t rank;
} Creator;

static void *create_main(void *arg) {
    const Creator *me = (const Creator *)arg;
    Creation *c = me->creation;
    EpWorldConfig *mine = &c->configs[me->rank], *other = &c->configs[1 - me->rank];
    unsigned char nonce[EP_NONCE_BYTES];
    for (bool is_over = false; !is_over;) {
        EpWorld *world = NULL;
        *mine = (EpWorldConfig){.rank = me->rank, .num_ranks = 2, .timeout_s = long_timeout_s};
        int code = ep_world_listen(&mine->listen_fd, mine->names[me->rank], nonce);
        if (me->rank == 0) is_over = atomic_load(&c->is_over);
        if (me->rank == 0) memcpy(mine->nonce, nonce, sizeof nonce);
        pthread_barrier_wait(&c->barrier);
        memcpy(mine->names[1 - me->rank], other->names[1 - me->rank], EP_NAME_BYTES);
        if (me->rank == 1) memcpy(mine->nonce, other->nonce, sizeof nonce);
        pthread_barrier_wait(&c->barrier);
        if (!code) code = ep_world_create(mine, &world);
        if (code) atomic_fetch_add(&c->num_failed, 1);
        else atomic_fetch_add(&c->num_worlds, 1);
        ep_world_release(world);
        /* Both ranks must stop after the same world. */
        mine->timeout_s = is_over;
        pthread_barrier_wait(&c->barrier);
        if (me->rank == 1) is_over = other->timeout_s != 0;
        pthread_barrier_wait(&c->barrier);
    }
    return NULL;
}

/* Fork at random moments. No child has a socket of a world: it would hide the death of its parent. */
bool test_fork_during_creation(void) {
    Creation c;
    Creator creators[2];
    pthread_t threads[2];
    Rank *me = NULL;
    Rng rng = {test_seed};
    memset(&c, 0, sizeof c);
    const uint32_t before = num_sockets();
    if (pthread_barrier_init(&c.barrier, NULL, 2)) abort();
    for (uint32_t r = 0; r < 2; r++) {
        creators[r] = (Creator){&c, r};
        if (pthread_create(&threads[r], NULL, create_main, &creators[r])) abort();
    }
    uint32_t num_wrong = 0, num_children = scaled(300);
    for (uint32_t i = 0; i < num_children; i++) {
        int status = 0;
        usleep(rng_below(&rng, 2000));
        pid_t child = fork();
        if (child == 0) _exit(num_sockets() != before);
        if (child < 0 || waitpid(child, &status, 0) != child || status) num_wrong++;
    }
    atomic_store(&c.is_over, true);
    for (uint32_t r = 0; r < 2; r++) pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&c.barrier);
    CHECK(me, atomic_load(&c.num_worlds) > 0);
    CHECK_CODE(me, 0, (int)atomic_load(&c.num_failed));
    CHECK_CODE(me, 0, (int)num_wrong);
    CHECK(me, num_sockets() == before);
    return true;
}
