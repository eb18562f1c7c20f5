"""Benchmarks: python -m epmoe.bench --help.

    a2a.py       plan, dispatch and combine of every shape, beside the peers
    sm.py        the same over thread blocks
    tokens.py    the same over T
    layer.py     a whole layer, fused and not, beside the peers and its GEMMs alone
    growth.py    the same over T
    ablation.py  what each choice in the megakernels brings
    gemm.py      the grouped GEMMs alone, beside torch's
    overlap.py   what the megakernels' warps do, and when
    features.py  what token saving, sorting and pre-reduction bring
    host.py      what a call costs its caller

    torch_nccl.py  deep_ep.py  unpermute_triton.py   the peers
    cli.py  progress.py                the command line and the ranks; how far a bench is
    run.py  shapes.py                  a rank's part; what is measured
    measure.py  check.py               how a time is taken; what is looked at before it is
    report.py  plots.py                the README's table and the plots, from a file of figures
"""
