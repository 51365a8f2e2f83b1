# SPDX-License-Identifier: Apache-2.0
"""The run's one certificate: made when a run listens, shown and demanded by everyone who takes part in it.

Nobody signs it and no name is in it that anyone checks. Knowing the run's secret is what lets a host get it; holding
its key is what lets a worker speak to another. It is gone with the run.
"""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Certificate:
    """PEM texts of the certificate and its key."""

    certificate: str
    key: str

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.certificate)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Tickets come behind the handshake, when a client's thread may read them while another sends its first words;
        # OpenSSL is not made for both at once, and one in some thousand connections was never answered.
        context.num_tickets = 0
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """The ssl module reads keys from files only; this one never lies on a disk."""
        descriptor = os.memfd_create("certificate")
        try:
            with open(descriptor, "w", closefd=False) as file:
                file.write(self.certificate.strip() + "\n" + self.key.strip() + "\n")
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


def make_certificate() -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "unisono run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def unverified_client_context() -> ssl.SSLContext:
    """For the first meeting, which the secret verifies: see `unisono.wire.secret`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
