"""How the shipped pocket models were trained: `saccade pocket train --out DIR`."""
