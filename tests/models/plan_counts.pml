/* Count cells of the plan operation, and the chunks that they announce.
 *
 * Odd epochs are plan operations. Each rank writes one cell per peer, with epoch and count in one
 * word. The receiver waits until the epoch half of each cell equals the operation's epoch, and
 * keeps a private copy of the count. Even epochs send as many chunks as a plan says. Operation 2
 * uses the plan of operation 1. Operation 4 uses that of operation 1 or 3, because a caller may
 * keep several plans. Any pair may plan any count from 0 to C. Headers and void operations are left
 * to enter_stage.pml.
 *
 * What must hold:
 * - The receiver's copy is the count that the sender meant.
 * - The receiver waits for exactly the chunks that are sent.
 * - Every rank ends every operation.
 * A cell must carry its epoch: to pass the wait for enter only means that a peer has begun the
 * operation, not that its cells have been written.
 *
 * Mutants:
 *   NOEPOCH  a cell is only a count, read after the wait for enter.
 *   TORN     epoch and count are two words, and the epoch is written first.
 *   SHARED   the receiver keeps no copy and reads counts from the cells. */
#ifndef N
#define N 2
#endif
#ifndef C
#define C 2
#endif
#define E 4

#define PAIR(dst,src)      ((dst) * N + (src))
#define CHUNK(dst,src,c)   (PAIR(dst,src) * C + (c))
#define PLAN(k,dst,src)    (((k) / 2) * N * N + PAIR(dst,src))
#define ENTERED(r,e)       (enter[PAIR(r,0)] >= e && enter[PAIR(r,1)] >= e)
#define COUNT 8               /* a cell is epoch * COUNT + count */

byte enter[N * N];            /* [dst][src] */
byte cell[N * N];
byte flag[N * N * C];         /* [dst][src][chunk] */
byte stage[N * N * C];
byte sent[2 * N * N];         /* [plan][dst][src], known to the sender */
byte seen[2 * N * N];         /* [plan][dst][src], the receiver's copy */
byte epoch[N] = 1;
byte out[N];
byte later;                   /* the plan that operation 4 uses, 1 or 3 */

#define USED(e)  (e == 2 -> 1 : later)

inline leave() {
    atomic {
        out[r]++;
        if
        :: out[r] == 2 -> out[r] = 0; epoch[r]++
        :: else -> skip
        fi;
        p = 0; c = 0
    }
}

proctype sender(byte r) {
    byte e = 1, p, c;
    do
    :: e <= E ->
        (epoch[r] >= e);
        do
        :: atomic { p < N -> enter[PAIR(p,r)] = e; p++ }
        :: else -> break
        od;
        p = 0;
        ENTERED(r,e);
        do
        :: p < N && p != r && e % 2 == 1 ->
            atomic {
                do
                :: c < C -> c++
                :: break
                od;
                sent[PLAN(e,p,r)] = c;
#ifdef NOEPOCH
                cell[PAIR(p,r)] = c;
#elif defined(TORN)
                cell[PAIR(p,r)] = e * COUNT + cell[PAIR(p,r)] % COUNT;
            }
            atomic {
                cell[PAIR(p,r)] = e * COUNT + c;
#else
                cell[PAIR(p,r)] = e * COUNT + c;
#endif
                c = 0; p++
            }
        :: p < N && p != r && e % 2 == 0 ->
            do
            :: c < sent[PLAN(USED(e),p,r)] ->
                stage[CHUNK(p,r,c)] = e;
                flag[CHUNK(p,r,c)] = e;
                c++
            :: else -> break
            od;
            c = 0; p++
        :: p == r -> p++
        :: p == N -> break
        od;
        leave();
        e++
    :: else -> break
    od
}

#ifdef SHARED
#define EXPECTED(e,p)  (cell[PAIR(r,p)] % COUNT)
#else
#define EXPECTED(e,p)  seen[PLAN(USED(e),r,p)]
#endif

proctype receiver(byte r) {
    byte e = 1, p, c;
    do
    :: e <= E ->
        ENTERED(r,e);
        do
        :: p < N && p != r && e % 2 == 1 ->
            atomic {
#ifndef NOEPOCH
                (cell[PAIR(r,p)] / COUNT == e);
#endif
                seen[PLAN(e,r,p)] = cell[PAIR(r,p)] % COUNT;
                p++
            }
        :: p < N && p != r && e % 2 == 0 ->
            assert(EXPECTED(e,p) == sent[PLAN(USED(e),r,p)]);
            do
            :: atomic { c < EXPECTED(e,p) ->
                    (flag[CHUNK(r,p,c)] == e);
                    assert(stage[CHUNK(r,p,c)] == e);
                    c++ }
            :: else -> break
            od;
            c = 0; p++
        :: p == r -> p++
        :: p == N -> break
        od;
        leave();
        e++
    :: else -> break
    od
}

init {
    byte i;
    atomic {
        if
        :: later = 1
        :: later = 3
        fi;
        do
        :: i < N -> run sender(i); run receiver(i); i++
        :: else -> break
        od
    }
}
