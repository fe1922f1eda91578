"""OpenAI-compatible server over running batches (extra ``serve``); `saccade.serve.app` makes the application."""
