"""A pass for inductor, the usual backend of torch.compile: it keeps the order of epmoe's operations.

Inductor moves operators that share no data, depending on their sizes.  Sizes differ between ranks, but the
order of operations must not.  So in each graph, every operator of epmoe gets a result of the previous one as
its argument `after`.
"""

import operator
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

# The index of each operator's smallest result, or None where it has only one.
_RESULTS = {"nodes_plan": 1, "nodes_out": 1, "nodes_return": 1,
            "plan": None, "dispatch": 1, "combine": 1, "dispatch_gemm": 2, "gemm_combine": 0,
            "experts": 3, "experts_backward_down": 3, "experts_backward_up": 1}


class KeepOrder(CustomGraphPass):
    """Runs the pass or passes that the user has set, if any, and then chains epmoe's operators."""

    def __init__(self, others: Any) -> None:
        self.others: list[Any] = [others] if others else []
        if isinstance(others, (list, tuple)):
            self.others = list(others)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for other in self.others:
            other(graph)
        result_of = {getattr(torch.ops.epmoe, name).default: at for name, at in _RESULTS.items()}
        last: torch.fx.Node | None = None
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in result_of:
                continue
            if last is not None:
                node.kwargs = {**node.kwargs, "after": last}
            last = node
            at = result_of[node.target]
            if at is not None:
                with graph.inserting_after(node):
                    last = graph.call_function(operator.getitem, (node, at))
                last.meta["val"] = node.meta["val"][at]

    def uuid(self) -> Any:
        """Return what a cache of graphs knows this pass by; None, no caching, if another pass has no id."""
        theirs = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in theirs else ("epmoe keeps its order, 1", *theirs)


def keep_order() -> None:
    """Install the pass for all compilations of this process from now on."""
    if not isinstance(config.post_grad_custom_post_pass, KeepOrder):
        config.post_grad_custom_post_pass = KeepOrder(config.post_grad_custom_post_pass)
