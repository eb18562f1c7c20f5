/* Count cells of the plan op, and the chunks that they announce.
   Odd epochs are plan ops: each rank writes one cell per peer, epoch and count
   in one word; the receiver waits until the epoch half of each cell equals the
   op's epoch and keeps a private copy of the count.  Even epochs send as many
   chunks as a plan says: op 2 uses the plan of op 1, and op 4 the plan of op 1
   or of op 3, because a caller may keep several plans.  Any pair may plan any
   count from 0 to C.  Headers and void ops are left to enter_stage.pml.
   What must hold: the receiver's copy is the count the sender meant, it waits
   for exactly the chunks that come, and every rank ends every op.  A cell has
   to vouch for itself, since passing the enter wait only says that a peer has
   begun the op, not that its cells have been written.
   NOEPOCH  a cell is a bare count, taken after the enter wait.
   TORN     epoch and count are two words, the epoch written first.
   SHARED   the receiver keeps no copy and takes counts from the cells.      */
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
byte later;                   /* the plan that op 4 uses, 1 or 3 */

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
