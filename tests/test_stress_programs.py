"""Short samples of stress_programs.py, and tests that it detects faults."""


import pytest

import epmoe
import stress_programs as stress

pytestmark = pytest.mark.cpu_only
SEED = 31


def numbers_of(size, num, *wrong, has=lambda p: True):
    """The first programs of these kinds: None, "refused", "lost", "ended"."""
    found = (n for n in range(10000) if (p := stress.make_program(SEED, n, size)).wrong in wrong and has(p))
    return [next(found) for _ in range(num)]


def check(result, num):
    done, number, text, _ = result
    assert number is None, text
    assert done == num


def failure(size, number):
    """The text of the failure of a program, whose ranks are threads."""
    done, at, text, _ = stress.stress_threads(SEED, [number], size)
    assert done == 0 and at == number and f"program {number} of seed {SEED}" in text
    return text


# ---- samples ----


@pytest.mark.parametrize("size", [2, 3])
def test_stress_sample(size):
    """Correct programs, and ones in which one rank has a wrong argument. Ranks are threads."""
    numbers = numbers_of(size, 25, None, "refused")
    check(stress.stress_threads(SEED, numbers, size), 25)


def test_stress_sample_of_lost_programs():
    numbers = numbers_of(2, 2, "lost", has=lambda p: p.wrong_how in ("missing", "extra_exchange"))
    check(stress.stress_threads(SEED, [numbers[0], *numbers_of(2, 1, None), numbers[1]], 2), 3)


@pytest.mark.long
@pytest.mark.parametrize("stressed, size", [(stress.stress_threads, 2), (stress.stress_threads, 3),
                                            (stress.stress_processes, 2), (stress.stress_processes, 3)])
def test_stress_long(stressed, size):
    check(stressed(SEED + size, range(150), size), 150)


def test_stress_programs_have_all_kinds():
    programs = [stress.make_program(SEED, n, 2 + n % 2) for n in range(2500)]
    assert {p.threads for p in programs} == {1, 2, 3}
    kinds = {c.kind for p in programs for c in p.calls}
    assert kinds == {*stress.IN_TURN, "step", "ll_step", "moe_step", "ring"}
    refused = {(c.kind, p.wrong_how) for p in programs if p.wrong == "refused"
               for c in p.calls if c.number == p.wrong_call}
    assert refused == {(kind, how) for kind, hows in stress.REFUSED.items() for how in hows}
    lost = {p.wrong_how for p in programs if p.wrong == "lost"}
    assert lost == {"stop", "leave", "missing", "early_end", "grad_mode", "other_exchange",
                    "extra_exchange", "extra_malloc", "extra_plan", "extra_barrier"}
    assert sum(p.wrong is None for p in programs) > 600 and sum(p.wrong == "ended" for p in programs) > 50


# ---- faults ----


def has_kind(kind):
    return lambda p: any(c.kind == kind for c in p.calls)


def test_stress_detects_one_wrong_number(monkeypatch):
    real = epmoe.EPAll2AllLayer.combine

    def combine(self, *arguments):
        y = real(self, *arguments)
        if y.numel():
            y.detach()[-1, -1] += 1  # on all ranks: no rank goes on to a backward
        return y

    number = numbers_of(2, 1, None, has=lambda p: has_kind("step")(p) and not has_kind("moe_step")(p)
                        and not any(c.args.get("backward") for c in p.calls))[0]
    monkeypatch.setattr(epmoe.EPAll2AllLayer, "combine", combine)
    assert "a wrong result: combine: at " in failure(2, number)


@pytest.mark.long
def test_stress_detects_a_call_that_failed_on_one_rank_only(monkeypatch):
    real = epmoe.SymmetricHeap.malloc_symmetric

    def malloc_symmetric(self, *arguments, **options):
        t = real(self, *arguments, **options)
        if self.world.rank:
            raise epmoe.EpMismatch("on this rank only")
        return t

    monkeypatch.setattr(epmoe.SymmetricHeap, "malloc_symmetric", malloc_symmetric)
    text = failure(2, numbers_of(2, 1, None, has=has_kind("malloc"))[0])
    assert "has succeeded on some ranks only: ['ok', 'error']" in text
    assert "ranks have different heaps" in text or "ranks have different tensors" in text


@pytest.mark.long
def test_stress_detects_an_error_that_is_not_told(monkeypatch):
    real = epmoe.World.exchange

    def exchange(self, mine):
        if isinstance(mine, str):
            raise TypeError("not told")
        return real(self, mine)

    number = numbers_of(2, 1, "refused", has=lambda p: p.wrong_how == "type" and p.threads == 1
                        and p.calls[p.wrong_call - len(p.setup)].kind == "exchange")[0]
    monkeypatch.setattr(stress, "PATIENT_S", 1.0)
    monkeypatch.setattr(epmoe.World, "exchange", exchange)
    assert "EpTimeout" in failure(2, number) or "EpMismatch" in failure(2, number)


# ---- the command ----
