"""What a device is and can do, and how a process is bound to one. Nothing here imports torch on its own."""
