/* The low-latency dispatch and combine: no handshake, two banks of cells and three of slots.
 *
 * Each of N ranks executes E operations: dispatch, combine, dispatch, ... A rank has two workers, a
 * sender and a receiver. They synchronise only at the end of an operation. A rank has no token, or one
 * token that it sends to every peer, or a token with a wrong index, or it propagates an error. A combine returns
 * what the dispatch before it has brought. It is refused if that dispatch was void.
 *
 * A rank tells each peer: the call and the number (the two cells of its head), the route of its token,
 * and the slot, of which one word stands for all. A cell has its epoch in it. A word of a slot is 0 until
 * it arrives, and the receiver sets it to 0 when it has read it. So the stores of an operation may become
 * visible in any order. A word that a void operation leaves unread is set to 0 in the next operation, after
 * the heads of all peers have been seen.
 *
 * What must hold:
 * - A receiver of operation e uses only cells and slots of epoch e. None of them is overwritten before the
 *   receiver has used it. (The epoch of a slot is known to the checker only.)
 * - A sender finds every slot empty. A clearing receiver clears no slot of another operation.
 * - All ranks reach one verdict: normal, error, or wrong index.
 * - Every rank ends every operation.
 *
 * Mutants:
 *   BANKS=1    one bank of cells.
 *   SLOTS=1    one bank of slots. SLOTS=2: two banks.
 *   NOCLEAR    a void operation's slots are not cleared.
 *   EARLYCLEAR they are cleared without waiting for the heads of the next operation.
 *   TAGBITS=1  a cell has only the lowest bit of its epoch.
 *   TORN       a receiver reads the number when it has seen the call, without looking at the number's tag.
 *   EARLYADV   the first worker out advances the epoch.
 *   HASTE      a rank that propagates an error does not wait for the heads of its peers.
 *
 * Correct variants:
 *   HALVES     the receiver begins after the sender has ended, as with two launches.
 *   INORDER    the stores to a peer become visible in the order of the program.
 *   FEW        only in operation 3 may a rank propagate an error, have a wrong index, or have no token. Both make three
 *              ranks cheap. */
#ifndef N
#define N 2
#endif
#ifndef E
#define E 4
#endif
#ifndef BANKS
#define BANKS 2
#endif
#ifndef SLOTS
#define SLOTS 3
#endif

#define AT(dst,e,src)  (((dst) * BANKS + (e) % BANKS) * N + (src))
#define SLOT_AT(dst,e,src) (((dst) * SLOTS + (e) % SLOTS) * N + (src))
#define CELL(e,value)  ((e) * 4 + (value))
#define EPOCH(cell)    ((cell) / 4)
#define VALUE(cell)    ((cell) % 4)
/* A cell of a later epoch ends the wait, too, and then an assertion fails: a cell cannot be overtaken. */
#ifdef TAGBITS
#define SEEN(cell,e)   ((cell) != 0 && EPOCH(cell) % 2 == (e) % 2)
#else
#define SEEN(cell,e)   (EPOCH(cell) >= (e))
#endif
#define IS_DISPATCH(e) ((e) % 2 == 1)

/* What a rank does in an operation. */
#define NOTHING 0
#define TOKEN   1
#define WRONG   2
#define ERROR  3

/* The stores to a peer. */
#define CALL   1
#define NUMBER 2
#define ROUTE  4
#define SLOT   8

#ifdef INORDER
#define MAY(store) (left & (store) && !(left & ((store) - 1)))
#else
#define MAY(store) (left & (store))
#endif

byte call[N * BANKS * N];     /* [dst][bank][src]: cell, value 1 if it propagates an error */
byte number[N * BANKS * N];   /* cell, value: tokens of a dispatch */
byte route[N * BANKS * N];    /* cell, value: TOKEN or WRONG */
byte slot[N * SLOTS * N];     /* 0: empty, else the epoch of the row located there */
byte dirty[N];                /* the newest operation whose slots this rank has left unread */
byte epoch[N] = 1;            /* local operation counter */
byte out[N];                  /* workers that have left the current operation */
byte choice[N * 2];           /* [rank][e % 2]: what it does in an operation */
byte sent[N];                 /* 1: the last dispatch has sent this rank's token */
byte got[N];                  /* bit w: the last dispatch has brought a token of w */

/* What the checker knows. It is not a part of the protocol. */
byte verdict[E + 2];          /* 0: not reached yet, else 1 + NOTHING, WRONG or ERROR */
byte ended[E + 2];            /* ranks that have ended this operation */

#define NORMAL NOTHING
#define DOES(r,e)      choice[(r) * 2 + (e) % 2]
#ifdef FEW
#define VARIES(e) ((e) == 3)
#else
#define VARIES(e) (true)
#endif

inline choose() {
    if
    :: IS_DISPATCH(e) && VARIES(e) -> DOES(r,e) = NOTHING
    :: IS_DISPATCH(e) -> DOES(r,e) = TOKEN
    :: IS_DISPATCH(e) && VARIES(e) -> DOES(r,e) = WRONG
    :: !IS_DISPATCH(e) && sent[r] != 2 -> DOES(r,e) = NOTHING
    :: VARIES(e) || (!IS_DISPATCH(e) && sent[r] == 2) -> DOES(r,e) = ERROR
    fi
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

/* All ranks have ended operation e, so no correct rank uses a value of it any more: one value of each cell
 * stands for all. This makes the search shorter, and keeps the epochs, which the assertions look at. */
inline forget() {
    do
    :: i < N * N ->
        if
        :: EPOCH(call[AT(i / N,e,i % N)]) <= e -> call[AT(i / N,e,i % N)] = CELL(e,0)
        :: else -> skip
        fi;
        if
        :: EPOCH(number[AT(i / N,e,i % N)]) <= e -> number[AT(i / N,e,i % N)] = CELL(e,0)
        :: else -> skip
        fi;
        if
        :: EPOCH(route[AT(i / N,e,i % N)]) <= e -> route[AT(i / N,e,i % N)] = CELL(e,0)
        :: else -> skip
        fi;
        i++
    :: else -> i = 0; break
    od;
    verdict[e] = 0; ended[e] = 0
}

inline leave() {
    out[r]++;
#ifdef EARLYADV
    if
    :: out[r] == 1 -> epoch[r]++; e++; choose(); e--
    :: else -> out[r] = 0
    fi;
#else
    if
    :: out[r] == 2 ->
        out[r] = 0; epoch[r]++; ended[e]++;
        DOES(r,e) = NOTHING;
        if
        :: IS_DISPATCH(e) -> skip
        :: else -> sent[r] = 0; got[r] = 0
        fi;
        e++; choose(); e--;
        if
        :: ended[e] == N -> forget()
        :: else -> skip
        fi
    :: else -> skip
    fi;
#endif
    e++
}

#define STORES(d) (CALL + NUMBER + (DOES(r,e) == TOKEN || DOES(r,e) == WRONG -> ROUTE + SLOT : \
                   (!IS_DISPATCH(e) && DOES(r,e) != ERROR && (got[r] >> (d)) & 1 -> SLOT : 0)))

proctype sender(byte r) {
    byte e = 1, d, left, i;
    do
    :: atomic { e > E -> break }
    :: atomic { e <= E && epoch[r] >= e -> first_peer(d); left = STORES(d) }
        do
        :: atomic { d < N && MAY(CALL) ->
                call[AT(d,e,r)] = CELL(e, DOES(r,e) == ERROR); left = left - CALL }
        :: atomic { d < N && MAY(NUMBER) ->
                number[AT(d,e,r)] = CELL(e, DOES(r,e) == TOKEN || DOES(r,e) == WRONG);
                left = left - NUMBER }
        :: atomic { d < N && MAY(ROUTE) ->
                route[AT(d,e,r)] = CELL(e, DOES(r,e)); left = left - ROUTE }
        :: atomic { d < N && MAY(SLOT) ->
                assert(slot[SLOT_AT(d,e,r)] == 0);
                slot[SLOT_AT(d,e,r)] = e; left = left - SLOT }
        :: atomic { d < N && left == 0 ->
                next_peer(d);
                left = (d < N -> STORES(d) : 0) }
        :: atomic { d >= N -> d = 0; leave(); break }
        od
    od
}

/* Empty the slots of operation `op`, which was void. */
inline clear(op) {
    i = 0;
    do
    :: i < N ->
        assert(slot[SLOT_AT(r,op,i)] == 0 || slot[SLOT_AT(r,op,i)] == (op));
        slot[SLOT_AT(r,op,i)] = 0;
        i++
    :: else -> i = 0; break
    od
}
/* The heads of all peers have been seen: clear the slots of the operation before, if it was void. */
inline clear_void() {
#ifndef NOCLEAR
    if
    :: dirty[r] && dirty[r] + 1 == e -> clear(e - 1)
    :: else -> skip
    fi
#endif
    dirty[r] = (dirty[r] == e -> e : 0)
}

/* Give the verdict. A propagated error comes before a wrong index. In a normal operation, note what combine needs. */
inline judge() {
    assert(verdict[e] == 0 || verdict[e] == 1 + bad);
    verdict[e] = 1 + bad;
    if
    :: IS_DISPATCH(e) ->
        sent[r] = (bad != NORMAL -> 2 : DOES(r,e) == TOKEN);
        got[r] = (bad != NORMAL -> 0 : tokens)
    :: else -> skip
    fi;
#ifdef EARLYCLEAR
    if
    :: bad -> clear(e)
    :: else -> skip
    fi
#else
    if
    :: bad -> dirty[r] = e
    :: else -> skip
    fi
#endif
}

proctype receiver(byte r) {
    byte e = 1, w, bad, tokens, i;   /* tokens: bit w: w has a token, or a sum for this rank */
    do
    :: atomic { e > E -> break }
#ifdef HALVES
    :: atomic { e <= E && epoch[r] >= e && out[r] == 1 ->
#else
    :: atomic { e <= E && epoch[r] >= e ->
#endif
            first_peer(w); tokens = 0;
            bad = (DOES(r,e) == ERROR -> ERROR : NORMAL)
#ifdef HASTE
            ;
            if
            :: bad -> w = N
            :: else -> skip
            fi
#endif
        }
        do      /* the heads */
        :: atomic { w < N && SEEN(call[AT(r,e,w)], e) ->
                assert(EPOCH(call[AT(r,e,w)]) == e);
                bad = (VALUE(call[AT(r,e,w)]) -> ERROR : bad) }
#ifdef TORN
            atomic {
#else
            atomic { SEEN(number[AT(r,e,w)], e) ->
#endif
                assert(EPOCH(number[AT(r,e,w)]) == e);
                tokens = tokens | (VALUE(number[AT(r,e,w)]) << w);
                next_peer(w) }
        :: atomic { w >= N && (bad || !IS_DISPATCH(e)) -> clear_void(); judge(); first_peer(w); break }
        :: atomic { w >= N && !bad && IS_DISPATCH(e) ->
                clear_void();
                bad = (DOES(r,e) == WRONG -> WRONG : NORMAL);
                first_peer(w); break }
        od;
        do      /* the routes; the first wrong one ends the loop */
        :: atomic { !IS_DISPATCH(e) || bad == ERROR -> break }
        :: atomic { IS_DISPATCH(e) && bad != ERROR && w < N && !bad && !((tokens >> w) & 1) ->
                next_peer(w) }
        :: atomic { IS_DISPATCH(e) && bad != ERROR && w < N && !bad && (tokens >> w) & 1 &&
                    SEEN(route[AT(r,e,w)], e) ->
                assert(EPOCH(route[AT(r,e,w)]) == e);
                bad = (VALUE(route[AT(r,e,w)]) == WRONG -> WRONG : NORMAL);
                next_peer(w) }
        :: atomic { IS_DISPATCH(e) && bad != ERROR && (w >= N || bad) -> judge(); first_peer(w); break }
        od;
        do      /* the slots: of tokens, or of the sums of this rank's token */
        :: atomic { w < N && !bad && !(IS_DISPATCH(e) -> (tokens >> w) & 1 : sent[r]) -> next_peer(w) }
        :: atomic { w < N && !bad && (IS_DISPATCH(e) -> (tokens >> w) & 1 : sent[r]) &&
                    slot[SLOT_AT(r,e,w)] ->
                assert(slot[SLOT_AT(r,e,w)] == e);
                slot[SLOT_AT(r,e,w)] = 0;
                next_peer(w) }
        :: atomic { w >= N || bad -> bad = 0; w = 0; tokens = 0; leave(); break }
        od
    od
}

init {
    byte r, e = 1;
    atomic {
        do
        :: r < N -> choose(); run sender(r); run receiver(r); r++
        :: else -> break
        od
    }
}
