/* The megakernels: communication and a grouped GEMM in one launch, coupled by counts of rows. A
 * `block` process is a CTA, its producer and MMA warps as one. A `mover` process is a communication
 * warp.
 *
 *   OP=1  dispatch + GEMM. Movers send and receive chunks, place rows and count them. A block reads a
 *         tile when the counts say that its rows are placed.
 *   OP=2  GEMM + combine. Blocks produce rows in pieces and count a tile after they have written the
 *         next one. When no tile is left, blocks communicate, too. A communicating worker returns a
 *         chunk when its rows are ready, adds up tokens whose chunks have arrived, and waits for
 *         chunks only if it has nothing left to return.
 *   OP=3  the two operations alternate, with the same words, which the last worker out clears.
 *
 * What must hold, also when a worker faults:
 * - No row is read before it was placed or produced in this operation.
 * - No token is added up before its chunks have arrived.
 * - Counts end at exactly all rows, and are zero between operations.
 * - Every rank ends every operation. An operation that ended without a claim is complete.
 *
 * Mutants:
 *   COUNTFIRST  rows are counted, then placed (or written).
 *   READFIRST   a block reads the rows of a tile, then waits for them.
 *   FLAGFIRST   the flag of a chunk is written before the chunk.
 *   BLINDADD    a token is added up when the rank's own chunk of it has arrived.
 *   NOENTER     no wait for the peer's enter.
 *   NORESET     no worker clears the counts.       KEEPTILES  ... the tile counter.
 *   KEEPFAILED  a failed operation keeps its counts.
 *   FIRSTRESET  the first worker out clears them.
 *   EARLY       the next operation begins with the epoch, not with the end of the kernel.
 *   RECVFIRST   a mover waits for a chunk before it has sent all of its chunks.
 *   NOSENDER    every mover only receives.
 *   ONEROLE     blocks read their tiles, then communicate, and there are no movers.
 *   HOLDS       a mover that waits for a chunk takes a tile and waits for its rows.
 *   HOLDSEND    a mover that holds a chunk to return waits for tokens.
 *   MOVESFIRST  a block communicates, then produces its tiles.
 *   COUNTLATE   a block counts its last tile after it has communicated.
 *   OWNTICKETS  each block of a pair draws tiles by itself.
 *   QUITS       a block whose wait has failed loads no more tiles.
 *   DEAF=1, DEAF=2  the wait for rows, for tokens is not ended by the claim.
 *
 * Correct variants:
 *   PAIRS       rank 0 has two blocks, and each loads half of what both need.
 *   TAIL        one mover only receives, one only sends.
 *   SPLIT       only mover 0 returns chunks (1) or adds up tokens (2).
 *   SERIAL      rows are returned after all are ready.
 *   EXPERT      a tile waits for all rows.
 *   FAULTS=r    rank r may fault (2: either rank).
 *   L, V        blocks and movers of rank 0. Rank 1 has one of each. */
#ifndef OP
#define OP 1
#endif
#ifndef E
#define E 2
#endif
#ifndef S
#define S 1                   /* chunks from each rank to each rank */
#endif
#ifndef R
#define R 2                   /* rows of a chunk at its destination, 1 or 2 */
#endif
#ifndef P
#define P 2                   /* pieces that a row consists of */
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

/* The row of choice k of chunk c of rank w. Two rows share one count. Tiles begin and end
 * between the two rows of a count. With R=2 a chunk has rows of two counts. */
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

/* In one turn a pair processes two tiles, or the last one. */
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
byte out[N];                  /* workers that have left the operation */
byte tiles[N], receives[N], sends[N * N];  /* tasks drawn */
byte ready[N * COUNTS];
byte flag[N * N * S];         /* [dst][src][chunk] */
byte stage[N * N * S];
byte loaded[2];               /* turns loaded by each block of the pair */
bit  claim[N];                /* a worker has recorded a fault */
bit  over[N];                 /* an operation has failed: the rank begins no further one */

/* What the checker knows: the operation that last placed a row, produced a piece of a row, added
 * up the tokens of a chunk; the tiles read in this operation; the workers that have ended. */
byte rows[N * ROWS], made[N * ROWS * P], sums[N * S], read[N], num_ended;

/* A fault occurs once and without a cause, like a timeout that was too short. A wait for a peer
 * that has given up times out. A wait for workers of the same rank has no timeout here: the
 * claim must end it. */
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

/* A block's first tile is its number. It draws the next tile when it starts one. */
inline next_tile(num) {
    draw(tiles[r], num - (r == 0 -> L : 1), n);
    n = (n == NONE -> NONE : n + (r == 0 -> L : 1))
}

/* ---- dispatch + GEMM ---- */

#define HERE  (PEER(recv) == r || flag[CHUNK(r,PEER(recv),recv / N)] == e)
#define WAITS (recv != NONE && !HERE && !may_send)

/* No worker reads a row before its count, so the rows of a chunk are placed in one step, which
 * also sees the flag (see enter_stage.pml). A send task to the own rank does nothing.
 * Alternating between sends and receives is one of the orders that the model allows. */
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

/* Counts only grow until the reader has left, so waiting and reading are one step. A block whose
 * wait has failed reads what is there, and continues. */
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

/* A turn of a pair is loaded when both blocks have loaded their halves, after the previous turn.
 * One block draws for both, and they leave together. */
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

/* No worker reads what is written before its count, so a tile is written in the step that counts
 * the previous one. */
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

/* There is a queue for each peer: a worker first drains its own, then the other. */
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

/* ---- common to all workers ---- */

inline begin_moves(num, has_sends, has_receives) {
    may_send = (has_sends);
    if
    :: has_receives -> draw(receives[r], num, recv)
    :: else
    fi
}

/* A rank has entered an operation when it has left the previous one. */
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
    num_ended++; e = 0;
    do
    :: num_ended == WORKERS(0) + WORKERS(1) && i < N * COUNTS ->
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
