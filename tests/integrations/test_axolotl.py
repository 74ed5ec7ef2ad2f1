"""axolotl's plugin, and the check of a configuration that it is for."""

import pytest

pytest.importorskip("axolotl")


def test_the_name_passes_validation_beside_the_plugin():
    base = pytest.importorskip("axolotl.integrations.base")
    args = pytest.importorskip("axolotl.integrations.kernels.args")
    plugin = base.load_plugin("moe_ops.integrations.axolotl.MoEOpsPlugin")
    cfg = {"experts_implementation": "moe_ops"}
    plugin.register(cfg)
    checked = args.KernelsArgs.check_experts_implementation(dict(cfg))
    assert checked["experts_implementation"] == "moe_ops"
    with pytest.raises(ValueError, match="experts_implementation must be 'moe_ops'"):
        plugin.register({})
