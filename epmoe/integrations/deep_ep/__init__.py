"""The interface of DeepSeek's DeepEP, on the layers of epmoe.

    import epmoe.integrations.deep_ep as deep_ep

serves programs that were written for DeepEP, on the GPUs of one node and on CPU ranks.  docs/deep_ep.md says
what differs.  DeepEP itself is not needed.
"""

import torch

from .buffer import Buffer
from .config import Config
from .elastic import ElasticBuffer
from .elastic_handle import EPHandle
from .utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64
