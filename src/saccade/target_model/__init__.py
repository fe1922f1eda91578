"""The target model behind one adapter: prefill, tree verification, KV cache, features."""
