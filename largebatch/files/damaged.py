"""The exception for a file that cannot be used."""


class Damaged(ValueError):
    """Raised if a file cannot be read or used; the message names it, the reason and the remedy, and is enough."""
