"""Benchmarks, run from a clone: python -m benchmarks --help.

    a2a.py       plan, dispatch and combine for every shape, compared with the peers
    sm.py        dispatch and combine by number of thread blocks
    tokens.py    plan, dispatch and combine by number of tokens, T
    layer.py     a whole layer, fused and unfused, compared with the peers and with its GEMMs alone
    layer_fp8.py a whole layer in FP8 beside 16 bits
    layer_w4.py  a whole layer with weights of 4 bits beside 16 bits and FP8
    growth.py    a whole layer by number of tokens, T
    ablation.py  the effect of each option of the fused kernels
    gemm.py      the grouped GEMMs alone, compared with torch's
    gemm_fp8.py  quantize.py   the grouped GEMMs in FP8, and the quantisation
    overlap.py   what the warps of the fused kernels do, and when
    features.py  the effect of token saving, sorting and pre-reduction
    host.py      host overhead per call
    decode.py    low-latency dispatch and combine, and a decode layer
    decode_w4.py a decode layer with weights of 4 bits beside 16 bits, FP8 and transformers
    train.py     a training step of a layer
    transformers.py   the experts of transformers in one process
    worklog.py   dispatch, y = x * (1 + rank), combine
    side.py      ranks side by side on one GPU
    nodes.py     dispatch and combine over several nodes: the ranks of this machine, cut into nodes
    scale.py     traffic and time over several nodes, computed from rates by epmoe/moe/cost_model.py

    torch_nccl.py  deep_ep.py  deep_ep_v2.py  deep_ep_low_latency.py  unpermute_triton.py
    w4_transformers.py                 the peers
    cli.py  progress.py                the command line and the ranks; the progress bar
    run.py  shapes.py  routing.py      a rank's part; the shapes; which experts the tokens choose
    measure.py  check.py               how times are measured; how results are checked first
    w4.py                              the layers of layer_w4.py and decode_w4.py, and their checks
    report.py  plots.py  figures.py  w4_tables.py   tables and plots, from a file of figures

results/ has the newest figures of each machine: a JSON file each, with one row a line.
"""
