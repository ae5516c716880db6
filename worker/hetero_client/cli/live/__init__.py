"""The live picture of `hetero top`: what a group does now, and what befell it since it is watched."""
