"""What is done to rows around products: they are moved, quantized or rounded, and combined."""
