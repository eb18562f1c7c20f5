"""EPMoE: the experts of a Mixture-of-Experts layer, spread over the ranks; a drop-in for a model's own."""

import contextlib
import functools
import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..a2a.fused import EpAll2AllFusedOp
from ..a2a.layer import EPAll2AllLayer
from ..a2a.layer_parts import refuse_layer, together, world_of
from ..comm.device import integer
from ..gemm.activations import is_gated
from ..torch_modes import join_backward
from . import decode as decoding, moe_fp8, moe_map
from .chunks import Chunks
from .moe_arguments import agree, check, check_shared, flatten, unflatten
from .moe_parts import MoeParts
from .parallel_parts import check_flat
from .placement import ExpertMap, check_num_physical
from .shards import load_adopted, save, save_own
from .training import GRADIENT_OPTIONS

# Options of the two layers that EPMoE passes on.
_LAYER_OPTIONS = {name for kind in (EpAll2AllFusedOp, EPAll2AllLayer)
                  for name in inspect.signature(kind).parameters}
_LAYER_OPTIONS -= {"ep_group", "max_tokens", "hidden", "topk", "num_tot_experts", "dtype", "device",
                   "options"}
_OWN_OPTIONS = ("num_physical", "weight_dtype", "num_chunks")


class EPMoE(MoeParts, Chunks, nn.Module):
    """The experts of a Mixture-of-Experts layer, spread over the ranks.

    Letters: W ranks, E experts, P physical experts (E, rounded up to a multiple of W), L = P/W of a rank, K
    choices per token, H hidden, I inner.

    On CUDA it runs the fused kernels of EpAll2AllFusedOp where they exist, elsewhere the same stages one
    after the other.  Creation is collective, except with `layer`; so are forward, backward and finalize.

    Parameters are as checkpoints hold them, out by in: gate_up_proj [L, 2I, H], or [L, I, H] without a gate,
    and down_proj [L, H, I].  Gate rows come first, then up rows; for GPT-OSS they are interleaved.  Where a
    checkpoint holds in by out, as transformers' GptOssExperts does ([E, H, 2I] and [E, I, H]), load it with
    .transpose(1, 2).  With H = I a wrong order raises no error.

    A checkpoint has tensors [E, ...].  load_state_dict() takes the rows of this rank's experts: rank * n up
    to, but not including, (rank + 1) * n, where n is E/W, rounded up.  In state_dict(), where the experts are
    on several ranks of a process group, they are DTensors [E, ...], of which each rank has its rows
    (docs/checkpoints.md).  whole_state_dict puts them together.  Physical experts that hold nothing are zero,
    and in no state dict.

    load_state_dict() also takes the experts one by one, as most checkpoints have them: for each expert e
    e.gate_proj.weight, e.up_proj.weight and e.down_proj.weight, of all experts or of those of this rank.

    FP8: with weight_dtype=torch.float8_e4m3fn the weights are as FP8 checkpoints hold them, with the scales
    gate_up_proj_scale_inv [L, 2I/128, H/128] and down_proj_scale_inv [L, H/128, I/128], float32, each for a
    block of 128 by 128; in a checkpoint with the experts one by one e.gate_proj.weight_scale_inv and so on.
    Weights of 16 or 32 bits are quantised as they are loaded.  Tokens are quantised, too.  There are no
    gradients.  See docs/fp8.md.

    Parameters start uniform in +-1/sqrt(fan-in), as nn.Linear's, each expert with other numbers.  With the
    same seed on all ranks they are those of one process.  They are on the layer's device from the start, also
    inside of torch.device("meta").  copy.deepcopy copies them and shares the communication layer.

    Ranks have different experts, so nothing may make them equal or average their gradients: wrap a model as
    DistributedDataParallel(prepare_ddp(model)).  Their gradients are sums over the tokens of all ranks: for a
    loss that is the mean over ranks, gradient_scale is 1 / W.

    Under autocast, x is cast to the layer's dtype, which is always that of the parameters.

    Args:
        hidden: H.
        inner: I, at least 1.
        num_experts: E.  P is at most 1024.
        topk: K.
        ep_group: A ProcessGroup, a DeviceMesh, a World, Nodes or None, as for EPAll2AllLayer.
        activation: One of reference.activate: "swiglu", SwiGLU(alpha, limit), "relu2" and others.
        max_tokens: The most tokens of a rank in one call.
        dtype: Of parameters and tokens: float32, float16 or bfloat16.
        device: Of parameters and tokens, as for SymmetricHeap.
        bias: Whether to have gate_up_proj_bias [L, 2I] and down_proj_bias [L, H].
        layer: None, or an EpAll2AllFusedOp or EPAll2AllLayer to share with other EPMoE modules of the same
            shapes.  The module then has its ranks, device, max_tokens, capacity and enable_local_combine.
        **options: num_physical: P, a multiple of W, at least E; None: E rounded up.  A larger P is room for
            replicas.  weight_dtype: torch.float8_e4m3fn, or None: dtype.  delay_wgrad_compute: True: the
            backward leaves the gradients of the weights to backward_dw.  fuse_wgrad_accumulation: True: add
            the gradient of a weight p to p.main_grad, which the caller sets, a tensor of p's shape and of
            float32 or p's dtype, and leave p.grad alone; see docs/checkpoints.md.  num_chunks: over several
            nodes, the number of chunks, 1 to 64, in which tokens cross while others are multiplied; None:
            choose_chunks; see docs/nodes.md; only 1 with rail_capacity.  And
            options of EpAll2AllFusedOp, for example capacity, the most rows that a rank can receive; with it,
            and over nodes with rail_capacity, the host reads nothing.  None of them with `layer`.

    Attributes:
        gate_up_proj: A parameter.
        down_proj: A parameter.
        gate_up_proj_bias: A parameter, or None without bias.
        down_proj_bias: A parameter, or None without bias.
        gate_up_proj_scale_inv: A parameter, only in FP8, and so is down_proj_scale_inv.
        weight_dtype: The dtype of the weights.
        is_fp8: Whether it is that of FP8.
        layer: The communication layer.
        num_experts: E.
        expert_map: The ExpertMap of topk_idx, or None where each expert is its own physical one.
        gradient_scale: A number by which the gradients of the parameters are multiplied: 1 by default, 1 / W
            after prepare_ddp.
        last_layout: The EPLayout of the latest call that was not compiled.  None before the first one, and
            after one that took the low-latency path.

    Raises:
        ValueError: On this rank, for an argument out of range, or one that differs from the shared layer's.
        TypeError: On this rank, for an unknown option, or options together with `layer`.
        EpMismatch: On all ranks, when they ask for different layers, inner sizes, activations or biases.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        HeapExhausted: On all ranks, when one of them has no room.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=4, topk=2, dtype=torch.float32, device="cpu", max_tokens=8)
        >>> weights, idx = torch.randn(8, 4).softmax(-1).topk(2)
        >>> y = moe(torch.randn(8, 16), idx, weights)
        >>> y.sum().backward()
        >>> y.shape, moe.down_proj.grad.shape
        (torch.Size([8, 16]), torch.Size([4, 16, 32]))
        >>> moe.finalize()
    """

    def __init__(self, hidden, inner, num_experts, topk, ep_group=None, activation="swiglu", *,
                 max_tokens=4096, dtype=torch.bfloat16, device=None, bias=False, layer=None,
                 **options):
        super().__init__()
        num_physical, weight_dtype, num_chunks = (options.pop(n, None) for n in _OWN_OPTIONS)
        gradients = {name: options.pop(name) for name in GRADIENT_OPTIONS if name in options}
        if layer is not None and options:
            raise TypeError(f"{', '.join(options)}: options of a new layer, but layer= passes one: "
                            f"leave either out")
        heap = options.get("heap")
        world = None
        if layer is None:
            world = world_of(ep_group, heap, options.get("timeout_s"), options.get("local_world_size"))
        try:
            if unknown := sorted(options.keys() - _LAYER_OPTIONS):
                raise TypeError(f"{', '.join(unknown)}: not an option of EPMoE or EpAll2AllFusedOp")
            self._init_gradients(**gradients)
            self._init_chunks(num_chunks, world, options)
            bias = bool(bias)
            halves = 1 + is_gated(activation)  # raises for an unknown activation
            inner = integer("inner", inner)
            if inner < 1:
                raise ValueError(f"inner {inner}: must be positive")
            num_experts = integer("num_experts", num_experts)
            num_physical = check_num_physical(num_experts, (world or layer.world).size, num_physical)
            weight_dtype = moe_fp8.check_weight_dtype(weight_dtype, dtype, hidden, inner, activation)
            if weight_dtype == moe_fp8.E4M3 and self._has_other_gradients:
                raise ValueError(f"{' and '.join(GRADIENT_OPTIONS)}: weights in FP8 have no gradients: leave "
                                 f"these options out")
        except Exception as error:
            if world is not None:
                refuse_layer(world, heap, error)
            raise
        self.activation = activation
        self.weight_dtype = weight_dtype
        self.num_experts = num_experts
        sizes = halves * inner, inner
        if layer is not None:
            check_shared(layer, hidden, topk, num_physical, dtype)
            self._check_room(layer)
            self._make(layer, *sizes, bias)
        else:
            options = self._with_room(world, options, (max_tokens, hidden, inner, num_physical, topk))
            layer = EpAll2AllFusedOp(ep_group, max_tokens, hidden, topk, num_tot_experts=num_physical,
                                     dtype=dtype, device=device, **options)
            try:
                with together(layer.world):
                    self._make(layer, *sizes, bias)
                agree(layer.world, f"inner {inner}, activation {activation!r}, bias {bias}, num_experts "
                                   f"{num_experts}, weight_dtype {weight_dtype}, num_chunks {num_chunks}")
            except Exception:
                with contextlib.suppress(Exception):  # all ranks fail here, so all close the layer
                    layer.finalize()
                raise
        self._register()

    def _make(self, layer, wide, inner, bias):
        """Make what a module has beside its layer.  wide: the rows of gate_up_proj of an expert."""
        self.layer = layer
        layer.is_of_module = True
        self.expert_map = None
        home = self._placed(ExpertMap.home(self.num_experts, layer.world_size, layer.num_experts))
        self._use_map(home, home.physical_to_logical_map.tolist())
        self.gradient_scale = 1.0
        self.last_layout = None
        self._checked_ddp = 0  # id of the DistributedDataParallel that was checked
        local, hidden = layer.num_local_experts, layer.hidden
        shapes = {"gate_up_proj": (local, wide, hidden), "down_proj": (local, hidden, inner)}
        bias_shapes = {"gate_up_proj_bias": (local, wide), "down_proj_bias": (local, hidden)}
        self._make_parameters(shapes, bias_shapes, bias)
        self.reset_parameters()
        self.register_state_dict_post_hook(save_own)

    def reset_parameters(self):
        """Fill each parameter with uniform numbers in +-1/sqrt(fan-in).  Not collective.

        An expert's numbers follow from one random number of torch's generator and from the expert's number e
        among all E.  So with the same seed on all ranks, they do not depend on W.  Empty experts are zero.

        Raises:
            RuntimeError: Where a parametrization or pruning computes a weight.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 16, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe.reset_parameters()
            >>> moe.gate_up_proj.abs().max().item() <= 0.25
            True
            >>> moe.finalize()
        """
        with torch.no_grad():
            self._fill(int(torch.randint(1 << 40, (), device="cpu")))

    @classmethod
    def from_experts(cls, experts, ep_group=None, *, topk=None, **options):
        """Make an EPMoE of the experts of a transformers model, which hold all E experts.  Collective.

        Args:
            experts: A module that use_experts_implementation of transformers has decorated, the same on all
                ranks.  Its parameters are copied.
            ep_group: As for EPMoE.
            topk: K; None: as the experts' configuration says.
            **options: Of EPMoE, for example max_tokens, or weight_dtype, which quantises the copy.

        Returns:
            An EPMoE with the experts of this rank.

        Raises:
            ValueError: On this rank, for experts that EPMoE cannot compute, and as EPMoE.
            EpError: As the creation of an EPMoE.  With `layer`, too, an error of one rank is PeerError on the
                others.

        Examples:
            With a model: epmoe.EPMoE.from_experts(model.model.layers[0].mlp.experts, max_tokens=4096).

            >>> import epmoe
            >>> import torch
            >>> epmoe.EPMoE.from_experts(torch.nn.Linear(2, 2))  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: Linear: wanted the experts of a transformers model, ...
        """
        from ..integrations.transformers_experts import from_experts

        return from_experts(cls, experts, ep_group, topk, options)

    def enable_decode(self, max_tokens):
        """Create a low-latency path for calls with decode=True.  Collective.

        With it, one module prefills and decodes.  Modules that share a layer share the path.  A module of at
        most 512 max_tokens, whose experts get few rows, needs no such call: its calls without gradients take
        the path by themselves.

        Args:
            max_tokens: The most tokens of a rank in a call with decode=True; see LowLatencyAll2All.

        Raises:
            ValueError: On this rank, for max_tokens out of range, or where there is such a path already.
            EpError: As the creation of a LowLatencyAll2All.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe.enable_decode(max_tokens=4)
            >>> with torch.no_grad():
            ...     y = moe(torch.randn(2, 16), torch.tensor([[0], [1]]), torch.ones(2, 1), decode=True)
            >>> y.shape
            torch.Size([2, 16])
            >>> moe.finalize()
        """
        if self.layer.low_latency is not None:
            raise ValueError("this module, or one that shares its layer, has a decode path already")
        self.layer.low_latency = decoding.create(self.layer, max_tokens)

    def set_expert_map(self, expert_map):
        """Move the experts, so that each physical expert holds what a map says.  Collective.

        For inference: with a map, the experts have no gradients, and only whole_state_dict and a
        load_state_dict of all E experts know where they are.  Train and save before, or after
        set_expert_map(None).

        The weights go through symmetric memory, which takes as much memory as the parameters during the call.
        The host waits until they have arrived.  After an error the module has its old map and weights.
        Parameters and the map that forward uses are written in place: CUDA graphs that were captured with a
        map, or where P is not E, use the new one.

        Args:
            expert_map: An ExpertMap of E logical and P physical experts, for example of balance_experts, the
                same on all ranks.  None: back to the experts of state dicts, without replicas.

        Raises:
            ValueError: On this rank, for a map of other sizes.
            TypeError: On this rank, for what is not an ExpertMap.
            RuntimeError: On this rank, for parameters that FSDP has sharded or that were moved or transposed.
            PeerError: On the other ranks, when one rank raises one of these.
            EpMismatch: On all ranks, when they pass different maps.  Nothing was moved.
            HeapExhausted: On all ranks, when one of them has no room.  Nothing was moved.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            The second of two experts gets most tokens, and so the third physical expert.

            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, 2, 1, num_physical=3, dtype=torch.float32, device="cpu")
            >>> moe.set_expert_map(epmoe.balance_experts([1, 5], num_ranks=1, num_physical=3))
            >>> with torch.no_grad():
            ...     y = moe(torch.ones(2, 16), torch.tensor([[1], [1]]), torch.ones(2, 1))
            >>> moe.last_layout.tokens_per_expert.tolist()
            [0, 1, 1]
            >>> moe.finalize()
        """
        moe_map.set_expert_map(self, expert_map)

    def adopt(self, module):
        """Let the parameters and buffers below another module belong to this one's experts.  Not collective.

        All that is below an EPMoE belongs to its experts, for example the parameters of a parametrization:
        DistributedDataParallel and FSDP leave it to its rank, and state dicts and norms have that of all
        ranks.  Adapters of experts that are beside the EPMoE, for example in a module that wraps it, must be
        adopted.  Call it before prepare_ddp, prepare_fsdp and load_state_dict.

        Args:
            module: A module.  What is below another EPMoE inside of it is left out.  FSDP2 over replicas of
                experts needs one that contains this EPMoE.

        Raises:
            TypeError: For what is not a module.
            ValueError: For an EPMoE, and for a module that was adopted before.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> adapters = torch.nn.ParameterDict({"a": torch.zeros(2, 4, 32), "b": torch.zeros(2, 16, 4)})
            >>> moe.adopt(adapters)
            >>> len(epmoe.expert_parameters(torch.nn.ModuleList([moe, adapters])))
            4
            >>> moe.finalize()
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"adopt: wanted a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, EPMoE) or module in self._adopted:
            wrong = "an EPMoE" if isinstance(module, EPMoE) else "was adopted before"
            raise ValueError(f"adopt: {wrong}: its tensors belong to experts in any case")
        self._adopted = *self._adopted, module
        # partial, not a closure: a deep copy of both modules then refers to the copies
        module.register_state_dict_post_hook(functools.partial(save, self))
        module.register_load_state_dict_pre_hook(functools.partial(load_adopted, self))

    def forward(self, x, topk_idx, topk_weights, *, decode=None):
        """Apply the experts to tokens.  Collective, also for a rank without tokens.

        Differentiable in x, topk_weights and the parameters: once in bfloat16 and float16, any number of
        times in float32.  The parameters must require gradients on all ranks or on none: else the ranks'
        backward passes would make different calls, and EpMismatch is raised.  Where they require none, that
        is so for x and topk_weights together, also where a rank has no tokens.  Where they do, x and
        topk_weights may differ between the ranks.

        Args:
            x: [.., H] of the layer's dtype; under autocast of any floating-point dtype.
            topk_idx: [.., K] int32 or int64: the experts of each token.  -1 and E mean dropped.
            topk_weights: [.., K] of a floating-point dtype: the weight of each choice, applied as float32.
                The three have equally many tokens, at most max_tokens.  They need not be contiguous.
            decode: True: take the low-latency path (enable_decode).  False: do not.  None: take it where the
                shape of the module decides so, under torch.no_grad() or in inference mode; with weights in
                FP8 always.  The same on all ranks.  The results have the same bits, with or without it,
                except where the fused kernels are used, and on the CPU in float32 also where a token chooses
                an expert twice: it then has one row there, not two, and torch.mm does not give the same bits
                for every number of rows.

        Returns:
            [.., H] of the layer's dtype: the weighted sum of the experts' outputs of each token.

        Raises:
            ValueError: On this rank, for a wrong shape or device.
            TypeError: On this rank, for a wrong type or dtype.
            RuntimeError: On this rank, where a gradient is wanted of experts in FP8, for decode=True where a
                gradient is wanted or a compiler traces, for gradients of experts after set_expert_map, where
                DistributedDataParallel or FSDP1 has taken the experts for copies, and for parameters without
                a main_grad that fits.
            PeerError: On the other ranks, when one rank raises one of these.
            EpIndexError: As EPAll2AllLayer.preprocess.
            EpOverflow: As EPAll2AllLayer.preprocess.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe(torch.randn(2, 3, 16), torch.zeros(2, 3, 1, dtype=torch.int64), torch.ones(2, 3, 1)).shape
            torch.Size([2, 3, 16])
            >>> moe.finalize()
        """
        if self._has_other_gradients and torch.compiler.is_compiling():
            return self._run_untraced(x, topk_idx, topk_weights, decode)
        return self._run(x, topk_idx, topk_weights, decode)

    def _run(self, x, topk_idx, topk_weights, decode):
        topk = self.layer.topk * self.layer._copies
        path = decoding.path_of(self.layer, decode, self.is_fp8)
        try:
            ddp = DistributedDataParallel._active_ddp_module
            if ddp is not None and id(ddp) != self._checked_ddp:
                self._check_ddp(ddp)
            tokens = flatten("x", x, self.layer.hidden)
            topk_idx = flatten("topk_idx", topk_idx, topk)
            topk_weights = flatten("topk_weights", topk_weights, topk)
            if torch.is_autocast_enabled(self.layer.device.type):
                tokens = tokens.to(self.layer.dtype)
            if torch.Tensor in map(type, (self.gate_up_proj, self.down_proj)):
                check_flat(self)
            moe_fp8.check_parameters(self)
            if self.is_fp8:
                moe_fp8.check_gradients(self, x, topk_weights)
            if decode is not None:
                decoding.check_path(path, decode, tokens, topk_weights, *self.parameters())
            most = self.layer.max_tokens // self.layer._copies if path is None else path.max_tokens
            check(self.layer, most, tokens, topk_idx, topk_weights)
            self._begin_gradients()
            if self.expert_map is not None:
                self._check_gradients()
                topk_idx = self.expert_map.physical(topk_idx, self.layer.rank)
            if path is not None:
                self.last_layout = None
            elif torch.compiler.is_compiling() and tokens.shape[1] != self.layer.hidden:
                tokens = tokens.detach()  # the operator refuses it when it runs; a backward cannot be traced
            else:
                tokens = join_backward(tokens, topk_weights, *self.parameters())
        except Exception as error:
            self._refuse(error, path)
        if path is not None:
            return unflatten(decoding.run(self, path, tokens, topk_idx, topk_weights), x.shape)
        y, layout = self.layer._apply(self, tokens, topk_idx, topk_weights)
        self._set_last_layout(layout)
        return unflatten(y, x.shape)

    def finalize(self):
        """Give the memory of the communication layer back.  Collective; a second call does nothing.

        Raises:
            EpError: As EPAll2AllLayer.finalize.

        Examples:
            >>> import epmoe
            >>> epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu").finalize()
        """
        if self.layer.low_latency is not None:
            self.layer.low_latency.finalize()
            self.layer.low_latency = None  # if the layer cannot be closed, the module works without the path
        self.layer.finalize()
