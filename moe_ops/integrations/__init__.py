"""Where moe_ops meets other libraries, one module each. The package itself loads none."""
