"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
Count = Callable[[int, int], None]  # how much is done, of how much
