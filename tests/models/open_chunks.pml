/* The open chunks of one CTA in GEMM + combine (csrc/kernels/stage/open_chunks.cuh). V warps share O
 * places. The word of a place is 0 if it is free. Else it has a chunk, the chunk's slots that are
 * still to be returned, and whether a warp has taken it.
 *
 * A warp looks at the words one after the other. It takes a free place to open a chunk, which it
 * draws from a queue, or an open chunk with a slot whose rows are ready. It returns such slots. The
 * warp that returns the last slot publishes the chunk's flag and frees the place. Any other warp puts
 * the word back with the slots that are left. A warp stops when it finds nothing to take and no
 * chunk that is open and not taken. The GEMM makes the rows of the slots ready, in any order. For
 * each chunk there is a receiver, which waits for the flag and then reads both slots.
 *
 * What must hold:
 * - Every slot is returned exactly once, and only after its rows are ready.
 * - A flag is published exactly once, and only after both slots of the chunk have been returned.
 * - Every chunk is published, although warps stop. Reason: a warp that puts a chunk back looks at
 *   the places again, and continues to do so while the chunk is open and not taken.
 *
 * Each step is seen by all processes at once. So the model does not check the memory order: that the
 * publisher's release covers the slots that other warps of the CTA have returned. ThreadSanitizer
 * checks that on the emulated kernels (tests/kernels/test_comm.cpp).
 *
 * Mutants:
 *   BLINDTAKE   a warp takes a chunk with a plain store and does not compare.
 *   OWNSLOTS    a warp publishes the flag after its own slots, although others are missing.
 *   LOSES       a warp frees the place although slots are left.
 *   IMPATIENT   a warp stops when chunks are open, but no slot of them is ready.
 *   UNREADY     a warp returns all slots of the chunk that it has taken.
 *
 * Correct variants:
 *   VAIN        a warp may take a chunk of which no slot is ready. What a warp knows about ready rows
 *               before it takes a chunk is only a hint.
 *   INORDER     the first slots of all chunks become ready one after the other, then the second slots,
 *               which makes three warps cheap to search. */
#ifndef V
#define V 2                   /* warps */
#endif
#ifndef O
#define O 2                   /* places, 1 or 2 */
#endif
#ifndef C
#define C 2                   /* chunks, 2 or 3 */
#endif
#define S 2                   /* slots of a chunk */
#define TAKE 9                /* num: the warp has seen a word that it wants to take */

/* A word: bits 0 and 1: the slots that are left; bit 2: taken; from bit 3 on: 1 + the chunk. */
#define TAKEN         4
#define SLOTS(x)      ((x) % 4)
#define CHUNK(x)      ((x) / 8 - 1)
#define OPENED(c)     (8 * ((c) + 1) + 3)
#define HAS(x,i)      (((x) >> (i)) & 1)
#define SLOT(c,i)     ((i) * C + (c))
#define IS_TAKEN(x)   (((x) & TAKEN) != 0)
#define IS_OPEN(x)    ((x) != 0 && !IS_TAKEN(x))
#define PROMISES(x,i) (HAS(x,i) && ready[SLOT(CHUNK(x),i)])
#define PROMISING(x)  (IS_OPEN(x) && (PROMISES(x,0) || PROMISES(x,1)))
#define WANTED(x)     (((x) == 0 && left) || PROMISING(x))
#if O == 1
#define ANY(P)        (P(word[0]))
#else
#define ANY(P)        (P(word[0]) || P(word[1]))
#endif

/* A warp polls. Here a warp begins to look only when it can find something new. Without that, warps
 * that poll forever would not end the search as a hang. If no word is taken, no word is wanted and a
 * chunk is open, every look finds just this, until the GEMM or another warp changes something. With
 * VAIN there is always something to take, and with IMPATIENT such a look is the mistake. */
#if defined(VAIN) || defined(IMPATIENT)
#define MAY_LOOK      true
#else
#define MAY_LOOK      (ANY(IS_TAKEN) || ANY(WANTED) || !ANY(IS_OPEN))
#endif

#ifdef INORDER
#define MAY_FOLLOW(s) ready[s]
#else
#define MAY_FOLLOW(s) true
#endif

byte word[O];
byte queue;                   /* the next chunk to draw */
bit  ready[C * S];
bit  stage[C * S];            /* the slots, where the receiver reads them */
bit  flag[C];

/* What the checker knows. It is not a part of the protocol. */
byte sent[C * S];             /* how often the slot has been returned */

inline look_again() { num = 0; at = 0; w = 0; any_open = 0 }

/* Look at one place. After the last one: look again, or stop. */
inline look() {
    w = word[at];
    if
    :: WANTED(w) -> num = TAKE
#ifdef VAIN
    :: IS_OPEN(w) && !PROMISING(w) -> num = TAKE
#endif
    :: !WANTED(w) ->
        any_open = any_open || IS_OPEN(w);
        w = 0; num++; at = (at + 1) % O;
        if
        :: num < O -> skip
#ifdef IMPATIENT
        :: num == O -> look_again(); break
#else
        :: num == O && any_open -> look_again()
        :: num == O && !any_open -> look_again(); break
#endif
        fi
    fi
}

inline return_slot(i) {
    if
#ifdef UNREADY
    :: HAS(w,i) ->
#else
    :: HAS(w,i) && ready[SLOT(CHUNK(w),i)] ->
#endif
        assert(ready[SLOT(CHUNK(w),i)]);
        sent[SLOT(CHUNK(w),i)]++;
        assert(sent[SLOT(CHUNK(w),i)] == 1);
        stage[SLOT(CHUNK(w),i)] = 1;
        w = w - (1 << i)
    :: else -> skip
    fi
}

inline publish() {
    assert(!flag[CHUNK(w)]);
    flag[CHUNK(w)] = 1;
    w = (SLOTS(w) -> w : 0)
}

proctype warp() {
    byte num, at, w;          /* num: how many places the warp has looked at */
    bit left = 1;             /* the queue is not known to be empty */
    bit any_open;
    do
    :: atomic { num == 0 && MAY_LOOK ->
            if                /* any place may be the first */
            :: at = 0
            :: at = O - 1
            fi;
            look() }
    :: atomic { num > 0 && num < O -> look() }
#ifdef BLINDTAKE
    :: atomic { num == TAKE && w == 0 && word[at] != w -> look_again() }
    :: atomic { num == TAKE && (w != 0 || word[at] == w) ->
#else
    :: atomic { num == TAKE && word[at] != w -> look_again() }    /* another warp has taken it */
    :: atomic { num == TAKE && word[at] == w ->
#endif
            word[at] = w | TAKEN };
        if
        :: atomic { w == 0 ->
                if
                :: queue < C -> w = OPENED(queue); queue++
                :: else -> left = 0
                fi }
        :: atomic { w != 0 -> return_slot(0) };
            atomic { return_slot(1);
#ifdef OWNSLOTS
                publish();
#endif
                skip }
        fi;
        do
        :: atomic { w != 0 && SLOTS(w) == 0 -> publish() }
        :: atomic { w == 0 || SLOTS(w) != 0 ->
#ifdef LOSES
                w = (SLOTS(w) == 3 -> w : 0);
#endif
                word[at] = w; look_again(); break }
        od
    od
}

proctype gemm() {
end:
    do
    :: atomic { !ready[0] -> ready[0] = 1 }
    :: atomic { !ready[1] && MAY_FOLLOW(0) -> ready[1] = 1 }
    :: atomic { !ready[2] && MAY_FOLLOW(1) -> ready[2] = 1 }
    :: atomic { !ready[3] && MAY_FOLLOW(2) -> ready[3] = 1 }
#if C > 2
    :: atomic { !ready[4] && MAY_FOLLOW(3) -> ready[4] = 1 }
    :: atomic { !ready[5] && MAY_FOLLOW(4) -> ready[5] = 1 }
#endif
    od
}

proctype receiver(byte c) {
    atomic { flag[c] ->
        assert(stage[SLOT(c,0)] == 1);
        assert(stage[SLOT(c,1)] == 1) }
}

init {
    byte i;
    atomic {
        run gemm();
        do
        :: i < C -> run receiver(i); i++
        :: else -> break
        od;
        i = 0;
        do
        :: i < V -> run warp(); i++
        :: else -> break
        od
    }
}
