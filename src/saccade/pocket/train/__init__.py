"""How the shipped pocket models were trained: `python -m saccade.pocket.train --out DIR`."""
