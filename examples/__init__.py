"""Knowledge distillation and draft training with the TVD losses, in PyTorch and in JAX."""
