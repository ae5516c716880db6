"""LoRA adapters: their files, and the low-rank products that they add to linear layers."""
