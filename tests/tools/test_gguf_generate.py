"""What llama.cpp's files of a trained model gave, and the table that says so."""

import json

import pytest

from tools import gguf_generate

RESULTS = json.loads(gguf_generate.RESULT.read_text())


@pytest.mark.parametrize("preset", [*gguf_generate.PRESETS])
def test_each_preset_generates_what_it_must(preset):
    gguf_generate.check(RESULTS["presets"][preset])


@pytest.mark.parametrize("preset", [*gguf_generate.PRESETS])
def test_a_gpu_generates_it_too(preset):
    gguf_generate.check(gguf_generate.on_gpu(RESULTS)[preset])


def test_q4_k_m_mixes_types():
    assert RESULTS["model"]["hidden_size"] % 256 == RESULTS["model"]["moe_intermediate_size"] % 256
    assert RESULTS["presets"]["Q4_K_M"]["types"].keys() == {"Q4_K", "Q6_K"}


def test_the_document_has_the_table():
    assert gguf_generate.table(RESULTS) in gguf_generate.DOCUMENT.read_text()
