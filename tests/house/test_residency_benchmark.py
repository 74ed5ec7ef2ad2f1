"""benchmarks/residency.py and links.py on a CPU."""

import pytest
import torch

from tests.support.paths import BENCHMARKS


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import links

    return links


def test_times_between_two_sizes_lie_on_a_line(links):
    link = links.Link([links.Call(400, 8.0, 10.0), links.Call(100, 2.0, 4.0)])
    times = [link.kernel_us(size) for size in (0, 1, 100, 200, 400, 1000)]
    assert times == [0.0, 4.0, 4.0, 6.0, 10.0, 25.0]
    assert link.copy_gb_s == pytest.approx(0.05)


@pytest.mark.parametrize("words", [1, 4096, 10_001])
def test_the_kernel_reads_all(links, monkeypatch, words):
    monkeypatch.setattr(links, "PROGRAMS", 2)
    source = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32)
    target = torch.zeros(words + 1, dtype=torch.int32)
    links.read(source, target[:words])
    assert torch.equal(target[:words], source) and target[words] == 0
