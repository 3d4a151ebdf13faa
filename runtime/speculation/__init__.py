"""Speculative decoding: who proposes tokens, how many of them are verified, and which are kept."""
