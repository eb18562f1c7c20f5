"""The layers over several nodes: a symmetric heap on each node, torch.distributed between them."""
