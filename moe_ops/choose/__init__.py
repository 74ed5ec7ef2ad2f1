"""The configs of a layer's kernels: from measured tables, else by rule."""
