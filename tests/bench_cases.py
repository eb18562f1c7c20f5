"""What the tests of python -m benchmarks share: the commands, and how a test runs one of them."""

import contextlib
import io
import unittest.mock

import pytest
import torch

from benchmarks import cli, train

# The arguments of each command: small shapes and few runs.
COMMANDS = {
    "a2a": ["--shapes", "mixtral,qwen3-30b", "--num-sm", "2", "--iters", "2"],
    "sm": ["--shapes", "mixtral", "--num-sm", "1,3", "--iters", "1"],
    "tokens": ["--shapes", "seed", "--iters", "1"],
    "layer": ["--shapes", "qwen3-30b,dsv3", "--iters", "1"],
    "growth": ["--shapes", "qwen3-30b", "--iters", "1"],
    "ablation": ["--shapes", "qwen3-30b", "--iters", "1"],
    "features": ["--shapes", "gpt-oss-120b", "--iters", "1"],
    "gemm": ["--shapes", "qwen3-30b", "--iters", "1"],
    "host": ["--iters", "1"],
    "nodes": ["--local-ranks", "1", "--iters", "1"],
    "decode": ["--tokens", "3", "--iters", "1"],
    "train": ["--shapes", "qwen3-30b,mixtral", "--iters", "1"],
    "transformers": ["--shapes", "qwen3-30b,gpt-oss-120b", "--iters", "1"],
    "worklog": ["--iters", "1"],
}


def liger_modules():
    """Stand-ins of the modules of Liger's megakernel. Their kernel is the layer in PyTorch alone."""
    def moe_fused(x, idx, weight, gate, up, down, num_experts, topk):
        assert idx.dtype == torch.int32 and idx.shape[1] == topk and weight.dtype == x.dtype
        layer = train.TorchLayer(idx.long(), num_experts, torch.distributed.get_world_size(),
                                 torch.cat([gate, up], 1), down)
        return layer(x, weight)

    kernels = unittest.mock.MagicMock()
    ops = unittest.mock.MagicMock(moe_fused=moe_fused)
    names = ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.cute", "liger_kernel.ops.cute.ops")
    return {"liger_cute_kernels": kernels} | dict.fromkeys(names, ops)


def run_command(argv):
    """Run this rank's part of a command in this process. Return (rows, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rows = cli.run(cli.parse(argv))
    return rows, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Use the CPU even if the machine has GPUs. Processes that a test starts inherit the setting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPMOE_BACKEND", "cpu")
        yield
