/* The megakernels: tokens move beside a grouped GEMM, in one launch; counts of
   rows join the two.  A thread block is one process here, its loader and its
   multipliers in one; a mover is another.  OP=1 is dispatch + GEMM: movers
   send and receive chunks, place rows and count them, and a block reads a
   tile when the counts say that its rows stand.  OP=2 is GEMM + combine:
   blocks make rows in pieces, count a tile behind the next, and move when
   there are no more; who moves sends a chunk home when its rows are made, adds
   up tokens whose chunks have come, and waits for those with nothing left to
   send.  OP=3: the two in turn, with the same words, which the last worker out
   clears.
   What must hold: no row is read before it was placed or made in this op, no
   token is added up before its chunks have come, counts end at just all rows
   and are zero between ops, every rank ends every op.  Also when a worker
   faults; and an op that ends without a claim was whole.
   COUNTFIRST  rows are counted, then placed (or written).
   READFIRST   a block reads a tile's rows, then waits for them.
   FLAGFIRST   a chunk's flag before the chunk.
   BLINDADD    a token is added up when the rank's own chunk of it is there.
   NOENTER     no wait for the peer's enter.
   NORESET     nobody clears the counts.    KEEPTILES  ... the tiles drawn.
   KEEPFAILED  a failed op keeps its counts.
   FIRSTRESET  the first worker out clears them.
   EARLY       the next op begins with the epoch, not with the kernel's end.
   RECVFIRST   a mover waits for a chunk before it has sent all.
   NOSENDER    every mover only receives.
   ONEROLE     blocks read their tiles, then move, and nobody else moves.
   HOLDS       a mover with a chunk in hand takes a tile, waits for its rows.
   HOLDSEND    a mover with a chunk to send in hand waits for tokens.
   MOVESFIRST  a block moves, then makes its tiles.
   COUNTLATE   a block counts its last tile when it has moved.
   OWNTICKETS  the blocks of a pair draw tiles each by itself.
   QUITS       a block whose wait has failed loads no more tiles.
   DEAF=1, DEAF=2  the wait for rows, for tokens does not end by the claim.
   Right: PAIRS, rank 0's two blocks each load half of what both need; TAIL,
   one mover only receives, one only sends; SPLIT, only mover 0 sends (1) or
   adds up (2); SERIAL, rows go home when all are made; EXPERT, a tile waits
   for all rows; FAULTS=r, rank r (2: either) may fault.  L, V: blocks, movers
   of rank 0.  Rank 1 has one of each.                                      */
#ifndef OP
#define OP 1
#endif
#ifndef E
#define E 2
#endif
#ifndef S
#define S 1                   /* chunks from each rank to each */
#endif
#ifndef R
#define R 2                   /* rows of a chunk where it goes, 1 or 2 */
#endif
#ifndef P
#define P 2                   /* pieces that a row is made in */
#endif
#ifndef L
#define L 1
#endif
#ifndef V
#define V 1
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef DEAF
#define DEAF 0
#endif
#define N 2
#define NONE 255

#define COMBINES(e)   (OP == 2 || (OP == 3 && (e) % 2 == 0))
#ifdef NOENTER
#define ENTERED(e)    (epoch[r] >= e)
#else
#define ENTERED(e)    (epoch[0] >= e && epoch[1] >= e)
#endif
#ifdef ONEROLE
#define WORKERS(r)    1
#else
#define WORKERS(r)    (r == 0 -> L + V : 2)
#endif

/* Task n is chunk n / N from, or to, rank PEER(n). */
#define TASKS            (N * S)
#define PEER(n)          ((r + n) % N)
#define CHUNK(dst,src,c) (((dst) * N + (src)) * S + (c))

/* The row of choice k of chunk c of rank w.  Two rows have one count, tiles
   begin and end between them, and with R=2 a chunk has rows of two counts. */
#define ROWS          (R * N * S)
#define ROW(k,w,c)    ((k) * N * S + (c) * N + (w))
#define COUNTS        (ROWS / 2)
#define READY(row)    ready[r * COUNTS + (row) / 2]
#define FULL(e)       (COMBINES(e) -> 2 * P : 2)
#define STANDS(row)   (READY(row) >= FULL(e))
#define ALL_STAND     (STANDS(0) && STANDS(ROWS / 2 - 1) && \
                       STANDS(ROWS / 2) && STANDS(ROWS - 1))
#define TILES         (ROWS / 2 + 1)
#define FIRST(t)      ((t) == 0 -> 0 : 2 * (t) - 1)
#define LAST(t)       (2 * (t) < ROWS -> 2 * (t) : ROWS - 1)

/* A pair takes a turn with two tiles, or with the last one. */
#ifdef PAIRS
#define PAIRED        (r == 0)
#define TURNS         (r == 0 -> (TILES + 1) / 2 : TILES)
#define TILE          (r == 1 -> n : \
                       (2 * n + number < TILES -> 2 * n + number : TILES - 1))
#define TILES_READ    (r == 0 -> 2 * TURNS : TILES)
#else
#define PAIRED        false
#define TURNS         TILES
#define TILE          n
#define TILES_READ    TILES
#endif

byte epoch[N] = 1;
byte out[N];                  /* workers that have left the op */
byte tiles[N], receives[N], sends[N * N];  /* tasks drawn */
byte ready[N * COUNTS];
byte flag[N * N * S];         /* [dst][src][chunk] */
byte stage[N * N * S];
byte loaded[2];               /* turns that the blocks of the pair loaded */
bit  claim[N];                /* a worker has met a fault */
bit  over[N];                 /* an op has failed: the rank begins no other */

/* What the checker knows: the op that last placed a row, made a piece of one,
   added up a chunk's tokens; tiles read in this op; workers at their end.  */
byte rows[N * ROWS], made[N * ROWS * P], sums[N * S], read[N], home;

/* A fault comes once and from nowhere, as does a deadline that was too short.
   A wait for a peer that has given up meets its deadline.  A wait for workers
   of the same rank has none here: the claim must end it.                   */
bit  spent;
#ifdef FAULTS
#define MAY_FAULT     (!spent && (r == FAULTS || FAULTS == 2))
#else
#define MAY_FAULT     false
#endif
#define GIVEN_UP      over[1 - r]

inline fault() { spent = 1; claim[r] = 1 }

inline draw(queue, num, n) {
    if
    :: queue < num -> n = queue; queue++
    :: else -> n = NONE
    fi
}

/* A block's first tile is its number; it draws the next as it takes one. */
inline next_tile(num) {
    draw(tiles[r], num - (r == 0 -> L : 1), n);
    n = (n == NONE -> NONE : n + (r == 0 -> L : 1))
}

/* ---- dispatch + GEMM ---- */

#define HERE  (PEER(recv) == r || flag[CHUNK(r,PEER(recv),recv / N)] == e)
#define WAITS (recv != NONE && !HERE && !may_send)

/* Nobody looks at a row before its count, so a chunk's rows are placed in one
   step, and that is the one that sees the flag: see enter_stage.pml.  A send
   task of a rank's own tokens is nothing.  Who sends and receives by turns is
   among those who do as they like.                                         */
inline place_rows() {
    assert(PEER(recv) == r || stage[CHUNK(r,PEER(recv),recv / N)] == e);
    do
    :: k < R -> rows[r * ROWS + ROW(k,PEER(recv),recv / N)] = e; k++
    :: else -> k = 0; break
    od
}
inline count_row() { READY(ROW(k,PEER(recv),recv / N))++; k++ }
inline next_chunk() { k = 0; draw(receives[r], TASKS, recv) }

inline move_tokens() {
    do
    :: atomic { recv == NONE && !may_send -> break }
    :: atomic { may_send && sends[r * N] == S -> may_send = 0 }
#ifdef RECVFIRST
    :: atomic { may_send && sends[r * N] < S && recv == NONE ->
#else
    :: atomic { may_send && sends[r * N] < S ->
#endif
            send = sends[r * N]; sends[r * N]++;
#ifdef FLAGFIRST
            flag[CHUNK(1 - r,r,send)] = e };
        atomic { stage[CHUNK(1 - r,r,send)] = e; send = NONE }
#else
            stage[CHUNK(1 - r,r,send)] = e };
        atomic { flag[CHUNK(1 - r,r,send)] = e; send = NONE }
#endif
#ifdef COUNTFIRST
    :: atomic { recv != NONE && HERE -> count_row() };
        do
        :: atomic { k < R -> count_row() }
        :: atomic { k == R -> k = 0; place_rows(); next_chunk(); break }
        od
#else
    :: atomic { recv != NONE && HERE -> place_rows() };
        do
        :: atomic { k < R - 1 -> count_row() }
        :: atomic { k == R - 1 -> count_row(); next_chunk(); break }
        od
#endif
#ifdef HOLDS
    :: atomic { WAITS -> next_tile(TILES); (n != NONE) };
        atomic { read_tile(); n = 0 }
#endif
    :: atomic { WAITS && claim[r] -> break }
    :: atomic { WAITS && GIVEN_UP -> claim[r] = 1; break }
    :: atomic { MAY_FAULT -> fault(); break }
    od
}

#ifdef EXPERT
#define TILE_STANDS  ALL_STAND
#else
#define TILE_STANDS  (STANDS(FIRST(TILE)) && STANDS(LAST(TILE)))
#endif

inline check_tile() {
    do
    :: FIRST(TILE) + i <= LAST(TILE) ->
        assert(rows[r * ROWS + FIRST(TILE) + i] == e); i++
    :: else -> i = 0; break
    od
}

/* Counts only grow until the reader has left, so waiting and reading are one
   step.  A block whose wait has failed reads what there is, and goes on.   */
inline read_tile() {
    if
#ifdef READFIRST
    :: n < TURNS && ok -> check_tile(); (TILE_STANDS)
#else
    :: n < TURNS && ok && TILE_STANDS -> check_tile()
#endif
#if DEAF != 1
    :: n < TURNS && ok && !TILE_STANDS && claim[r] -> ok = 0
#endif
    :: n < TURNS && ok && !TILE_STANDS && MAY_FAULT -> fault(); ok = 0
    :: n < TURNS && !ok -> skip
    fi;
    read[r]++
}

/* A pair's turn is loaded when both have loaded their halves, behind the turn
   before; one draws for both; and they leave together.                     */
#define MET  (!PAIRED || loaded[1 - number] >= loaded[number])

inline next_turn() {
    if
    :: !PAIRED -> next_tile(TILES)
#ifdef QUITS
    :: PAIRED && !ok -> n = NONE
    :: PAIRED && ok ->
#else
    :: PAIRED ->
#endif
        loaded[number]++;
#ifdef OWNTICKETS
        n = (tiles[r] == 0 -> n + 1 : NONE); tiles[r] = 1
#else
        n++
#endif
    fi
}

inline load_tiles() {
    n = (PAIRED -> 0 : number);
    do
    :: atomic { n >= TURNS && MET -> n = 0; break }
#ifdef PAIRS
    :: atomic { read_tile() };
        atomic { MET -> next_turn() }
#else
    :: atomic { read_tile(); next_tile(TILES) }
#endif
    od
}

/* ---- GEMM + combine ---- */

/* Nobody looks at what is written before its count, so a tile is written in
   one step with counting the one before.                                   */
inline write_tile() {
    do
    :: FIRST(n % TILES) + i <= LAST(n % TILES) ->
        made[(r * ROWS + FIRST(n % TILES) + i) * P + n / TILES] = e; i++
    :: else -> i = 0; break
    od
}
inline count_tile(m) {
    do
    :: m != NONE && FIRST(m % TILES) + i <= LAST(m % TILES) ->
        READY(FIRST(m % TILES) + i)++; i++
    :: else -> i = 0; break
    od
}

inline make_tiles() {
    n = number;
    do
#ifdef COUNTFIRST
    :: atomic { n < TILES * P -> count_tile(n) };
        atomic { write_tile(); next_tile(TILES * P) }
#else
    :: atomic { n < TILES * P ->
            count_tile(last); write_tile(); last = n; next_tile(TILES * P) }
#endif
#ifdef COUNTLATE
    :: atomic { n >= TILES * P -> n = 0; break }
#else
    :: atomic { n >= TILES * P ->
            count_tile(last); last = NONE; n = 0; break }
#endif
    od
}

inline check_made() {
    do
    :: i < R * P ->
        assert(made[(r * ROWS + ROW(i / P,PEER(send),send / N)) * P + i % P]
               == e);
        i++
    :: else -> i = 0; break
    od
}

inline add_up() {
    assert(stage[CHUNK(r,0,recv)] == e);
    assert(stage[CHUNK(r,1,recv)] == e);
    sums[r * S + recv] = e;
    draw(receives[r], S, recv)
}

#define MADE  (STANDS(ROW(0,PEER(send),send / N)) && \
               STANDS(ROW(R - 1,PEER(send),send / N)))
#ifdef BLINDADD
#define COME  (flag[CHUNK(r,r,recv)] == e)
#else
#define COME  (flag[CHUNK(r,0,recv)] == e && flag[CHUNK(r,1,recv)] == e)
#endif
#define WAITS_TO_SEND  (send != NONE && !MADE)
#define WAITS_TO_ADD   (recv != NONE && !COME && !may_send)

/* There is a queue for each peer: a worker has its first, then the other. */
inline next_to_send(first) {
    if
    :: sends[r * N + first] < S ->
        send = N * sends[r * N + first] + first; sends[r * N + first]++
    :: sends[r * N + first] == S && sends[r * N + 1 - (first)] < S ->
        send = N * sends[r * N + 1 - (first)] + 1 - (first);
        sends[r * N + 1 - (first)]++
    :: else -> may_send = 0
    fi
}

inline bring_home(first) {
    do
    :: atomic { recv == NONE && !may_send -> break }
    :: atomic { recv != NONE && COME -> add_up() }
    :: atomic { may_send && send == NONE -> next_to_send(first) }
    :: atomic { send != NONE && MADE ->
            check_made();
#ifdef FLAGFIRST
            flag[CHUNK(PEER(send),r,send / N)] = e };
        atomic { stage[CHUNK(PEER(send),r,send / N)] = e; send = NONE }
#else
            stage[CHUNK(PEER(send),r,send / N)] = e };
        atomic { flag[CHUNK(PEER(send),r,send / N)] = e; send = NONE }
#endif
#ifdef HOLDSEND
    :: atomic { WAITS_TO_SEND && recv != NONE && !COME -> skip };
        atomic { COME -> add_up() }
#endif
    :: atomic { WAITS_TO_SEND && claim[r] -> break }
#if DEAF != 2
    :: atomic { WAITS_TO_ADD && claim[r] -> break }
#endif
    :: atomic { WAITS_TO_ADD && GIVEN_UP -> claim[r] = 1; break }
    :: atomic { MAY_FAULT -> fault(); break }
    od
}

inline combine(first, has_sends, has_receives) {
    if
    :: atomic { !ok -> skip }
#ifdef SERIAL
    :: atomic { ok && !ALL_STAND && claim[r] -> skip }
    :: atomic { ok && ALL_STAND -> begin_moves(S, has_sends, has_receives) };
#else
    :: atomic { ok -> begin_moves(S, has_sends, has_receives) };
#endif
        bring_home(first)
    fi
}

/* ---- what all workers do alike ---- */

inline begin_moves(num, has_sends, has_receives) {
    may_send = (has_sends);
    if
    :: has_receives -> draw(receives[r], num, recv)
    :: else
    fi
}

/* A rank has entered an op as soon as it has left the one before. */
inline enter() {
    if
    :: e <= E && ENTERED(e) -> ok = 1
    :: e <= E && epoch[r] == e && !ENTERED(e) && claim[r] -> ok = 0
    :: e <= E && epoch[r] == e && !ENTERED(e) && GIVEN_UP ->
        claim[r] = 1; ok = 0
    :: e <= E && epoch[r] == e && MAY_FAULT -> fault(); ok = 0
    fi
}

inline clear_ready() {
    do
    :: i < COUNTS -> ready[r * COUNTS + i] = 0; i++
    :: else -> i = 0; break
    od
}

inline clear_local() {
    out[r] = 0; receives[r] = 0; read[r] = 0;
    sends[r * N] = 0; sends[r * N + 1] = 0;
#ifndef KEEPTILES
    tiles[r] = 0;
#endif
    if
    :: r == 0 -> loaded[0] = 0; loaded[1] = 0
    :: else
    fi
}

inline check_op() {
    do
    :: i < COUNTS ->
#if !defined(NORESET) && !defined(FIRSTRESET)
        assert(claim[r] || ready[r * COUNTS + i] == FULL(e));
#endif
        i++
    :: else -> i = 0; break
    od;
    do
    :: i < S && COMBINES(e) -> assert(claim[r] || sums[r * S + i] == e); i++
    :: else -> i = 0; break
    od;
    assert(claim[r] || COMBINES(e) || read[r] == TILES_READ)
}

inline leave() {
    atomic {
        may_send = 0; recv = NONE; send = NONE; ok = 0;
        out[r]++;
#ifdef FIRSTRESET
        if
        :: out[r] == 1 -> clear_ready()
        :: else
        fi;
#endif
        if
        :: out[r] == WORKERS(r) ->
            check_op();
            clear_local();
#if defined(EARLY)
            k = 1;
#elif defined(KEEPFAILED)
            if
            :: !claim[r] -> clear_ready()
            :: else
            fi;
#elif !defined(NORESET) && !defined(FIRSTRESET)
            clear_ready();
#endif
            if
            :: claim[r] -> claim[r] = 0; over[r] = 1
            :: else -> epoch[r]++
            fi
        :: else
        fi;
        e++
    }
#ifdef EARLY
    atomic {
        if
        :: k == 1 -> k = 0; clear_ready()
        :: else
        fi
    }
#endif
}

inline go_home() {
    home++; e = 0;
    do
    :: home == WORKERS(0) + WORKERS(1) && i < N * COUNTS ->
#ifndef NORESET
        assert(ready[i] == 0);
#endif
        i++
    :: else -> i = 0; break
    od
}

proctype block(byte r; byte number) {
    byte e = 1, n, last = NONE, recv = NONE, send = NONE, k, i;
    bit ok, may_send;
    do
    :: atomic { e > E || over[r] -> go_home(); break }
    :: atomic { enter() };
        if
        :: !COMBINES(e) ->
            load_tiles();
#ifdef ONEROLE
            if
            :: atomic { ok -> begin_moves(TASKS, 1, 1) };
                move_tokens()
            :: atomic { !ok -> skip }
            fi
#endif
        :: COMBINES(e) ->
#ifdef MOVESFIRST
            combine(1, 1, 1);
            make_tiles()
#else
            make_tiles();
            combine(1, SPLIT != 1, SPLIT != 2);
#endif
#ifdef COUNTLATE
            atomic { count_tile(last); last = NONE }
#endif
        fi;
        leave()
    od
}

proctype mover(byte r; byte number) {
    byte e = 1, n, recv = NONE, send = NONE, k, i;
    bit ok, may_send;
    do
    :: atomic { e > E || over[r] -> go_home(); break }
    :: atomic { enter() };
        if
        :: COMBINES(e) ->
            combine(number, SPLIT != 1 || number == 0,
                    SPLIT != 2 || number == 0)
        :: atomic { !COMBINES(e) && !ok -> skip }
        :: atomic { !COMBINES(e) && ok ->
#if defined(NOSENDER)
            begin_moves(TASKS, 0, 1)
#elif defined(TAIL)
            begin_moves(TASKS, r == 1 || number == 1, r == 1 || number == 0)
#else
            begin_moves(TASKS, 1, 1)
#endif
            };
            move_tokens()
        fi;
        leave()
    od
}

init {
    atomic {
        run block(0, 0); run block(1, 0);
#if L == 2
        run block(0, 1);
#endif
#ifndef ONEROLE
        run mover(0, 0); run mover(1, 0);
#if V == 2
        run mover(0, 1)
#endif
#endif
    }
}
