# SPDX-License-Identifier: Apache-2.0
"""What a run that listens needs: an address, a certificate, a secret, and the line that tells people how to join.

Made by the supervisor before anything starts; the coordinator listens, workers use the certificate among each other.
"""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass, field
from typing import Any

from unisono.control import preflight
from unisono.control.facts import facts
from unisono.control.interfaces import addresses, is_loopback, source_address
from unisono.core.errors import UsageError, WrongInterface
from unisono.core.spec import RunSpec
from unisono.wire.certificate import make_certificate
from unisono.wire.secret import new_secret

_EXAMPLE = "give an IP of this machine that the others can reach: --listen 10.0.0.1 or --listen 10.0.0.1:7700"


@dataclass(frozen=True)
class Listening:
    """Nothing at all for a run on one machine."""

    ip: str = ""
    port: int = 0
    secret: str = ""
    credentials: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(spec: RunSpec) -> Listening:
        if not spec.listen:
            return Listening()
        ip, port = choose_address(spec.listen)
        made = make_certificate()
        return Listening(ip, port, new_secret(), {"certificate": made.certificate, "key": made.key})

    @property
    def address(self) -> str:
        name = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{name}:{self.port}" if self.ip else ""

    @property
    def line(self) -> str:
        """What to type on another machine, and a warning where that cannot work."""
        if not self.ip:
            return ""
        alone = f"  (only on this machine: nobody else reaches {self.ip})" if is_loopback(self.ip) else ""
        return f"unisono join {self.address} --secret {self.secret}{alone}"

    def settings(self, spec: RunSpec) -> dict[str, Any]:
        if not self.ip:
            return {}
        return {
            "listen": [self.ip, self.port],
            "secret": self.secret,
            "certificate": self.credentials,
            "facts": facts(spec.script) | {"host": socket.gethostname()},
        }


def choose_address(text: str) -> tuple[str, int]:
    """``auto``, or an address or name of this machine, with a port or not; without one, one that is free now."""
    match = re.fullmatch(r"(\[[^\[\]]+\]|[^:]*|[0-9a-fA-F]*(?::[0-9a-fA-F]*){2,})(?::(\d+))?", text.strip())
    if not match or not match[1]:
        raise UsageError(f"--listen {text} is not an address", do=_EXAMPLE)
    name = match[1].strip("[]")
    ip = _outward_address() if name in ("auto", "0.0.0.0", "::") else preflight.own_address(name, for_others=False)
    try:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.create_server((ip, int(match[2] or 0)), family=family) as probe:
            return ip, int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        taken = "another program listens there" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise UsageError(f"cannot listen on {text}: {reason}", cause=taken, do=_EXAMPLE) from None


def _outward_address() -> str:
    """From which this machine speaks to others, who need one that they can dial. No packet is sent."""
    ip = source_address("192.0.2.1") or next((ip for ip in addresses() if not is_loopback(ip)), "")
    if not ip:
        raise WrongInterface("this machine has no address that others could reach", do="connect it to a network first")
    return ip
