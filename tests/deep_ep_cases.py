"""Calls of epmoe's deep_ep.Buffer, and what each rank must receive."""

import pytest
import torch

import epmoe
from cases import generator
from epmoe import reference
from epmoe.integrations import deep_ep

L, K, H, S = 3, 4, 256, 2  # experts of a rank, choices, hidden, scales of a token
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def inputs(rank, size, tokens="unequal", seed=0):
    """Return x [T, H] bfloat16, idx [T, K] with dropped choices, weights [T, K]."""
    g = generator(seed, rank, 7)
    t = {"full": 8, "unequal": (5, 0, 8, 3)[rank % 4], "many": 300 - 7 * rank}[tokens]
    num_experts = L * size
    idx = torch.rand(t, max(num_experts, K), generator=g).topk(K).indices
    idx[(torch.rand(t, K, generator=g) < 0.2) | (idx >= num_experts)] = -1
    return torch.randn(t, H, generator=g).to(BF16), idx, torch.rand(t, K, generator=g)


def scales_of(x):
    """Return x as a pair for FP8, whose scales are column-major as in DeepEP's tests."""
    q, scales = reference.quantize_fp8(x)
    return q, scales.T.contiguous().T


def received(rank, size, **options):
    """Return (x, local idx, weights, token at its source, source) of the rows that a rank must receive."""
    parts = []
    for source in range(size):
        x, idx, weights = inputs(source, size, **options)
        here = (idx >= 0) & (idx // L == rank)
        for t in range(len(x)):
            if here[t].any():
                local = torch.where(here[t], idx[t] - rank * L, -1)
                parts.append((x[t], local, weights[t] * here[t], torch.tensor(t), torch.tensor(source)))
    if not parts:
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.zeros(0, H, dtype=BF16), empty.view(0, K), torch.zeros(0, K), empty, empty
    return tuple(torch.stack(p) for p in zip(*parts))


def on(device, *tensors):
    return [t.to(device) for t in tensors]


def v1_call(buffer, tokens="full", **more):
    """Return the arguments of a dispatch."""
    size = buffer.group_size
    x, idx, weights = on(buffer.device, *inputs(buffer.rank, size, tokens))
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, L * size)
    return dict(x=x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in,
                topk_idx=idx, topk_weights=weights) | more


def check_combined(buffer, call, rows, handle):
    """Combine the rows that a dispatch returned, and check the sums."""
    out = buffer.combine(rows, handle)[0]
    times = call["is_token_in_rank"].sum(1, keepdim=True)
    assert torch.equal(out, (call["x"].float() * times).to(BF16))


def same(a, b):
    """Whether two tensors have the same bits."""
    a, b = a.cpu(), b.cpu()
    bits = [t.reshape(-1).clone().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def rows_to_add(rank, shape, dtype, device):
    """Return rows [T, N, H] whose sums in float32 depend on the order, and two biases, of a rank."""
    g = generator(rank, 11)
    total = torch.randn(2 + shape[1], shape[0], *shape[2:], generator=g)
    total *= 2.0 ** torch.randint(-12, 13, total.shape, generator=g)
    bias_0, bias_1, *rows = total.to(device, dtype)
    return torch.stack(rows, 1), (bias_0, bias_1)


def added(biases, rows, is_there):
    """Return the sum of biases and of rows [T, N, H] where is_there [T, N], in this order, rounded once."""
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for b in biases:
        total = total + b.float()
    for i in range(rows.shape[1]):
        total = torch.where(is_there[:, i, None], total + rows[:, i].float(), total)
    return total.to(rows.dtype)


def settle(buffer):
    """Raise what another rank did wrong. On CUDA a call does not wait for the other ranks."""
    errors = []
    for layer in buffer._layers():  # all, because a refused call is refused in each layer that it uses
        try:
            layer.synchronize()
        except (epmoe.EpError, ValueError) as error:  # ValueError: of what another operation has made
            errors.append(error)
    if errors:  # one operation's error may follow from another's, which uses its results
        raise min(errors, key=lambda error: not isinstance(error, epmoe.PeerError))


def expect(kind, text, fn, *args, **kwargs):
    with pytest.raises(kind, match=text):
        fn(*args, **kwargs)
        buffer = getattr(fn, "__self__", None)
        if isinstance(buffer, (deep_ep.Buffer, deep_ep.ElasticBuffer)) and buffer.device.type == "cuda":
            settle(buffer)
