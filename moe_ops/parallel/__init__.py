"""How layers are spread over devices."""
