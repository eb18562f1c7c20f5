/* The task queues of one operation. A rank starts W workers, of which only R can be resident at a
 * time. A worker that is not resident starts when another ends. The first worker to arrive
 * publishes the rank's enter words. Workers draw send and receive tasks from two counters. Workers
 * that arrive at odd places begin with receive tasks. The last worker out clears the counters.
 *
 * What must hold, for any R from 1 on: every task is executed exactly once in every operation, and
 * every rank ends every operation. Reason: the first worker to arrive begins with sends and never
 * waits for data. So all sends of a rank are executed, however few workers run. Which worker
 * arrives first is not known in advance.
 *
 * Mutants:
 *   RECVFIRST   every worker takes receive tasks before send tasks.
 *   FIXEDROLE   a worker's number, not its place of arrival, determines its role.
 *   FIXEDENTER  worker 0 publishes the enter words, whichever worker arrives first.
 *   FIRSTRESET  the first worker out clears the counters.
 *   NORESET     no worker clears them. */
#ifndef W
#define W 2                   /* workers of a rank */
#endif
#ifndef R
#define R 1                   /* how many of them can be resident */
#endif
#ifndef S
#define S 2                   /* send tasks of a rank; also the number of its receive tasks */
#endif
#ifndef E
#define E 2
#endif
#define N 2
#define TASK(r,t)     ((r) * S + (t))
#define ENTERED(r,e)  (enter[(r) * N] >= e && enter[(r) * N + 1] >= e)

byte enter[N * N];            /* [dst][src] */
byte flag[N * S];             /* [dst][task of the peer] */
byte epoch[N] = 1;
byte room[N] = R;             /* free places for resident workers */
byte arrived[N], out[N];
byte sends[N], receives[N];   /* next task to draw */
byte sent[N * S], got[N * S]; /* last epoch in which the task was executed */

/* Workers are alike. So it is enough to let them arrive in the order of their numbers, unless a
 * mutant gives the numbers a meaning. */
#if defined(FIXEDROLE) || defined(FIXEDENTER)
#define MAY_ARRIVE  true
#else
#define MAY_ARRIVE  (number == arrived[r])
#endif

inline clear() { sends[r] = 0; receives[r] = 0 }

inline draw_sends() {
    do
    :: atomic { t = sends[r]; sends[r]++;
            if
            :: t >= S -> t = 0; break
            :: else -> assert(sent[TASK(r,t)] == e - 1); sent[TASK(r,t)] = e
            fi };
        atomic { flag[TASK(1 - r,t)] = e; t = 0 }
    od
}

inline draw_receives() {
    do
    :: atomic { t = receives[r]; receives[r]++;
            if
            :: t >= S -> t = 0; break
            :: else -> skip
            fi };
        atomic { flag[TASK(r,t)] >= e ->
            assert(flag[TASK(r,t)] == e);
            assert(got[TASK(r,t)] == e - 1);
            got[TASK(r,t)] = e; t = 0 }
    od
}

proctype worker(byte r; byte number) {
    byte e = 1, place, d, t;
    do
    :: atomic { e > E -> break }
    :: atomic { e <= E && epoch[r] >= e && room[r] > 0 && MAY_ARRIVE ->
            room[r]--; place = arrived[r]; arrived[r]++ };
        do
#ifdef FIXEDENTER
        :: atomic { number == 0 && d < N -> enter[d * N + r] = e; d++ }
        :: atomic { (number != 0 || d == N) && ENTERED(r,e) -> d = 0; break }
#else
        :: atomic { place == 0 && d < N -> enter[d * N + r] = e; d++ }
        :: atomic { (place != 0 || d == N) && ENTERED(r,e) -> d = 0; break }
#endif
        od;
        if
#ifdef RECVFIRST
        :: true ->
#elif defined(FIXEDROLE)
        :: number % 2 == 1 ->
#else
        :: place % 2 == 1 ->
#endif
            draw_receives(); draw_sends()
        :: else ->
            draw_sends(); draw_receives()
        fi;
        atomic {
            room[r]++; out[r]++; place = 0;
#ifdef FIRSTRESET
            if
            :: out[r] == 1 -> clear()
            :: else -> skip
            fi;
#endif
            if
            :: out[r] == W ->
                do
                :: t < S ->
                    assert(sent[TASK(r,t)] == e);
                    assert(got[TASK(r,t)] == e);
                    t++
                :: else -> break
                od;
                t = 0; out[r] = 0; arrived[r] = 0;
#if !defined(FIRSTRESET) && !defined(NORESET)
                clear();
#endif
                epoch[r]++
            :: else -> skip
            fi;
            e++
        }
    od
}

init {
    byte i;
    atomic {
        do
        :: i < N * W -> run worker(i / W, i % W); i++
        :: else -> break
        od
    }
}
