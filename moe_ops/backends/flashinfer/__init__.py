"""Backend `flashinfer`."""
