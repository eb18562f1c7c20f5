"""Benchmarks: python -m epmoe.bench --help.

    a2a.py       plan, dispatch and combine for every shape, compared with the peers
    sm.py        dispatch and combine by number of thread blocks
    tokens.py    plan, dispatch and combine by number of tokens, T
    layer.py     a whole layer, fused and unfused, compared with the peers and with its GEMMs alone
    growth.py    a whole layer by number of tokens, T
    ablation.py  the effect of each option of the fused kernels
    gemm.py      the grouped GEMMs alone, compared with torch's
    overlap.py   what the warps of the fused kernels do, and when
    features.py  the effect of token saving, sorting and pre-reduction
    host.py      host overhead per call
    nodes.py     dispatch and combine over several nodes: the ranks of this machine, cut into nodes
    scale.py  scale_model.py   traffic and time over several nodes, computed from rates

    torch_nccl.py  deep_ep.py  unpermute_triton.py   the peers
    cli.py  progress.py                the command line and the ranks; the progress bar
    run.py  shapes.py                  a rank's part; the shapes
    measure.py  check.py               how times are measured; how results are checked first
    report.py  plots.py  figures.py    tables and plots, from a file of figures
"""
