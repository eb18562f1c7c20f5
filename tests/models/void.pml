/* Void operations and the sticky fault. A host issues operations on its device's queue. It may pass
 * a wrong argument, for which it raises an error at once; the operation is still issued, to tell
 * the peers. A device that finds an operation void because of a peer becomes faulted. It then drops
 * operations, without a handshake, until its host has acknowledged the fault, which it may notice
 * at any later operation. After any error a caller starts the next round of its program (tags 5..,
 * 9..), whatever it had issued of this round.
 *
 * What must hold: operations that meet in an epoch are the same step of the program; every rank
 * ends; epochs are equal then; the last round was executed on every rank.
 *
 * Mutants:
 *   NOOPADV    a dropped operation advances the epoch.
 *   UNSTICKY   a faulted device continues; only its host learns of the fault.
 *   ACKRACE    the host acknowledges while dropped operations are still queued.
 *   RAISEONLY  an error for a wrong argument leaves a pending fault in place.
 *   SWALLOW    the caller that passed a wrong argument continues with the round.
 *   HASTE=1/2  the own/a peer's bad status ends an operation before all have entered.
 *
 * Correct variant:
 *   ALLFAULT   the rank that passed the wrong argument becomes faulted, too. */
#ifndef N
#define N 2
#endif
#ifndef P
#define P 2                   /* operations of a round */
#endif
#ifndef HASTE
#define HASTE 0
#endif
#define LAST 8                /* tags above this one belong to the last round */

#define AT(dst,e,src)  (((dst) * 2 + (e) % 2) * N + (src))
#define IN(r,e,w)      (enter[AT(r,e,w)] >= e)
#if N == 2
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1))
#else
#define ENTERED(r,e)   (IN(r,e,0) && IN(r,e,1) && IN(r,e,2))
#endif

/* A header is epoch + 8 * tag + BAD. The tag is the step of the program that the caller means.
 * The real header need not contain it, so here the tag is only asserted and never makes an
 * operation void. */
#define BAD 128
byte header[N * 2 * N];       /* [dst][bank][src] */
byte enter[N * 2 * N];
byte epoch[N] = 1;
bit  fault[N];
byte pending[N];              /* operations issued and not yet ended or dropped */
byte ran[N];                  /* operations since the last error that were not void */
byte num_ended;
chan queue[N] = [P + 2] of { byte, bit };

#define SEES_BAD(r,e,w) \
    (w != r && enter[AT(r,e,w)] == e && header[AT(r,e,w)] >= BAD)

inline finish() {
    epoch[r]++; pending[r]--;
    t = 0; b = 0; d = 0; w = 0; v = 0; e = 0
}

proctype device(byte r) {
    byte t, e, d, w;
    bit b, v;
end:
    do
#ifndef UNSTICKY
    :: atomic { nempty(queue[r]) && fault[r] ->
            queue[r]?t,b;
#ifdef NOOPADV
            epoch[r]++;
#endif
            pending[r]--; t = 0; b = 0 }
    :: atomic { nempty(queue[r]) && !fault[r] ->
#else
    :: atomic { nempty(queue[r]) ->
#endif
            queue[r]?t,b;
            e = epoch[r] };
        do
        :: atomic { d < N ->
                header[AT(d,e,r)] = e + 8 * t + (b -> BAD : 0);
                enter[AT(d,e,r)] = e; d++ }
        :: atomic { d == N && ENTERED(r,e) ->
                do
                :: w < N ->
                    assert(header[AT(r,e,w)] % 8 == e);
                    assert((header[AT(r,e,w)] / 8) % 16 == t);
                    v = v || header[AT(r,e,w)] >= BAD;
                    w++
                :: else -> break
                od;
                if
#ifdef ALLFAULT
                :: v -> fault[r] = 1
#else
                :: v && !b -> fault[r] = 1
                :: v && b -> skip
#endif
                :: !v -> ran[r]++
                fi;
                finish(); break }
#if HASTE == 1
        :: atomic { d == N && b -> finish(); break }
#elif HASTE == 2
        :: atomic { d == N && !b && (SEES_BAD(r,e,0) || SEES_BAD(r,e,1) ||
                                     SEES_BAD(r,e,2)) ->
                fault[r] = 1; finish(); break }
#endif
        od
    od
}

proctype host(byte r) {
    byte base, i = 1;
    bit raised;
    do
    :: atomic { i <= P && fault[r] -> i = P + 1 }     /* noticed at this operation */
    :: atomic { i <= P ->
            pending[r]++;
            if
            :: queue[r]!base + i,0; i++
            :: base < LAST ->
                queue[r]!base + i,1; raised = 1;
#ifdef SWALLOW
                i++
#else
                i = P + 1
#endif
            fi }
#ifdef ACKRACE
    :: atomic { i > P && (pending[r] == 0 || fault[r]) ->
#else
    :: atomic { i > P && pending[r] == 0 ->
#endif
            if
            :: raised || fault[r] ->
                assert(base < LAST);
#ifdef RAISEONLY
                fault[r] = (raised -> fault[r] : 0);
#else
                fault[r] = 0;
#endif
                ran[r] = 0; raised = 0; base = base + 4; i = 1
            :: else -> break
            fi }
    od;
    atomic {
        assert(ran[r] == P);
        num_ended++;
        base = 0; i = 0
        do
        :: num_ended == N && i < N - 1 -> assert(epoch[i] == epoch[i + 1]); i++
        :: else -> break
        od
    }
}

init {
    byte i;
    atomic {
        do
        :: i < N -> run device(i); run host(i); i++
        :: else -> break
        od
    }
}
