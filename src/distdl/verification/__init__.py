"""The proof that a distributed program computes what the sequential one does."""

from distdl.verification.certificate import Certificate, Mismatch
from distdl.verification.verify import verify

__all__ = ["Certificate", "Mismatch", "verify"]
