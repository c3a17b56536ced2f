"""What belongs to neither framework: the contract, its reference and the Triton kernels."""

__version__ = "0.1.0"
