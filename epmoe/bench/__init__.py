"""Benchmarks: python -m epmoe.bench --help."""
