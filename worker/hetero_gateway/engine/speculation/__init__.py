"""Speculation: tokens that are proposed, so that one step may give a completion several.

Tokens are what they would be without: every proposed one is drawn in its place, and counts only if the draw equals it.

ngram       proposals from what prompt and outputs hold already
speculator  whether a proposal pays, and how long it is to be; what a draft model proposed
"""
