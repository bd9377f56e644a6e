"""A run's store without a network, to which anybody may write, and what a launcher signs there."""

from __future__ import annotations

from hetexp.core.epoch import SignedStore

SECRET = "5a" * 32


class Store(dict[str, bytes]):
    """Has the methods of torch's store that `SignedStore` needs."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def signed() -> SignedStore:
    """Return an empty store, signed by the launcher."""
    return SignedStore(Store(), SECRET)
