"""API keys authenticate requests. The tenant that holds the key decides which cached prefixes a
request may find, and whose share of the service it counts towards."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError

KEY = re.compile(r"[!-9;-~]{8,512}")  # visible ASCII, no colon
MAX_SALT = 128  # characters


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key. Requests of tenants with different salts share no cached prefix; with
    the fair policy, tenants with different names get equal service."""

    salt: str = ""
    name: str = ""

    def cache_salt(self, requested: str | None) -> str:
        """The cache salt of a request: unique for each pair of a tenant's and a requested salt."""
        if self.salt:
            return self.scoped(requested or "")
        # The colon keeps a client from imitating another tenant's scope in its salt.
        return f":{requested}" if requested else ""

    def scoped(self, name: str) -> str:
        """`name` in this tenant's scope; names themselves have no colon."""
        return f"{len(self.salt)}:{self.salt}:{name}" if self.salt else name

    def unscoped(self, scoped: str) -> str | None:
        """The name in `scoped`; None if it is another tenant's."""
        if not self.salt:
            return None if ":" in scoped else scoped
        scope = self.scoped("")
        return scoped.removeprefix(scope) if scoped.startswith(scope) else None


ANONYMOUS = Tenant()  # of all requests, where no key is configured


class ApiKeys:
    """Owns the digests of the keys; a key itself is neither stored nor shown."""

    def __init__(self, entries: Iterable[str] = (), option: str = "api_key") -> None:
        """`entries` are `KEY` or `KEY:SALT`. Keys with equal salts are one tenant; a key without a
        salt is a tenant of its own. Raises ConfigError about `option`, which does not show the
        key."""
        self._tenants: list[tuple[bytes, Tenant]] = []
        salts: dict[str, str] = {}
        for number, entry in enumerate(entries, start=1):
            key, _, salt = entry.partition(":")
            if KEY.fullmatch(key) is None:
                raise ConfigError(option, f"key {number} is not 8 to 512 visible ASCII characters")
            if len(salt) > MAX_SALT:
                raise ConfigError(option, f"the salt of key {number} exceeds {MAX_SALT}")
            if salts.setdefault(key, salt) != salt:
                raise ConfigError(option, f"key {number} is an earlier one with another salt")
            name = f"salt {salt}" if salt else f"key {number}"
            self._tenants.append((_digest(key), Tenant(salt, name)))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> Tenant | None:
        """The sender of this Authorization header; None if it holds no known key.

        `Bearer KEY`, or `Basic` with the key as password, which browsers can send. The time taken
        reveals nothing about the keys: the digest is compared with all of theirs.
        """
        if not self._tenants:
            return ANONYMOUS
        presented = _digest(_key_in(authorization or ""))
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def read_key_file(path: Path) -> list[str]:
    """The entries of a key file: one per line, except blank lines and comments (#)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", f"{path} cannot be read: {error}") from error
    entries = [line.strip() for line in lines]
    keys = [entry for entry in entries if entry and not entry.startswith("#")]
    if not keys:  # an empty list would disable authentication
        raise ConfigError("api_key_file", f"{path} holds no key")
    return keys


def _key_in(authorization: str) -> str:
    scheme, _, credentials = authorization.partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials, validate=True).decode()
        except ValueError:  # not Base64, or not text in it
            return ""
        return decoded.partition(":")[2]
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
