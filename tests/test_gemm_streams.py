"""Launches of the grouped GEMM: in graphs, on several streams and in several threads. Launches that overlap
must not share the number in which they count their tiles.
"""

import ctypes
import functools
import threading

import pytest
import torch

import epmoe
from gemm_cases import BLIND, kernel_names, needs_hopper, problem


@pytest.mark.cuda_only
def test_gemm_in_a_graph_reads_offsets_at_replay(ranks):
    x, weight, _, _, offsets = problem([40, 90], 64, 32, torch.bfloat16, ranks.device, before=0, after=0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    epmoe.grouped_gemm(x, weight, offsets=offsets)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets)
    for first in (40, 0, 130, 77):
        offsets.copy_(torch.tensor([0, first, 130], dtype=torch.int32))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, epmoe.grouped_gemm(x, weight, offsets=offsets)) and not y.isnan().any()


@pytest.mark.cuda_only
def test_gemm_streams_and_graphs_share_nothing(ranks):
    """Concurrent launches have separate counters for their tiles."""
    problems = [problem(sizes, 1024, 512, torch.bfloat16, ranks.device, seed=i, before=0, after=0)
                for i, sizes in enumerate(([300, 0, 5000], [64] * 50, [4096, 1, 777]))]
    want = [epmoe.grouped_gemm(x, weight, offsets=offsets) for x, weight, _, _, offsets in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    graphs = [torch.cuda.CUDAGraph() for _ in problems]
    replayed = []
    torch.cuda.synchronize()
    for graph, (x, weight, _, _, offsets) in zip(graphs, problems):
        with torch.cuda.graph(graph, stream=streams[0]):
            replayed.append(epmoe.grouped_gemm(x, weight, offsets=offsets))
    for _ in range(20):
        got = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x, weight, _, _, offsets = problems[i]
                got.append(epmoe.grouped_gemm(x, weight, offsets=offsets))
                graphs[(i + 1) % len(graphs)].replay()
        torch.cuda.synchronize()
        for result in (got, replayed):
            assert all(torch.equal(a, b) for a, b in zip(result, want))
            for y in result:
                y.fill_(float("nan"))


@pytest.mark.cuda_only
def test_gemm_clears_no_counter_on_any_stream(ranks):
    """A GEMM is one launch. A counter that is cleared for each launch costs a memset more."""
    # With fewer columns its kernel may be that for few columns, which has no counter.
    x, weight, _, _, offsets = problem([40, 0, 9], 256, 32, torch.bfloat16, ranks.device)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            epmoe.grouped_gemm(x, weight, offsets=offsets)
            names = kernel_names(lambda: epmoe.grouped_gemm(x, weight, offsets=offsets))
        if not names:
            pytest.skip(BLIND)
        assert sum("gemm_kernel" in n for n in names) == 1, names
        assert not any("memset" in n.lower() for n in names), names


@pytest.mark.cuda_only
def test_gemm_expected_rows_choose_the_kernel(ranks):
    """A dispatch makes room for more rows than come. The kernel is that for those that come."""
    needs_hopper()
    x, weight, bias, _, offsets = problem([3, 0, 17, 90], 256, 192, torch.bfloat16, ranks.device, after=800)

    def multiply(expected_rows=None):
        return epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, activation="swiglu",
                                  expected_rows=expected_rows)

    if not kernel_names(multiply):
        pytest.skip(BLIND)
    few, = (n for n in kernel_names(lambda: multiply(4 * 24)) if "gemm_kernel" in n)
    for many in (None, 4 * 24 + 1, 2**40):
        other, = (n for n in kernel_names(functools.partial(multiply, many)) if "gemm_kernel" in n)
        assert other != few
    assert torch.equal(multiply(4 * 24)[3:113], multiply()[3:113])


@pytest.mark.cuda_only
def test_gemm_on_more_streams_than_there_are_counters(ranks):
    """Each stream has a counter of its own; the last streams find none. Streams that are created later may
    have the addresses of streams that were destroyed.
    """
    problems = [problem(sizes, 256, 128, torch.bfloat16, ranks.device, seed=i, before=0, after=0)
                for i, sizes in enumerate(([300, 0, 900], [64] * 20, [1000, 1, 77]))]
    want = [epmoe.grouped_gemm(x, weight, offsets=offsets) for x, weight, _, _, offsets in problems]
    cudart = torch.cuda.cudart()
    for count in (300, 40):
        handles = [ctypes.c_uint64() for _ in range(count)]
        for handle in handles:
            assert int(cudart.cudaStreamCreate(ctypes.addressof(handle))) == 0
        torch.cuda.synchronize()
        got = []
        for i, handle in enumerate(handles):
            with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
                x, weight, _, _, offsets = problems[i % len(problems)]
                got.append(epmoe.grouped_gemm(x, weight, offsets=offsets))
        torch.cuda.synchronize()
        for handle in handles:
            assert int(cudart.cudaStreamDestroy(handle.value)) == 0
        assert all(torch.equal(y, want[i % len(problems)]) for i, y in enumerate(got))


@pytest.mark.cuda_only
def test_gemm_of_threads_on_one_stream(ranks):
    """Threads launch on one stream, and each on a stream of its own, at the same time."""
    x, weight, _, _, offsets = problem([300, 0, 900], 256, 128, torch.bfloat16, ranks.device, before=0,
                                       after=0)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets)
    shared, results = torch.cuda.Stream(), []
    torch.cuda.synchronize()

    def multiply():
        own = torch.cuda.Stream()
        for i in range(50):
            with torch.cuda.stream(own if i % 2 else shared):
                results.append(epmoe.grouped_gemm(x, weight, offsets=offsets))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 200 and all(torch.equal(y, want) for y in results)


@pytest.mark.cpu_only
@pytest.mark.parametrize("has_counter", [True, False])
def test_gemm_passes_a_counter_where_the_module_has_none(monkeypatch, has_counter):
    """Launches that are captured may overlap when they are replayed, so each passes a counter of its own."""
    passed = []
    monkeypatch.setattr("epmoe.gemm.grouped.has_kernel", lambda a, b: True)
    monkeypatch.setattr(epmoe._C, "gemm_has_counter", lambda tensor: has_counter)
    monkeypatch.setattr(epmoe._C, "grouped_gemm", lambda *args: passed.append(args[8]))
    x, weight, _, _, offsets = problem([4, 0, 9], 32, 16, torch.bfloat16, "cpu")
    for _ in range(2):
        epmoe.grouped_gemm(x, weight, offsets=offsets)
    if has_counter:
        assert passed == [None, None]
    else:
        assert [(t.dtype, t.tolist()) for t in passed] == [(torch.int64, [0])] * 2
        assert passed[0].data_ptr() != passed[1].data_ptr()


@pytest.mark.cuda_only
def test_gemm_in_graphs_of_reduce_overhead(ranks):
    """With mode="reduce-overhead" torch.compile first runs the function on a separate stream, with a separate
    memory pool. That pool must be empty afterwards.
    """
    x, weight, _, _, offsets = problem([40, 0, 9], 64, 32, torch.bfloat16, ranks.device)
    fast = torch.compile(lambda x: epmoe.grouped_gemm(x, weight, offsets=offsets, activation="gelu") * 2,
                         mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn_like(x)
        got, want = fast(x).clone(), epmoe.grouped_gemm(x, weight, offsets=offsets, activation="gelu") * 2
        begin, end = offsets[0].item(), offsets[-1].item()
        assert torch.equal(got[begin:end], want[begin:end])


@pytest.mark.cuda_only
def test_gemm_as_first_gpu_call_of_a_thread(ranks):
    """A new thread, for example one of autograd, has no current CUDA context."""
    x, weight, _, _, offsets = problem([40, 0, 9], 64, 32, torch.bfloat16, ranks.device)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets)
    got = torch.zeros(len(x), 64, dtype=x.dtype, device=x.device)
    torch.cuda.synchronize()
    errors = []
    counter = torch.zeros(1, dtype=torch.int64, device=x.device)

    def call_gemm():
        try:
            epmoe._C.grouped_gemm(0, (0, 0, 0), 0.0, x, weight, offsets, None, None, counter, got, False,
                                  *[None] * 6, 0, False)
        except epmoe.EpError as e:
            errors.append(e)

    thread = threading.Thread(target=call_gemm)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    begin, end = offsets[0].item(), offsets[-1].item()
    assert not errors and torch.equal(got[begin:end], want[begin:end])
