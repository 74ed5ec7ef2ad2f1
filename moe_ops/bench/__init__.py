"""What a machine gains: one expert layer of a model, beside what people would use instead."""
