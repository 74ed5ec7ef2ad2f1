"""The speed of one expert layer of a model on a machine, beside the alternatives."""
