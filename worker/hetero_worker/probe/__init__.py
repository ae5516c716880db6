"""How fast this rank is: what it says at Hello, and what the placement is computed from."""
