"""benchmarks/routing_traces.py: locality of what is drawn, and the LRU that is simulated."""

import numpy as np
import pytest

from tests.support.paths import BENCHMARKS


@pytest.fixture
def traces(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import routing_traces

    return routing_traces


@pytest.mark.parametrize("kind", ["local", "switches", "uniform"])
@pytest.mark.parametrize("experts, top_k", [(128, 8), (10, 4), (4, 4)])
def test_a_token_has_distinct_experts_in_range(traces, kind, experts, top_k):
    trace = traces.Trace(kind, experts, top_k, layers=2, batch=3)
    ids = trace.draw(40)
    assert ids.shape == (40, 2, 3, top_k) and ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < experts
    assert (np.diff(np.sort(ids, -1), axis=-1) > 0).all()
    assert (ids == trace.draw(40)).all(), "drawn by seed"
    another = traces.Trace(kind, experts, top_k, layers=2, batch=3, seed=1)
    assert experts == top_k or (ids != another.draw(40)).any()


def shares(ids):
    """Of a sequence's experts, those of the token before and those of the eight before."""
    last, recent = [], []
    for t in range(8, len(ids)):
        last.append(np.isin(ids[t], ids[t - 1]).mean())
        recent.append(np.isin(ids[t], ids[t - 8 : t]).mean())
    return np.mean(last), np.mean(recent)


def test_locality_is_the_published_one(traces):
    ids = traces.Trace("local", 128, 8, layers=4, batch=2).draw(300)
    for layer in range(4):
        for sequence in range(2):
            last, recent = shares(ids[:, layer, sequence])
            assert last == pytest.approx(0.45, abs=0.04) and recent == pytest.approx(0.8, abs=0.03)
    one = traces.Trace("local", 128, 8, layers=4, batch=1).draw(400)
    counts = traces.simulate(one, round(0.4 * 128), skip=100)
    assert 0.90 < counts.hit_rate < 0.95
    assert 0.4 < counts.misses / (300 * 4) < 0.8


def test_layers_may_differ(traces):
    ids = traces.Trace("local", 128, 8, layers=2, batch=1, repeated=(0.2, 0.7)).draw(300)
    found = [shares(ids[:, layer, 0])[0] for layer in range(2)]
    assert found == pytest.approx([0.2, 0.7], abs=0.04)


def test_a_switch_changes_nearly_all_experts(traces):
    """A random choice of 8 has some 20 % of them."""
    ids = traces.Trace("switches", 128, 8, layers=20, batch=1).draw(3 * traces.SWITCH_STEPS)
    found = [
        np.isin(ids[at, layer], ids[at - 8 : at, layer]).mean()
        for at in (traces.SWITCH_STEPS, 2 * traces.SWITCH_STEPS)
        for layer in range(20)
    ]
    assert np.mean(found) < 0.05


def test_uniform_hits_its_share(traces):
    ids = traces.Trace("uniform", 64, 4, layers=2, batch=1).draw(400)
    assert traces.simulate(ids, 16, skip=50).hit_rate == pytest.approx(0.25, abs=0.04)


def test_lru_keeps_what_a_call_uses(traces):
    bank = traces.Lru(3)
    assert bank.use("abc") == (0, 3)
    assert bank.use("ad") == (1, 1)  # b was used least recently
    assert bank.use("bca") == (2, 1) and list(bank.held) == ["c", "a", "b"]
    assert bank.use("wxyz") == (0, 4) and list(bank.held) == ["x", "y", "z"]


def test_counts_are_those_of_an_lru_by_age(traces):
    """Beside one that looks for the oldest slot."""
    ids = traces.Trace("local", 32, 4, layers=2, batch=2).draw(200)
    hits = misses = 0
    for layer in range(2):
        age = {}
        for step in range(200):
            chosen = set(ids[step, layer].ravel().tolist())
            hits += len(chosen & set(age))
            misses += len(chosen - set(age))
            age |= dict.fromkeys(sorted(chosen & set(age)), step)
            for expert in sorted(chosen - set(age)):
                if len(age) == 9:
                    oldest = min((e for e in age if age[e] < step), key=lambda e: age[e])
                    del age[oldest]
                age[expert] = step
    found = traces.simulate(ids, 9)
    assert found.hits + found.misses == hits + misses
    assert found.hits == pytest.approx(hits, rel=0.01)  # slots of one age fall in any order


def test_one_bank_serves_the_layer_that_needs_it(traces):
    """Of two layers one uses two experts in turn with many, the other always the same."""
    ids = np.zeros((60, 2, 1, 1), np.int32)
    ids[:, 0, 0, 0] = np.arange(60) % 3
    each, one = (traces.simulate(ids, 2, shared, skip=10) for shared in (False, True))
    assert (each.hits, each.misses) == (50, 50)
    assert (one.hits, one.misses) == (100, 0)
