"""Ranks and nodes: worlds, the symmetric heap, the rail between nodes, and how errors reach all ranks."""
