/* The enter handshake, one staging bank, and data flags that are compared for equality.
 *
 * Each of N ranks executes E operations with two workers, a sender and a receiver. They synchronise
 * only at the end of an operation. In every operation any rank may post a bad status, which makes
 * the operation void. All, some or no pairs may have tokens. So the histories searched include
 * sequences of void operations and operations without any token.
 *
 * What must hold:
 * - A worker of operation e reads only headers of epoch e.
 * - All workers reach one verdict.
 * - A flag is never overtaken, so comparing it for equality is enough.
 * - A staged row stays until it has been read.
 * - Every rank ends every operation.
 *
 * Mutants:
 *   HB=1      one bank of headers.
 *   NOENTER   send without waiting for enter.
 *   SKIP=1    rank 0 leaves out operation 2.   SKIP=2  rank 0 enters it, but does not wait.
 *   FLAGFIRST the flag is written before the row.
 *   EARLYADV  the first worker out advances the epoch.
 *   LATEZERO  rank 1 zeroes its words when it starts, without a barrier.
 *
 * Correct variants:
 *   IDLE      a receiver skips the wait if no rank sends (its sender still waits).
 *   FEW       only operation 2 may lack tokens, which makes three ranks cheap to search. */
#ifndef N
#define N 2
#endif
#ifndef E
#define E 4
#endif
#ifndef HB
#define HB 2
#endif
#ifndef SKIP
#define SKIP 0
#endif

#define AT(dst,e,src)  (((dst) * HB + (e) % HB) * N + (src))
#define PAIR(dst,src)  ((dst) * N + (src))
#define IN(r,e,w)      (enter[AT(r,e,w)] >= e)
#if N == 2
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1))
#else
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1) && IN(r,e,2))
#endif
#define BAD 16

byte header[N * HB * N];      /* [dst][bank][src]: epoch, plus BAD if it propagates an error */
byte enter[N * HB * N];
byte stage[N * N];            /* [dst][src]: epoch of the row located there */
byte flag[N * N];
byte epoch[N] = 1;            /* local operation counter */
byte out[N];                  /* workers that have left the current operation */

/* What the callers and the checker know. It is not a part of the protocol. */
/* 0: not chosen yet, 1: every pair has tokens, 2: rank 0 sends none, 3: no rank sends any */
byte quiet[E + 2];
byte verdict[E + 2];          /* 0: not reached yet, 1: normal, 2: void */
byte ended[E + 2];            /* ranks that have ended this operation */

#define TOKENS(src,e)  (quiet[e] == 1 || (quiet[e] == 2 && (src) != 0))
#define OMIT(r,e)      (SKIP && (r) == 0 && (e) == 2)

inline choose_tokens() {
    if
    :: quiet[e] != 0 -> skip
    :: quiet[e] == 0 && !OMIT(0,e) -> quiet[e] = 1
#ifdef FEW
    :: quiet[e] == 0 && e == 2 -> quiet[e] = 2
#else
    :: quiet[e] == 0 -> quiet[e] = 2
    :: quiet[e] == 0 && !OMIT(0,e) -> quiet[e] = 3
#endif
    fi
}

/* Enter words only grow, so once this wait can pass, it can always pass. A worker that reads its
 * headers long after the wait has the same history as a worker that waits late. Hence the wait
 * and the reads are one step here. The same holds for a data flag and its row. A header and its
 * enter word are stored in one step, too: a worker of this epoch does not read the header before
 * the word, and to a worker of an older epoch the word says nothing. */
inline judge() {
    do
    :: w < N ->
        assert(header[AT(r,e,w)] % BAD == e);
        bad = bad | (header[AT(r,e,w)] & BAD);
        w++
    :: else -> break
    od;
    assert(verdict[e] == 0 || verdict[e] == (bad -> 2 : 1));
    verdict[e] = (bad -> 2 : 1)
}

/* Each loop runs over the peers only. N: done. */
inline first_peer(p) { p = (r == 0 -> 1 : 0) }

inline next_peer(p) {
    p++;
    if
    :: p == r -> p++
    :: else -> skip
    fi
}

inline leave() {
    out[r]++;
#ifdef EARLYADV
    if
    :: out[r] == 1 -> epoch[r]++
    :: else -> out[r] = 0
    fi;
#else
    if
    :: out[r] == 2 ->
        out[r] = 0; epoch[r]++; ended[e]++;
        if
        :: ended[e] == N -> quiet[e] = 0; verdict[e] = 0; ended[e] = 0
        :: else -> skip
        fi
    :: else -> skip
    fi;
#endif
    bad = 0; d = 0; w = 0; e++
}

proctype sender(byte r) {
    byte e = 1, d, w, bad;
#ifdef LATEZERO
    atomic {
        do
        :: r == 1 && w < N -> enter[AT(r,1,w)] = 0; w++
        :: else -> w = 0; break
        od
    }
#endif
    do
    :: atomic { e > E -> break }
    :: atomic { e <= E && epoch[r] >= e ->    /* the previous operation has ended */
            choose_tokens();
            if
            :: bad = 0
            :: bad = BAD
            fi;
#if SKIP == 1
            d = (OMIT(r,e) -> N : 0)
#endif
        }
        do
        :: atomic { d < N ->
                header[AT(d,e,r)] = e + bad; enter[AT(d,e,r)] = e; d++ }
        :: atomic { d == N && OMIT(r,e) -> bad = BAD; break }
#ifdef NOENTER
        :: atomic { d == N -> bad = 0; first_peer(d); break }
#else
        :: atomic { d == N && !OMIT(r,e) && ENTERED(r,e) ->
                bad = 0; judge(); first_peer(d); break }
#endif
        od;
        do
        :: atomic { d < N && !bad && !TOKENS(r,e) -> next_peer(d) }
        :: atomic { d < N && !bad && TOKENS(r,e) ->
#ifdef FLAGFIRST
                flag[PAIR(d,r)] = e }
            atomic {
                stage[PAIR(d,r)] = e;
#else
                stage[PAIR(d,r)] = e }
            atomic {
                flag[PAIR(d,r)] = e;
#endif
                next_peer(d) }
        :: atomic { d >= N || bad -> leave(); break }
        od
    od
}

proctype receiver(byte r) {
    byte e = 1, d, w, bad;
    do
    :: atomic { e > E -> break }
    :: atomic {
            if
            :: e <= E && OMIT(r,e) && epoch[r] >= e -> bad = BAD
#if defined(NOENTER)
            :: e <= E && epoch[r] >= e && quiet[e] != 0 -> skip
#elif defined(IDLE)
            :: e <= E && epoch[r] >= e && quiet[e] == 3 -> skip
            :: e <= E && ENTERED(r,e) && quiet[e] != 3 -> judge()
#else
            :: e <= E && !OMIT(r,e) && ENTERED(r,e) -> judge()
#endif
            fi;
            first_peer(w) }
        do
        :: atomic { w < N && !bad && !TOKENS(w,e) -> next_peer(w) }
        :: atomic { w < N && !bad && TOKENS(w,e) && flag[PAIR(r,w)] >= e ->
                assert(flag[PAIR(r,w)] == e);
                assert(stage[PAIR(r,w)] == e);
                next_peer(w) }
        :: atomic { w >= N || bad -> leave(); break }
        od
    od
}

init {
    byte i;
    atomic {
        do
        :: i < N -> run sender(i); run receiver(i); i++
        :: else -> break
        od
    }
}
