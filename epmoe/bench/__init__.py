"""Benchmarks: python -m epmoe.bench --help.

    a2a.py       plan, dispatch and combine of every shape, beside the peers
    sm.py        the same over thread blocks
    tokens.py    the same over T
    layer.py     a whole layer, unfused, beside the peers and its GEMMs alone
    features.py  what token saving, sorting and pre-reduction bring
    host.py      what a call costs its caller

    torch_nccl.py  deep_ep.py       the peers
    cli.py       the command line and the ranks
    run.py  measure.py  check.py    a rank's part; how a time is taken; what is looked at before it is
    report.py  plots.py             the README's table and the plots, from a file of figures
"""
