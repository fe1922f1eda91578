"""Data sets: ready mappings, rows as Hugging Face `datasets` reads them, and the questions made of them."""
