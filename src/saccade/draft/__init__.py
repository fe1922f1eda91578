"""Draft trees, the policies that shape them, and the drafters that fill them."""
