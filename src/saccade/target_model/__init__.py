"""The target model after one adapter: prefill, tree verification, KV cache, features."""
