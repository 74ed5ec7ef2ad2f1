"""`import moe_ops` is all that transformers needs to know it, before or after its own import."""

import pytest
import torch

pytest.importorskip("transformers")

import moe_ops.integrations.transformers as integration
from tests.house.test_documents import run_python
from tests.integrations.transformers.test_models import IDS, logits, model_of

# each in a process of its own, which has imported torch and no part of transformers
CASES = {
    "nobody imports transformers": """
import moe_ops
assert not {name for name in sys.modules if name.split(".")[0] in ("transformers", "torchao")}
""",
    "before transformers": """
import moe_ops
build()
assert not {name for name in sys.modules if name.startswith("moe_ops.integrations.checkpoints")}
""",
    "after transformers' models": "import transformers.modeling_utils, moe_ops; build()",
    "before peft, which imports transformers": "import moe_ops, peft; build()",
    "a quantized model that was saved": """
import moe_ops, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, want)
""",
    "its configuration alone": """
import moe_ops
from transformers.quantizers.auto import AutoQuantizationConfig
assert AutoQuantizationConfig.from_pretrained(folder).scheme == "int4_w4a16:g32"
assert "transformers.modeling_utils" in sys.modules
""",
    "while another thread imports transformers": """
import threading
thread = threading.Thread(target=importlib.import_module, args=("transformers.modeling_utils",))
thread.start()
import moe_ops
thread.join()
build()
""",
    "where the integration cannot be imported": """
import moe_ops
sys.modules["moe_ops.integrations.transformers.hook"] = None
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import transformers.quantizers
    import peft
(message,) = {str(w.message) for w in warned if "moe_ops" in str(w.message)}
assert "is not registered with transformers 5" in message and "hook" in message, message
""",
}
RUN = """
import importlib, os, sys, traceback, warnings
import torch

folder = sys.argv[1]
ids, want = torch.load(folder + "/expected.pt")

def build():
    import transformers
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        vocab_size=96,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moe_ops")
    assert model.config._experts_implementation == "moe_ops"

failed = []
for name, code in CASES.items():
    child = os.fork()
    if child == 0:
        status = 1
        try:
            exec(code)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(failed)
"""


@pytest.mark.slow  # each imports transformers, for seconds
def test_importing_moe_ops_is_enough(tmp_path):
    pytest.importorskip("peft")
    model = model_of("qwen3_moe")
    integration.quantize(model, "int4_w4a16:g32")
    model.save_pretrained(tmp_path)
    torch.save((IDS, logits(model)), tmp_path / "expected.pt")
    said = run_python(f"CASES = {CASES!r}\n{RUN}", str(tmp_path))
    assert said.splitlines()[-1] == "[]", said
