"""Where torch computes over all gradients: over the experts of all ranks, not of one.

torch takes plain gradients for replicas, which are equal on all ranks.  It computes their norm, to clip them,
and GradScaler looks for infinities in them, on each rank by itself.  With different experts the ranks would
get different results: one scales the shared parameters otherwise than the others, or skips a step alone.
torch has no hooks there.  So the first EPMoE with some of the experts wraps the functions below.  They do
what they did before for gradients without experts.
"""

import functools
import sys
import threading

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .parallel_parts import check_sharded
from .shards import before_step, is_dtensor, of_ranks, owners

_lock = threading.Lock()  # ranks may be threads
_is_installed = False


def install():
    """Wrap the functions, once in a process."""
    global _is_installed
    with _lock:
        if _is_installed:
            return
        register_optimizer_step_pre_hook(before_step)
        clip_grad._get_total_norm = _over_experts(clip_grad._get_total_norm)
        clip_grad._clip_grads_with_norm_ = _mesh_by_mesh(clip_grad._clip_grads_with_norm_)
        scaler = torch.amp.GradScaler
        scaler.unscale_ = _of_all_ranks(scaler.unscale_)
        scaler._check_inf_per_device = _of_all_ranks(scaler._check_inf_per_device)
        _is_installed = True


def install_fsdp():
    """Let FSDP2 refuse to shard the tensors of experts over ranks with different ones, once in a process.

    Its module takes seconds to import, so this does nothing where it is not imported.
    """
    sharded = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param"), "FSDPParam", None)
    with _lock:
        if sharded is not None and not hasattr(sharded.__init__, "__wrapped__"):
            sharded.__init__ = _without_experts(sharded.__init__)


def _without_experts(init):
    """Wrap FSDPParam.__init__, which shards a parameter."""

    @functools.wraps(init)
    def wrapper(self, param, *args, **kwargs):
        moe = owners().get(id(param))
        init(self, param, *args, **kwargs)
        if moe is not None:
            check_sharded(moe, self._module_info.param_name, self.sharded_param)

    return wrapper


def _by_world(grads, known):
    """Return [(an EPMoE of a world, the gradients of the experts of this world)], and the other gradients."""
    worlds, others = {}, []
    for grad in grads:
        if (moe := known.get(id(grad))) is None:
            others.append(grad)
        else:
            worlds.setdefault(id(moe.layer.world), (moe, []))[1].append(grad)
    return list(worlds.values()), others


# ---- norms ----


def _over_experts(get_total_norm):
    """Wrap the function with which torch.nn.utils.clip_grad_norm_ computes the norm of gradients."""

    @functools.wraps(get_total_norm)
    def wrapper(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        worlds, others = _by_world(tensors, owners(lambda p: p.grad))
        if not worlds:
            return get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        if not float(norm_type) > 0:
            raise ValueError(f"norm_type {norm_type}: must be positive")
        device, norms = tensors[0].device, _norms(get_total_norm, others, norm_type, foreach)
        for moe, grads in worlds:
            mine = get_total_norm(_norms(get_total_norm, grads, norm_type, foreach), norm_type)
            norms += of_ranks(moe, mine.to(torch.float32)).unbind()
        return get_total_norm([n.to(device, torch.float32) for n in norms], norm_type, error_if_nonfinite)

    return wrapper


def _alike(tensors, grads):
    """Return lists of tensors whose gradients torch can take together: plain ones, and of each mesh."""
    lists = {}
    for t, grad in zip(tensors, grads):
        lists.setdefault(getattr(grad, "device_mesh", None), []).append(t)
    return list(lists.values())


def _mesh_by_mesh(clip_grads_with_norm_):
    """Wrap the function with which clip_grad_norm_ scales gradients.  FSDP shards experts on another mesh."""

    @functools.wraps(clip_grads_with_norm_)
    def wrapper(parameters, max_norm, total_norm, foreach=None):
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        params = [p for p in params if p.grad is not None]
        for alike in _alike(params, [p.grad for p in params]):
            clip_grads_with_norm_(alike, max_norm, total_norm, foreach)

    return wrapper


def _norms(get_total_norm, grads, norm_type, foreach):
    """Return norms that together have the norm of the gradients; of sharded ones over all shards."""
    norms = []
    for alike in _alike(grads, grads):
        norm = get_total_norm(alike, norm_type, False, foreach)
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    return norms


# ---- GradScaler ----


def _of_all_ranks(find_infinities):
    """Wrap a method of GradScaler that looks for infinities in the gradients of an optimizer."""

    @functools.wraps(find_infinities)
    def wrapper(self, optimizer):
        found = find_infinities(self, optimizer)
        if self.is_enabled():
            own = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for moe, _ in _by_world(params, owners())[0]:
                total = sum(t.to(moe.layer.device) for t in own)
                for t in own:
                    t.copy_(of_ranks(moe, total).amax())
        return found

    return wrapper
