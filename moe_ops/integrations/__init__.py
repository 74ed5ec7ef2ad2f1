"""Where moe_ops meets other libraries, one module each; importing this package loads none of them."""
