"""moe_ops.self_check: every backend and scheme that runs on this machine, against fp64."""
