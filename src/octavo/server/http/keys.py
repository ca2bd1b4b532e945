"""API keys: which requests are allowed, whose cached prefixes they may find, and which tenant's
share of the service they take."""

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
        """The salt of a request. No two pairs of salts have the same one."""
        if self.salt:
            return self.scoped(requested or "")
        # A client must not write another tenant's scope into its own salt.
        return f":{requested}" if requested else ""

    def scoped(self, name: str) -> str:
        """A name that is this tenant's own; names themselves have no colon."""
        return f"{len(self.salt)}:{self.salt}:{name}" if self.salt else name

    def unscoped(self, scoped: str) -> str | None:
        """The name in `scoped`; None if it is another tenant's."""
        if not self.salt:
            return None if ":" in scoped else scoped
        scope = self.scoped("")
        return scoped.removeprefix(scope) if scoped.startswith(scope) else None


EVERYBODY = Tenant()


class ApiKeys:
    """Owns the keys, as digests: a key itself is neither kept nor shown."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """`entries` are `KEY` or `KEY:SALT`. Keys with equal salts are one tenant; a key without a
        salt is a tenant of its own. Raises ConfigError, which does not show the key."""
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, entry in enumerate(entries, start=1):
            key, _, salt = entry.partition(":")
            if KEY.fullmatch(key) is None:
                raise ConfigError(
                    "api_key", f"key {number} is not 8 to 512 visible ASCII characters"
                )
            if len(salt) > MAX_SALT:
                raise ConfigError("api_key", f"the salt of key {number} exceeds {MAX_SALT}")
            name = f"salt {salt}" if salt else f"key {number}"
            self._tenants.append((_digest(key), Tenant(salt, name)))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> Tenant | None:
        """The sender of this Authorization header; None if it holds no known key.

        `Bearer KEY`, or `Basic` with the key as password, which is what browsers can send. The
        time taken says nothing about the keys: all of them are compared, by digest.
        """
        if not self._tenants:
            return EVERYBODY
        presented = _digest(_key_in(authorization or ""))
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def read_key_file(path: Path) -> list[str]:
    """The entries of a key file: one a line, blank lines and comments (#) apart."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", f"{path} cannot be read: {error}") from error
    entries = [line.strip() for line in lines]
    keys = [entry for entry in entries if entry and not entry.startswith("#")]
    if not keys:  # without a key everybody may, which is not what somebody with a key file wants
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
