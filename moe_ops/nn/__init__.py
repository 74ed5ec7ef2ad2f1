"""The layer as a torch.nn.Module, and its configuration."""
