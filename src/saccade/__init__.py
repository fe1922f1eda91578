"""Speculative decoding for vision-language models."""
