"""The same layers over several nodes: a symmetric heap on each node, torch.distributed between them."""

from .topology import Nodes

__all__ = ["Nodes"]
