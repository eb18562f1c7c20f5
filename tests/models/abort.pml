/* Abort. A rank may die at any step. Any host may set its rank's abort word at any moment, with or
 * without a reason. Only workers read the word, so the model sets it when a worker reads it. A host
 * that may always abort does so in the end if its rank hangs, so a remaining hang is an invalid end
 * state.
 *
 * What must hold:
 * - Every surviving rank ends.
 * - An operation that no worker left by abort has produced correct rows.
 * - No rank, aborted or not, overwrites what another rank still reads. Therefore an aborted rank
 * begins no further operation on the buffer: it left its operation without knowing that its peers
 * had begun it, so it could get ahead.
 *
 * Mutants:
 *   DEAF=1, DEAF=2  the wait for enter, the wait for a flag does not read the abort word.
 *   GOON      an aborted rank begins its next operation.
 *   SENDON    a worker that left the wait for enter by abort still sends.
 *   REUSE     an aborted rank frees its staging buffer, to which live peers still write.
 *   RESUME    afterwards the survivors assume that their epochs are equal.
 *
 * Correct variants:
 *   VICTIM=v  the rank that may die.
 *   FEW       no abort without a death, which makes three ranks cheap to search. */
#ifndef N
#define N 2
#endif
#ifndef E
#define E 3
#endif
#ifndef DEAF
#define DEAF 0
#endif

#define AT(dst,e,src)  (((dst) * 2 + (e) % 2) * N + (src))
#define PAIR(dst,src)  ((dst) * N + (src))
#define IN(r,e,w)      (enter[AT(r,e,w)] >= e)
#if N == 2
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1))
#else
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1) && IN(r,e,2))
#endif
#ifndef VICTIM
#define VICTIM 0
#endif
#ifdef FEW
#define ABORTABLE  (dead)
#else
#define ABORTABLE  true
#endif

byte header[N * 2 * N];       /* [dst][bank][src] */
byte enter[N * 2 * N];
byte stage[N * N];            /* [dst][src] */
byte flag[N * N];
byte epoch[N] = 1;
byte out[N];
bit  cut[N];                  /* the abort word, which is never cleared */
bit  over[N];                 /* the rank begins no further operation */
byte num_ended[N];                 /* workers that have ended */
bit  dead;                    /* rank VICTIM */

inline check_headers() {
    do
    :: w < N -> assert(header[AT(r,e,w)] == e); w++
    :: else -> break
    od;
    w = 0
}

inline next_peer(p) {
    p++;
    if
    :: p == r -> p++
    :: else -> skip
    fi
}

inline leave() {
    out[r]++;
    if
    :: out[r] == 2 ->
        out[r] = 0; epoch[r]++;
        if
        :: skip
        :: ABORTABLE -> cut[r] = 1
        fi;
#ifndef GOON
        over[r] = cut[r]
#endif
    :: else -> skip
    fi;
    w = 0; d = 0; gone = 0; e++
}

/* A dying rank stops between two steps of either worker. Every step changes something that other
 * workers can see. */
#define DIES  (r == VICTIM && dead)

proctype sender(byte r) {
    byte e = 1, d, w;
    bit gone;
    {
        do
        :: atomic { e > E || (epoch[r] >= e && over[r]) -> break }
        :: atomic { e <= E && epoch[r] >= e && !over[r] -> skip };
            do
            :: atomic { d < N ->
                    header[AT(d,e,r)] = e; enter[AT(d,e,r)] = e; d++ }
            :: atomic { d == N && ENTERED(r,e) ->
                    check_headers();
                    d = (r == 0 -> 1 : 0); break }
#if DEAF != 1
            :: atomic { d == N && ABORTABLE ->
                    cut[r] = 1;
#ifndef SENDON
                    gone = 1;
#endif
                    d = (r == 0 -> 1 : 0); break }
#endif
            od;
            do
            :: atomic { d < N && !gone ->
#ifdef REUSE
                    assert(!over[d]);
#endif
                    stage[PAIR(d,r)] = e; flag[PAIR(d,r)] = e;
                    next_peer(d) }
            :: atomic { d >= N || gone -> leave(); break }
            od
        od;
        atomic { num_ended[r]++; e = 0 }
    } unless { d_step { DIES -> e = 0; d = 0; w = 0; gone = 0 } }
}

proctype receiver(byte r) {
    byte e = 1, d, w;
    bit gone;
    {
        do
        :: atomic { e > E || (epoch[r] >= e && over[r]) -> break }
        :: atomic { e <= E && epoch[r] >= e && !over[r] && ABORTABLE ->
                cut[r] = 1; leave() }
        :: atomic { e <= E && ENTERED(r,e) ->
                check_headers();
                w = (r == 0 -> 1 : 0) };
            do
            :: atomic { w < N && flag[PAIR(r,w)] >= e ->
                    assert(flag[PAIR(r,w)] == e);
                    assert(stage[PAIR(r,w)] == e);
                    next_peer(w) }
#if DEAF != 2
            :: atomic { w < N && ABORTABLE -> cut[r] = 1; leave(); break }
#endif
            :: atomic { w >= N -> leave(); break }
            od
        od;
        atomic { num_ended[r]++; e = 0 }
    } unless { d_step { DIES -> e = 0; d = 0; w = 0; gone = 0 } }
}

proctype death() {
    if
    :: dead = 1
    :: skip
    fi
}

#ifdef RESUME
proctype resume() {
end:
    (num_ended[0] == 2 && num_ended[1] == 2 && !dead);
    assert(epoch[0] == epoch[1])
}
#endif

init {
    byte i;
    atomic {
        do
        :: i < N -> run sender(i); run receiver(i); i++
        :: else -> break
        od;
        run death();
#ifdef RESUME
        run resume()
#endif
    }
}
