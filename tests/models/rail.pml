/* The kernels of two nodes of two GPUs: those of a node's team, and those of the rails between the
 * nodes (NCCL). A kernel waits until its peers' kernels of the same operation run, and it keeps its
 * SMs meanwhile. GPU g is on node g / 2 and on rail g % 2. It takes part in the team of its node, and
 * in the rail with the equal local GPU of the other node.
 *
 * One layer over several nodes with C chunks: D is the way out over the rail, X the team's
 * operations, R the way back. X0 are the node's own tokens. Xc needs Dc, and Rc needs Xc. All hosts
 * launch in the order D1 X0 D2 X1 R1 D3 X2 R2 ... XC RC. Rail and team have a stream each, so the
 * order between the streams is only that of the needs. The blocks of a team's kernel start together
 * (the launch is cooperative). The CTAs of a rail's kernel start one by one.
 *
 * What must hold: every GPU ends all operations. Reason: a team's kernel leaves RES SMs free, which
 * are enough for the CTAs of all kernels of NCCL that may run beside it. So each kernel that is next
 * in its stream and has what it needs can start. The lowest operation of the launch order that is not
 * complete has all it needs on every GPU, starts everywhere and ends; then the next.
 *
 * Correct variants:
 *   SERIAL    one stream for both: no reserve is needed. The layer does this without chunks.
 *   OTHER     a third communicator, for example of DistributedDataParallel, runs a kernel on all GPUs
 *             at any time. The reserve counts its CTAs too.
 * Mutants:
 *   RES=0     no reserve: a team's kernel takes all SMs.
 *   RES=1     a reserve that is smaller than the CTAs of a rail.
 *   OTHER RES=2         a reserve without the CTAs of the third communicator.
 *   SERIAL SWAP         GPUs 0 and 3 launch X0 before D1, the others after it. */
#ifndef C
#define C 2                   /* chunks */
#endif
#ifdef OTHER
#define SMS 5                 /* of a GPU */
#else
#define SMS 4
#endif
#define CTAS 2                /* of a rail's kernel, and of the third communicator's */
#ifndef RES
#ifdef OTHER
#define RES 4
#elif defined(SERIAL)
#define RES 0
#else
#define RES 2
#endif
#endif
#define BLOCKS (SMS - RES)    /* of a team's kernel */

#define RAIL(g)     ((g) % 2 * 2 * C + rail_at[g])
#define TEAM(g)     ((g) / 2 * (C + 1) + team_at[g])

/* Operation i of a rail's stream: D1 D2 R1 D3 R2 ... RC. Rc needs Xc, which is operation c of the
 * team's stream. Dc, before R(c-1), is operation 0 or 2c - 3. */
#define IS_HOME(i)  ((i) == 2 * C - 1 || ((i) > 0 && (i) % 2 == 0))
#define CHUNK(i)    ((i) == 2 * C - 1 -> C : (i) / 2)
#define WAY_OUT(c)  ((c) == 1 -> 0 : 2 * (c) - 3)
#define MAY_RAIL(g) (!IS_HOME(rail_at[g]) || team_at[g] > CHUNK(rail_at[g]))
#define MAY_TEAM(g) (team_at[g] == 0 || rail_at[g] > WAY_OUT(team_at[g]))

#ifdef SERIAL
/* With one stream, a kernel starts when all before it in the launch order have ended. X0 is second;
 * then come D2 X1 R1, D3 X2 R2, ..., and XC RC. */
#define ENDED(g)    (rail_at[g] + team_at[g])
#ifdef SWAP
#define X0_FIRST(g) ((g) == 0 || (g) == 3)
#else
#define X0_FIRST(g) false
#endif
#define IS_TEAMS(g) (ENDED(g) == 0 -> X0_FIRST(g) : (ENDED(g) == 1 -> !X0_FIRST(g) : \
                     (ENDED(g) >= 3 * C - 1 -> ENDED(g) == 3 * C - 1 : ENDED(g) % 3 == 0)))
#define TURN_RAIL(g) (!IS_TEAMS(g))
#define TURN_TEAM(g) (IS_TEAMS(g))
#else
#define TURN_RAIL(g) true
#define TURN_TEAM(g) true
#endif

byte room[4] = SMS;           /* SMs that are free */
byte rail_at[4], team_at[4];  /* the operation that is next or runs */
byte ctas[4];                 /* of the rail's kernel, that run */
bit  team_on[4];              /* the team's kernel runs */
byte rail_up[2 * 2 * C];      /* GPUs on which the kernel of this operation runs or has run */
byte team_up[2 * (C + 1)];
#ifdef OTHER
byte other[4];                /* its CTAs that run */
bit  other_done[4];
byte other_up;
#define OTHERS_DONE(g) other_done[g]
#else
#define OTHERS_DONE(g) true
#endif

proctype gpu(byte g) {
    do
    :: atomic { rail_at[g] < 2 * C && MAY_RAIL(g) && TURN_RAIL(g) && ctas[g] < CTAS && room[g] > 0 ->
            room[g]--; ctas[g]++;
            if
            :: ctas[g] == CTAS -> rail_up[RAIL(g)]++
            :: else -> skip
            fi }
    :: atomic { ctas[g] == CTAS && rail_up[RAIL(g)] == 2 ->
            assert(room[g] + CTAS <= SMS);
            room[g] = room[g] + CTAS; ctas[g] = 0; rail_at[g]++ }
    :: atomic { team_at[g] <= C && MAY_TEAM(g) && TURN_TEAM(g) && !team_on[g] && room[g] >= BLOCKS ->
            room[g] = room[g] - BLOCKS; team_on[g] = 1; team_up[TEAM(g)]++ }
    :: atomic { team_on[g] && team_up[TEAM(g)] == 2 ->
            assert(room[g] + BLOCKS <= SMS);
            room[g] = room[g] + BLOCKS; team_on[g] = 0; team_at[g]++ }
#ifdef OTHER
    :: atomic { other[g] < CTAS && !other_done[g] && room[g] > 0 ->
            room[g]--; other[g]++;
            if
            :: other[g] == CTAS -> other_up++
            :: else -> skip
            fi }
    :: atomic { other[g] == CTAS && other_up == 4 ->
            room[g] = room[g] + CTAS; other[g] = 0; other_done[g] = 1 }
#endif
    :: atomic { rail_at[g] == 2 * C && team_at[g] == C + 1 && OTHERS_DONE(g) -> break }
    od;
    assert(room[g] == SMS)
}

init {
    byte i;
    atomic {
        do
        :: i < 4 -> run gpu(i); i++
        :: else -> break
        od
    }
}
