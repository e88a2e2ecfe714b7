"""Linear layers whose products are computed in float8, with scales of complete tensors."""
