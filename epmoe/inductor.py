"""What inductor, torch.compile's usual backend, has to be told: epmoe's operations keep their order.

It moves operators that no data ties together, as their sizes make it worth; sizes differ from rank to rank, and the order of
operations must not.  So in each of its graphs every operator of epmoe gets a result of the one before it, as `after`.
"""

import operator

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

# The smallest result of each, or None where there is only one.
_RESULTS = {"plan": None, "dispatch": 1, "combine": 1, "dispatch_gemm": 2, "gemm_combine": 0}


class KeepOrder(CustomGraphPass):
    """Behind the pass, or passes, that a user has set, if any."""

    def __init__(self, others):
        self.others = list(others) if isinstance(others, (list, tuple)) else [others] if others else []

    def __call__(self, graph):
        for other in self.others:
            other(graph)
        ours = {getattr(torch.ops.epmoe, name).default: at for name, at in _RESULTS.items()}
        last = None
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in ours:
                continue
            if last is not None:
                node.kwargs = {**node.kwargs, "after": last}
            at, last = ours[node.target], node
            if at is not None:
                with graph.inserting_after(node):
                    last = graph.call_function(operator.getitem, (node, at))
                last.meta["val"] = node.meta["val"][at]

    def uuid(self):
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in theirs else ("epmoe keeps its order, 1", *theirs)


def keep_order():
    """From now on, in this process."""
    if not isinstance(config.post_grad_custom_post_pass, KeepOrder):
        config.post_grad_custom_post_pass = KeepOrder(config.post_grad_custom_post_pass)
